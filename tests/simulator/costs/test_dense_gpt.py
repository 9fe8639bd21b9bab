"""The closed form of a dense GPT is close to the count of the code for all the explorer asks."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add
from typing import Any

import pytest
import torch
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.layers.recompute import Recomputation
from megatron.planning.count.run import count_ranks
from megatron.run.run_config import RunConfig
from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import PassKind
from megatron.schedules.plan import Plan, plan_of_one
from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.count import Begin, Collective, Launch, PassCount, RankCount, Work
from megatron.simulator.costs.counted_costs import costs_of
from megatron.simulator.costs.dense_gpt import DenseGpt, dense_counts
from megatron.simulator.costs.gpus import GPUS
from megatron.simulator.costs.rank_memory import RankMemory, peaks
from megatron.simulator.simulate import simulate

CLOSE = 0.01
"""Share of a pass's seconds that kernels for a few numbers of a token take."""

BESIDE_LAYERS: Mapping[PassKind, tuple[int, int]] = {
    "F": (1, 2),
    "B": (7, 9),
    "W": (7, 0),
    "T": (7, 0),
}
"""Kernels, and activations that they move, by which passes of the first and the last stage differ:
those of learned positions are left out, and 7 small ones of the loss are in B in place of T, which
is a part of W where the backward is split and the vocabulary is not."""

OF_A_LAYER = 1, 3
"""The same of a layer's F, R and B: a copy of rotated queries, sums of gradients of vectors."""

HELD = 3
"""Activations by which the peak of a rank may differ: S of Algorithm 2 leaves two parts of a
gradient, which count as one, for up to two microbatches; the third is statistics of tokens."""

RANK_BYTES = 18
"""Bytes of a parameter with its gradient and Adam's state, which a rank holds always."""


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
            own.schedule,
            own.vocabulary,
            own.ranks,
            8,
            recompute_ahead=own.recompute_ahead,
            slices=own.slices,
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
    "slices": Case(Layout(4, "vocab-2", slices=4), 64_000, layers=2, sequence=4096),
    "slices, whole vocabulary": Case(
        Layout(2, "none", "interleaved", slices=2), 32_000, layers=2, batch=2
    ),
    "llama, slices": Case(
        Layout(2, "vocab-1", "zb-h1", slices=8),
        128_000,
        sequence=8192,
        llama=True,
        groups=4,
        ffn=5632,
    ),
    "slices, layers again": Case(
        Layout(2, "vocab-2", recomputation=AGAIN, slices=4), layers=2, sequence=2048, llama=True
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
        # The explorer has no optimizer on the host, which alone asks for the largest parameter.
        assert own.parameters == expected.parameters
        for their, our in ((expected, own), *zip(expected.slices, own.slices, strict=True)):
            assert our.passes.keys() >= their.passes.keys()
            for theirs, ours in _tables(their, our):
                assert {key: _products(ours[key]) for key in theirs} == {
                    key: _products(count) for key, count in theirs.items()
                }


@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_seconds_are_those_of_the_count(case: Case, gpu: str) -> None:
    """Of every pass and communication but for what is left out; of an iteration within 2 %."""
    cluster = Cluster(GPUS[gpu].rates, GPUS[gpu].links(), {"column": 8})
    expected, own = (costs_of(counts, case.plan, cluster) for counts in (case.counted, case.closed))
    for theirs, ours in zip(expected.slices or [expected], own.slices or [own], strict=True):
        _assert_close(case, cluster, theirs, ours)
    program = lower(case.plan, expected)
    end = simulate(program, expected).end
    assert simulate(program, own).end == pytest.approx(end, rel=0.02)


def _assert_close(case: Case, cluster: Cluster, expected: Costs, own: Costs) -> None:
    """Compare the costs of a microbatch, or of a slice of one."""
    layers = case.layers * _seconds(cluster, case, *OF_A_LAYER)
    for kind in expected.passes:
        left_out = _seconds(cluster, case, *BESIDE_LAYERS.get(kind, (1, 0)))
        left_out += layers * (kind in ("F", "R", "B"))
        for rank, chunk in case.plan.stages:
            time = expected.time(kind, rank, chunk)
            close = pytest.approx(time, rel=0, abs=CLOSE * time + left_out)
            assert own.time(kind, rank, chunk) == close, (kind, rank)
    merging = _seconds(cluster, case, 1, 1)  # the kernel that puts statistics together
    for comm, times in expected.comms.items():
        assert own.comms[comm] == pytest.approx(times, rel=CLOSE, abs=merging), comm


def test_every_rank_holds_as_much_as_the_count_says(case: Case) -> None:
    """But for a few activations, and for 1 % with the parameters and what the optimizer keeps."""
    program = lower(case.plan)
    expected, own = (
        peaks(program, [RankMemory(count, 0.0) for count in counts])
        for counts in (case.counted, case.closed)
    )
    assert own == pytest.approx(expected, abs=HELD * _activation(case))
    state = [RANK_BYTES * count.parameters.all for count in case.counted]
    both = [[*map(add, state, held)] for held in (expected, own)]
    assert both[1] == pytest.approx(both[0], rel=0.01)


def test_a_microbatch_leaves_nothing(case: Case) -> None:
    for rank in case.closed:
        tables = rank.passes, rank.begun, rank.ended
        assert sum(count.left for table in tables for count in table.values()) == 0


def _activation(case: Case) -> int:
    return 2 * case.batch * case.sequence * case.hidden


def _seconds(cluster: Cluster, case: Case, kernels: int, activations: int) -> float:
    """Return the time of so many kernels without products, of a microbatch or a slice."""
    size = _activation(case) // case.layout.slices
    one = Launch("others", activations * size // kernels)
    return cluster.seconds(Work((one,) * kernels))


Counts = Mapping[Any, PassCount]


def _tables(expected: RankCount, own: RankCount) -> Iterator[tuple[Counts, Counts]]:
    yield expected.passes, own.passes
    yield expected.begun, own.begun


def _products(count: PassCount) -> Counter[object]:
    """Return how often a pass has each product and collective, and FLOPs of its attention.

    One rank alone has nobody to communicate with; the closed form names its collectives, which
    take no time.
    """
    found: Counter[object] = Counter()
    for work, times in count.parts:
        for step in work.steps:
            if isinstance(step, Collective):
                found[step, "at once"] += times
            elif isinstance(step, Begin):
                several = [each for each in step.collectives if each.ranks > 1]
                found.update({(each, "beside"): times for each in several})
        for launch in work.launches:
            if launch.flops:
                found[launch.product, launch.flops, launch.executed or launch.flops] += times
    return found
