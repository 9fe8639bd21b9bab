"""The closed form of a dense GPT equals the count of the code."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.config.run_config import RunConfig
from megatron.layers.recompute import Recomputation
from megatron.schedules.lower import Program, lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import plan_of_one
from megatron.simulator.costs.count import Begin, Collective, PassCount, RankCount
from megatron.simulator.costs.dense_counts import dense_counts
from megatron.simulator.costs.dense_gpt import DenseGpt
from megatron.simulator.costs.rank_memory import RankMemory, peaks
from megatron.training.planning.count.run import count_ranks

CLOSE = 0.01
"""Share by which bytes may differ: of a kernel, of memory, or, where memory hardly changes, of an
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
    dropout: bool = False
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

    def config(self, stages: int) -> RunConfig:
        job = Job(
            replace(self.options, num_layers=stages * self.layers),
            micro_batch_size=self.batch,
            sequence=self.sequence,
            dropout=0.1 * self.dropout,
        )
        return job.config(self.layout, torch.bfloat16)

    def gpt(self, vocab_size: int) -> DenseGpt:
        return DenseGpt(
            self.hidden,
            self.heads,
            self.sequence,
            vocab_size,
            self.batch,
            self.ffn,
            self.groups,
            self.llama,
            self.dropout,
            self.layout.tensor,
            self.layout.sequence,
            "full" if self.layout.recomputation.group else "none",
        )


WHOLE_LAYERS = Recomputation(group=1)

CASES = {
    "plain": Case(Layout(4, "none"), 32_000, layers=3),
    "one barrier": Case(Layout(4, "vocab-2"), 256_000, layers=2, batch=2),
    "two barriers": Case(Layout(2, "vocab-1"), 128_000, dropout=True),
    "three barriers": Case(Layout(4, "naive")),
    "interlaced": Case(Layout(4, "interlaced"), sequence=2048),
    "interleaved, t = 2": Case(Layout(4, "none", "interleaved", tensor=2), batch=2, dropout=True),
    "zb-v, t = 2, parts of sequences": Case(
        Layout(4, "vocab-1", "zb-v", tensor=2, sequence=True),
        128_000,
        llama=True,
        groups=4,
        ffn=5632,
    ),
    "zb-h1, t = 8": Case(Layout(4, "vocab-2", "zb-h1", tensor=8), 256_000),
    "zb-h1, t = 8, parts of sequences": Case(
        Layout(2, "vocab-2", "zb-h1", tensor=8, sequence=True), 256_000, 4096, 32
    ),
    "t = 8, dropout": Case(Layout(2, "none", tensor=8, sequence=True), 32_000, dropout=True),
    "llama": Case(Layout(4, "vocab-2", "zb-v"), 128_000, llama=True, groups=4, ffn=5632),
    "layers again": Case(Layout(4, "vocab-2", recomputation=WHOLE_LAYERS), layers=2),
    "layers again, ahead": Case(
        Layout(4, "vocab-2", "zb-h1", recomputation=WHOLE_LAYERS, recompute_ahead=1), llama=True
    ),
    "one rank": Case(Layout(1, "vocab-2"), layers=2),
}


@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_is_the_count(name: str) -> None:
    case = CASES[name]
    layout = case.layout
    plan = make_plan(
        layout.schedule, layout.vocabulary, layout.ranks, 8, recompute_ahead=layout.recompute_ahead
    )
    config, layers = case.config(len(plan.stages)), [case.layers] * len(plan.stages)
    gpt, one = case.gpt(config.parallel.padded_vocab_size), plan_of_one(plan)
    counted, closed = count_ranks(config, one, layers), dense_counts(gpt, one, layers)
    for expected, own in zip(counted, closed, strict=True):
        assert own.parameters == expected.parameters
        assert own.reused == pytest.approx(expected.reused, rel=CLOSE)
        _compare_passes(gpt, expected, own)
    program = lower(plan)
    assert _peaks(program, closed) == pytest.approx(_peaks(program, counted), rel=CLOSE)


def _compare_passes(gpt: DenseGpt, expected: RankCount, own: RankCount) -> None:
    """Compare passes and communications."""
    for tables in (
        (expected.passes, own.passes),
        (expected.begun, own.begun),
        (expected.ended, own.ended),
    ):
        theirs, ours = ({str(key): count for key, count in table.items()} for table in tables)
        assert ours.keys() == theirs.keys()
        for key, count in theirs.items():
            found = ours[key]
            assert found.flops == count.flops, key
            assert _collectives(found) == _collectives(count), key
            assert _moved(found) == pytest.approx(_moved(count), rel=CLOSE), key
            close = CLOSE * gpt.activation
            assert found.left == pytest.approx(count.left, rel=CLOSE, abs=close), key
            assert found.peak == pytest.approx(count.peak, rel=CLOSE, abs=close), key


def _collectives(count: PassCount) -> Counter[tuple[Collective, bool]]:
    """Return how often a pass has each collective, and whether it waits for it at once."""
    found: Counter[tuple[Collective, bool]] = Counter()
    for work, times in count.parts:
        for step in work.steps:
            if isinstance(step, Collective):
                found[step, True] += times
            elif isinstance(step, Begin):
                found.update({(each, False): times for each in step.collectives})
    return found


def _moved(count: PassCount) -> int:
    return sum(times * sum(each.bytes for each in work.launches) for work, times in count.parts)


def _peaks(program: Program, counts: Sequence[RankCount]) -> list[float]:
    return peaks(program, [RankMemory(count, 0.0) for count in counts])
