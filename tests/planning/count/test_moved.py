"""Bytes that may wait on the host: all that layers keep; and counting them changes no count."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.kernels.autograd import apply
from megatron.planning.count.run import count_layers, count_ranks
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.offload import handed_over
from megatron.schedules.plan import plan_of_one
from megatron.schedules.settings import OffloadSettings
from megatron.simulator.costs.count import RankCount, Segment

H = S = 4096
CONFIG = Job(
    GPTOptions(
        num_layers=2,
        hidden_size=H,
        ffn_hidden_size=4 * H,
        num_attention_heads=32,
        num_query_groups=32,
        kv_channels=128,
        max_position_embeddings=S,
        vocab_size=512,
    ),
    microbatches=4,
    sequence=S,
).config(Layout(2, "vocab-2", "zb-h1"), torch.bfloat16)
PLAN = make_run_plan(CONFIG)


def offloading(config: RunConfig) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, offload=OffloadSettings(True)))


def held(count: RankCount) -> dict[object, tuple[float, float]]:
    return {key: (own.left, own.peak) for key, own in count.passes.items()}


def test_handles_keep_what_tensors_kept_and_free_it_as_early() -> None:
    one = plan_of_one(PLAN.plan)
    plain, moving = (count_ranks(own, one, PLAN.layers) for own in (CONFIG, offloading(CONFIG)))
    assert [held(count) for count in moving] == [held(count) for count in plain]
    assert [dict(count.moved) for count in plain] == [{}, {}]
    for count in moving:
        assert 0 < count.moved[0] <= count.passes["F", 0].left


def test_the_ratio_of_pipe_offload_follows_from_a_layer() -> None:
    """K = 10 / (3 (6 h + s)) x compute / bandwidth, arXiv 2503.01328, for 20 s h bytes of a layer.

    The layer here keeps 32 s h bytes: the outputs of norms and of the activation function too.
    """
    layer: Segment = count_layers(offloading(CONFIG), plan_of_one(PLAN.plan))[1]
    moved = layer.passes["F"].moved
    flops = sum(work.flops for work in layer.passes.values())
    assert moved == pytest.approx(32 * S * H, rel=0.01)
    assert flops == pytest.approx(12 * S * H * (6 * H + S), rel=0.01)
    compute, bandwidth = 220e12, 15e9
    k = (2 * moved * 20 / 32 / bandwidth) / (flops / compute)
    assert k == pytest.approx(10 / (3 * (6 * H + S)) * compute / bandwidth, rel=0.01)
    assert k == pytest.approx(1.70, abs=0.02)


def test_a_tensor_that_is_on_the_host_already_stays_there() -> None:
    """PyTorch's memory-efficient attention keeps its seed of dropout on the host, and reads it."""

    class KeepsASeed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, torch.tensor(7))
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            x, seed = ctx.saved_tensors
            assert (x.device.type, seed.item()) == ("meta", 7)
            return grad

    x = torch.ones(3, device="meta", requires_grad=True)
    seen = list[int]()
    with handed_over(torch.device("meta"), frozenset(), seen=seen.append):
        y: torch.Tensor = apply(KeepsASeed, x)
    y.sum().backward()
    assert seen == [x.nbytes]
