"""Rates and epsilons of the maximal update parametrisation, by kind of weight."""

from typing import Any, Literal

import pytest
import torch
from optimizer.entries import entries, optimizer_of
from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.layers.main_grad import main_grad_of
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.lr_schedule import Rates, learning_rate, rates
from megatron.optimizer.matrix_rates import is_inside
from megatron.optimizer.settings import OptimizerSettings

Kind = Literal["adam", "sgd", "muon"]
INSIDE = ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.router.weight",
          "mtp.layers.0.eh_proj.weight")  # fmt: skip
ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")
OTHERS = ("embedding.position_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.bias")


def config_of(optimizer: Kind, width: float = 4.0, **values: Any) -> OptimizerSettings:
    return OptimizerSettings(
        lr=0.8, min_lr=0.08, optimizer=optimizer, width_mult=width, lr_decay_samples=100,
        weight_decay=0.0, clip_grad=0.0, **values,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "others", "matrices"), [("adam", 1.0, 0.25), ("sgd", 4.0, 1.0), ("muon", 1, 1)]
)
@pytest.mark.parametrize("consumed", [0, 40, 100, 200])
def test_a_rate_is_scaled_with_its_floor(
    optimizer: Kind, others: float, matrices: float, consumed: int
) -> None:
    plain, found = (
        learning_rate(config_of(optimizer), consumed),
        rates(config_of(optimizer), consumed),
    )
    assert (found.lr, found.vocabulary_lr) == pytest.approx((others * plain,) * 2)
    scaled = found.lr if found.matrix_lr is None else found.matrix_lr
    assert scaled == pytest.approx(matrices * plain)


def test_a_warm_up_begins_at_the_same_rate_for_all() -> None:
    config = config_of("adam", lr_warmup_init=0.1, lr_warmup_samples=10)
    found = [rates(config, consumed) for consumed in (0, 5, 10)]
    assert [own.lr for own in found] == pytest.approx([0.1, 0.45, 0.8])
    assert [own.matrix_lr for own in found] == pytest.approx([0.1, 0.15, 0.2])


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_rate_of_the_vocabulary_is_never_scaled(optimizer: Kind) -> None:
    found = rates(config_of(optimizer, decoupled_lr=0.3), 0)
    assert found.vocabulary_lr == pytest.approx(0.3)


def test_at_the_base_width_all_rates_are_the_usual_ones() -> None:
    assert rates(config_of("adam", 1.0), 40) == Rates(0.8 * 0.6 + 0.08 * 0.4, 0.512, 0.0)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_every_kind_of_weight_has_its_rate_and_epsilon(optimizer: Kind) -> None:
    """The first step of Adam is lr g / (|g| + epsilon), and that of SGD lr g."""
    weights = {name: nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
               for name in (*INSIDE, *ENDS, *OTHERS[:1])}  # fmt: skip
    weights[OTHERS[1]] = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    owned = entries(weights.items())
    assert [own.name for own in owned if is_inside(own)] == list(INSIDE)
    Bucket(owned, kernels_for(torch.device("cpu"), torch.float64))
    config = config_of(optimizer, adam_eps=0.2, sgd_momentum=0.0)
    for own in owned:
        main_grad_of(own.parameter).fill_(0.3)
    optimizer_of(config, owned).step(Rates(0.5, 0.25, 0.0, matrix_lr=0.125), grad_norm=1.0)
    for name, weight in weights.items():
        lr = 0.125 if name in INSIDE else 0.25 if name in ENDS else 0.5
        epsilon = 0.05 if name in INSIDE else 0.2
        moved = lr * (0.3 / (0.3 + epsilon) if optimizer == "adam" else 0.3)
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, -moved))
