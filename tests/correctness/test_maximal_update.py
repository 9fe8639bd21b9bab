"""The maximal update parametrisation trains as PyTorch does with rates set by hand, and scales."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

import pytest
import torch
from correctness.rank_runs import RankRun, assemble, train_on_rank
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, Parameters, logits
from reference.plain_training import AdamWOptions, train

from megatron.run.run_config import RunConfig

ONE: Final = Layout(1, "none")
WIDTH: Final = 4.0
MUP: Final = {"use_mup": True, "mup_base_hidden_size": 4, "mup_base_head_dim": 2.0}
OPTIONS: Final = GPTOptions(num_layers=4, vocab_size=37, tie_embeddings=False, swiglu=True)
JOB: Final = Job(
    OPTIONS,
    microbatches=4,
    adamw=AdamWOptions(adam_eps=1e-4, clip_grad=0.5, weight_decay=0.1),
    lr=3e-2,
)
SCALED: Final = replace(OPTIONS, softmax_scale=math.sqrt(2.0) / 4, logit_multiplier=1 / WIDTH)
"""What the plain GPT makes of a width of 16 on a base of 4, heads of 4 on heads of 2."""

Kind = Literal["adam", "sgd"]


class ByHand:
    """PyTorch's AdamW or SGD with the rates of muP, set for each weight by itself."""

    def __init__(self, kind: Kind, weights: Mapping[str, torch.Tensor], width: float) -> None:
        self.kind, self.width = kind, width
        self.by_name = {name: self._made(name, weight) for name, weight in weights.items()}

    def is_inside(self, name: str) -> bool:
        """Whether both dimensions of a weight grow with the width."""
        return ".linear_" in name and name.endswith("weight")

    def _made(self, name: str, weight: torch.Tensor) -> torch.optim.Optimizer:
        decay = 0.1 if weight.dim() > 1 else 0.0
        if self.kind == "sgd":
            return torch.optim.SGD([weight], 1.0, momentum=0.9, weight_decay=decay)
        epsilon = 1e-4 / (self.width if self.is_inside(name) else 1.0)
        return torch.optim.AdamW([weight], 1.0, eps=epsilon, weight_decay=decay)

    def step(self, weights: Mapping[str, torch.Tensor], learning_rate: float) -> None:
        """Update weights from their ``.grad``."""
        for name, optimizer in self.by_name.items():
            factor = 1.0
            if self.kind == "adam" and self.is_inside(name):
                factor = 1 / self.width
            if self.kind == "sgd" and not self.is_inside(name):
                factor = self.width
            optimizer.param_groups[0]["lr"] = learning_rate * factor
            optimizer.step()


def scaled(config: RunConfig, mup: Mapping[str, Any] = MUP) -> RunConfig:
    """The same run in muP, as ``run`` makes it of flags."""
    model = config.model.replaced(**mup)
    width = model.widths.width(model.hidden_size)
    return replace(config, model=model, optimizer=replace(config.optimizer, width_mult=width))


def trained(ranks: RankPool, config: RunConfig, job: Job, layout: Layout) -> list[RankRun]:
    found: list[RankRun] = ranks.run(
        train_on_rank, layout.world_size, config=config, batches=job.batches()
    )
    return found


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("adam", ONE),
        ("sgd", ONE),
        ("adam", Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True)),
        full("adam", Layout(1, "none", replicas=2, sharded=True, overlap=True, bucket_size=3000)),
        full("sgd", Layout(2, "vocab-1", replicas=2, sharded=True)),
    ],
    ids=str,
)
def test_every_layout_trains_as_pytorch_does(kind: Kind, layout: Layout, ranks: RankPool) -> None:
    config = scaled(JOB.config(layout))
    config = replace(config, optimizer=replace(config.optimizer, optimizer=kind))
    by_rank = trained(ranks, config, JOB, layout)
    start = {name: value.double() for name, value in initial_weights(by_rank).items()}
    weights = {name: value.clone().requires_grad_() for name, value in start.items()}
    by_hand = ByHand(kind, weights, WIDTH)

    class Followed:
        """The weights of ``train`` step, and ``by_hand`` has copies of them."""

        def step(self, own: Mapping[str, torch.Tensor], learning_rate: float) -> None:
            for name, weight in own.items():
                assert weight.grad is not None
                weights[name].grad = weight.grad.clone()
            by_hand.step(weights, learning_rate)
            for name, weight in own.items():
                weight.copy_(weights[name])

    expected = train(start, JOB.batches(), JOB.learning_rates(), SCALED, JOB.adamw, Followed())
    assert by_rank[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert max(expected.gradient_norms) > JOB.adamw.clip_grad, "nothing was clipped"
    final = assemble([own.final for own in by_rank])
    for name, value in expected.parameters.items():
        moved = (value - start[name]).norm()
        assert (final[name].double() - value).norm() < 2e-3 * moved, name


def initial_weights(by_rank: list[RankRun]) -> Parameters:
    return assemble([own.initial for own in by_rank])


def test_initial_weights_are_the_usual_ones_scaled_in_every_layout(ranks: RankPool) -> None:
    job = replace(JOB, iterations=4)
    usual = initial_weights(trained(ranks, job.config(ONE), job, ONE))
    for layout in (ONE, Layout(2, "vocab-2", tensor=2)):
        found = initial_weights(trained(ranks, scaled(job.config(layout)), job, layout))
        for name, value in usual.items():
            inside = ".linear_" in name and name.endswith("weight")
            expected = value / math.sqrt(WIDTH) if inside else value
            torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-9, msg=name)


def moves_of(width: int, *, mup: bool, ranks: RankPool) -> list[float]:
    """Mean changes by six steps of Adam: of a coordinate after each layer, and of a logit."""
    options = replace(
        OPTIONS,
        num_layers=2,
        hidden_size=width,
        ffn_hidden_size=2 * width,
        kv_channels=width // 4,
    )
    job = Job(
        options,
        microbatches=2,
        iterations=6,
        warmup=1,
        sequence=8,
        adamw=AdamWOptions(clip_grad=0, weight_decay=0),
        lr=2e-3,
        init_method_std=0.1,
    )
    config = job.config(ONE)
    if mup:
        config = scaled(config, MUP | {"mup_base_hidden_size": 32, "mup_base_head_dim": 8.0})
        factor, scale = 32 / width, math.sqrt(8) / (width // 4)
        options = replace(options, softmax_scale=scale, logit_multiplier=factor)
    config = replace(
        config, optimizer=replace(config.optimizer, lr_decay_style="constant", min_lr=0.0)
    )
    [run] = trained(ranks, config, job, ONE)
    tokens_bs = job.batches()[0][0].tokens
    before, after = (
        coordinates(
            {name: value.double() for name, value in assemble([own]).items()}, tokens_bs, options
        )
        for own in (run.initial, run.final)
    )
    return [float((new - old).abs().mean()) for old, new in zip(before, after, strict=True)]


def coordinates(
    weights: Parameters, tokens_bs: torch.Tensor, options: GPTOptions
) -> list[torch.Tensor]:
    """The normed residual stream [b, s, h] after each layer, and the logits [b, s, V]."""
    same = weights | {"output_layer.weight": torch.eye(options.hidden_size, dtype=torch.float64)}
    streams = [
        logits(same, tokens_bs, replace(options, num_layers=layers, logit_multiplier=1.0))
        for layers in range(1, options.num_layers + 1)
    ]
    return [*streams, logits(weights, tokens_bs, options)]


def test_activations_move_alike_at_every_width(ranks: RankPool) -> None:
    """The coordinate check of the paper; in the usual parametrisation the moves grow."""
    widths = (32, 64, 128, 256)
    by_width = [moves_of(width, mup=True, ranks=ranks) for width in widths]
    usual = [moves_of(width, mup=False, ranks=ranks) for width in widths]
    for narrowest, *wider in zip(*by_width, strict=True):
        assert max(wider) < 1.1 * narrowest
        assert max(wider) < 1.3 * min(wider)
    for narrowest, *_, widest in zip(*usual, strict=True):
        assert widest > 1.5 * narrowest, "nothing would show growth"
