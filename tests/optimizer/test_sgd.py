"""SGD steps against the plain SGD in float64."""

import pytest
import torch
from optimizer.entries import entries, optimizer_of, rates_of
from reference.plain_optimizers import PlainSGD
from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.layers.main_grad import main_grad_of
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.settings import OptimizerSettings

CPU = torch.device("cpu")
SHAPES = {"fc.weight": (6, 4), "fc.bias": (6,), "embedding.word_embeddings.weight": (9, 4)}
LIMIT = 1.0


def config(momentum: float) -> OptimizerSettings:
    return OptimizerSettings(
        lr=0.1, weight_decay=0.3, optimizer="sgd", sgd_momentum=momentum, clip_grad=LIMIT
    )


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-7), (torch.bfloat16, 2**-8)]
)
def test_steps_follow_the_formulas(dtype: torch.dtype, tolerance: float, momentum: float) -> None:
    ours = {name: nn.Parameter(value.to(dtype)) for name, value in drawn(0).items()}
    plain = {name: value.detach().double() for name, value in ours.items()}
    owned = entries(ours.items())
    bucket = Bucket(owned, kernels_for(CPU, dtype))
    optimizer, reference = optimizer_of(config(momentum), owned), PlainSGD(momentum, 0.3)
    for step, lr in enumerate((0.1, 0.05, 0.2)):
        gradients = drawn(step + 1)
        norm = float(torch.cat([value.flatten() for value in gradients.values()]).norm())
        for name, value in gradients.items():
            main_grad_of(ours[name]).copy_(value)
            plain[name].grad = value.double() * min(1.0, LIMIT / (norm + 1e-6))
        optimizer.step(rates_of(config(momentum), lr), norm)
        reference.step(plain, lr)
        bucket.gradients.zero_()
    for name, value in plain.items():
        torch.testing.assert_close(
            ours[name].detach().double(), value, rtol=tolerance, atol=tolerance / 10, msg=name
        )


def test_vocabulary_layers_have_a_rate_of_their_own() -> None:
    ours = {name: nn.Parameter(value) for name, value in drawn(0).items()}
    before = {name: value.detach().clone() for name, value in ours.items()}
    owned = entries(ours.items())
    Bucket(owned, kernels_for(CPU, torch.float32))
    optimizer = optimizer_of(config(0.0), owned)
    for parameter in ours.values():
        main_grad_of(parameter).fill_(1.0)
    optimizer.step(Rates(lr=0.5, vocabulary_lr=0.25, weight_decay=0.0), grad_norm=0.1)
    moved = {name: float((before[name] - ours[name].detach()).mean()) for name in ours}
    expected = {"fc.weight": 0.5, "fc.bias": 0.5, "embedding.word_embeddings.weight": 0.25}
    assert moved == pytest.approx(expected)


def test_what_a_checkpoint_keeps_is_the_state_itself() -> None:
    ours = {name: nn.Parameter(value) for name, value in drawn(0).items()}
    owned = entries(ours.items())
    Bucket(owned, kernels_for(CPU, torch.float32))
    optimizer = optimizer_of(config(0.5), owned)
    main_grad_of(ours["fc.bias"]).fill_(2.0)
    optimizer.step(Rates(0.1, 0.1, 0.0), grad_norm=0.1)
    kept = optimizer.tensors_of("fc.bias")
    assert kept.keys() == {"weight", "momentum_buffer"}
    assert torch.all(kept["momentum_buffer"] == 2.0)
    assert optimizer.steps == 1
