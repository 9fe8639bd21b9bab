"""The closed form of a dense GPT equals the count of the code, for all that the explorer asks."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.config.run_config import RunConfig
from megatron.layers.recompute import Recomputation
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan, plan_of_one
from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.count import Begin, Collective, PassCount, RankCount
from megatron.simulator.costs.counted_costs import costs_of
from megatron.simulator.costs.dense_gpt import DenseGpt, dense_counts
from megatron.simulator.costs.gpus import GPUS
from megatron.simulator.costs.rank_memory import RankMemory, peaks
from megatron.simulator.simulate import simulate
from megatron.training.planning.count.run import count_ranks

CLOSE = 0.01
"""Share by which seconds and bytes may differ; bytes that a pass keeps, as a share of an
activation."""


@dataclass(frozen=True)
class Case:
    """A model and its layout; ``layers`` of a stage."""

    layout: Layout
    vocab_size: int = 51_200
    hidden: int = 2048
    heads: int = 16
    sequence: int = 1024
    batch: int = 1
    layers: int = 1
    llama: bool = False
    groups: int = 0
    ffn: int = 0

    @property
    def options(self) -> GPTOptions:
        plain = GPTOptions(
            hidden_size=self.hidden,
            ffn_hidden_size=self.ffn or 4 * self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.groups or self.heads,
            kv_channels=self.hidden // self.heads,
            max_position_embeddings=self.sequence,
            vocab_size=self.vocab_size,
            tie_embeddings=False,
        )
        if not self.llama:
            return plain
        return replace(
            plain,
            position_embedding_type="rope",
            normalization="RMSNorm",
            swiglu=True,
            add_bias_linear=False,
        )

    @cached_property
    def plan(self) -> Plan:
        own = self.layout
        return make_plan(
            own.schedule, own.vocabulary, own.ranks, 8, recompute_ahead=own.recompute_ahead
        )

    @property
    def stages(self) -> list[int]:
        return [self.layers] * len(self.plan.stages)

    @property
    def config(self) -> RunConfig:
        options = replace(self.options, num_layers=sum(self.stages))
        job = Job(options, micro_batch_size=self.batch, sequence=self.sequence)
        return job.config(self.layout, torch.bfloat16)

    @cached_property
    def gpt(self) -> DenseGpt:
        return DenseGpt(
            self.hidden,
            self.heads,
            self.groups or self.heads,
            self.ffn or 4 * self.hidden,
            self.sequence,
            self.config.parallel.padded_vocab_size,
            self.batch,
            self.llama,
            recomputes=self.layout.recomputation.group > 0,
        )

    @cached_property
    def counted(self) -> list[RankCount]:
        return count_ranks(self.config, plan_of_one(self.plan), self.stages)

    @cached_property
    def closed(self) -> list[RankCount]:
        return dense_counts(self.gpt, plan_of_one(self.plan), self.stages)


AGAIN = Recomputation(group=1)

CASES = {
    "whole vocabulary": Case(Layout(4, "none"), 32_000, layers=3),
    "one barrier": Case(Layout(4, "vocab-2"), 256_000, layers=2, batch=2),
    "two barriers": Case(Layout(2, "vocab-1"), 128_000),
    "three barriers": Case(Layout(4, "naive"), ffn=6144),
    "interlaced": Case(Layout(4, "interlaced"), sequence=2048),
    "interleaved": Case(Layout(4, "none", "interleaved"), 128_000, 3072, 24, batch=2),
    "split backward": Case(Layout(4, "none", "zb-h1"), 128_000, layers=2, batch=4),
    "long sequences": Case(Layout(2, "vocab-1", "zb-v"), 64_000, 1024, 8, 8192),
    "wide": Case(Layout(2, "vocab-2"), 128_000, 12_288, 96, 2048, layers=2),
    "short sequences": Case(Layout(4, "vocab-2"), 32_000, sequence=512, layers=2),
    "llama": Case(Layout(4, "vocab-2", "zb-v"), 128_000, llama=True, groups=4, ffn=5632),
    "llama, whole vocabulary": Case(
        Layout(4, "none", "v-half"), 128_000, llama=True, batch=2, ffn=5632
    ),
    "llama, two barriers": Case(
        Layout(4, "vocab-1"), 128_256, 4096, 32, 2048, layers=4, llama=True, groups=8, ffn=14_336
    ),
    "grouped queries": Case(Layout(4, "vocab-2", "zb-h1"), 64_000, layers=3, groups=4, ffn=5120),
    "one key for all queries": Case(Layout(2, "vocab-1"), llama=True, groups=1, ffn=5632, layers=2),
    "layers again": Case(Layout(4, "vocab-2", recomputation=AGAIN), layers=2),
    "layers again, ahead": Case(
        Layout(4, "vocab-2", "zb-h1", recomputation=AGAIN, recompute_ahead=1), llama=True
    ),
    "one rank": Case(Layout(1, "vocab-2"), layers=2),
    "one rank, whole vocabulary": Case(Layout(1, "none"), llama=True, layers=2),
}
"""Models and layouts that the explorer offers; it has no others."""


@pytest.fixture(params=list(CASES), scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def test_parameters_products_and_collectives_are_those_of_the_count(case: Case) -> None:
    for expected, own in zip(case.counted, case.closed, strict=True):
        assert own.parameters == expected.parameters
        assert own.held == expected.held
        for theirs, ours in _tables(expected, own):
            assert {key: _products(count) for key, count in ours.items()} == {
                key: _products(count) for key, count in theirs.items()
            }


def test_bytes_are_those_of_the_count(case: Case) -> None:
    """Of all kernels of a pass together, of what it keeps, and of what it takes at most."""
    close = CLOSE * 2 * case.batch * case.sequence * case.hidden
    for expected, own in zip(case.counted, case.closed, strict=True):
        assert own.reused == pytest.approx(expected.reused, rel=CLOSE)
        for theirs, ours in _tables(expected, own):
            for key, count in theirs.items():
                found = ours[key]
                assert _moved(found) == pytest.approx(_moved(count), rel=CLOSE), key
                assert found.left == pytest.approx(count.left, abs=close), key
                assert found.peak == pytest.approx(count.peak, rel=CLOSE, abs=close), key


@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_seconds_are_those_of_the_count(case: Case, gpu: str) -> None:
    """Of every pass, of every communication, and of an iteration."""
    cluster = Cluster(GPUS[gpu].rates, GPUS[gpu].links(), {"column": 8})
    expected, own = (costs_of(counts, case.plan, cluster) for counts in (case.counted, case.closed))
    assert own.passes.keys() == expected.passes.keys()
    for kind in expected.passes:
        for rank, chunk in case.plan.stages:
            time = expected.time(kind, rank, chunk)
            assert own.time(kind, rank, chunk) == pytest.approx(time, rel=CLOSE), (kind, rank)
    for comm, times in expected.comms.items():
        assert own.comms[comm] == pytest.approx(times, rel=CLOSE), comm
    program = lower(case.plan, expected)
    end = simulate(program, expected).end
    assert simulate(program, own).end == pytest.approx(end, rel=CLOSE)


def test_every_rank_holds_as_much_as_the_count_says(case: Case) -> None:
    """Beside parameters and their state, which would hide differences."""
    program = lower(case.plan)
    held = [
        peaks(program, [RankMemory(count, 0.0) for count in counts])
        for counts in (case.counted, case.closed)
    ]
    assert held[1] == pytest.approx(held[0], rel=CLOSE)


Counts = Mapping[Any, PassCount]


def _tables(expected: RankCount, own: RankCount) -> Iterator[tuple[Counts, Counts]]:
    yield expected.passes, own.passes
    yield expected.begun, own.begun
    yield expected.ended, own.ended


def _products(count: PassCount) -> Counter[object]:
    """Return how often a pass has each product and collective, and FLOPs of its attention."""
    found: Counter[object] = Counter()
    for work, times in count.parts:
        for step in work.steps:
            if isinstance(step, Collective):
                found[step, "at once"] += times
            elif isinstance(step, Begin):
                found.update({(each, "beside"): times for each in step.collectives})
        for launch in work.launches:
            if launch.flops:
                found[launch.product, launch.flops, launch.executed or launch.flops] += times
    return found


def _moved(count: PassCount) -> int:
    return sum(times * sum(each.bytes for each in work.launches) for work, times in count.parts)
