"""Slices between counted ones have the counts that they have when they are counted themselves."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
from planning.count.counting import LLAMA, MODEL, plan_of, run_of

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.recompute import Recomputation
from megatron.model.settings import ModelSettings
from megatron.parallel.context_settings import ContextRankSettings
from megatron.planning.count import run as counting_run
from megatron.planning.count.few_slices import count_few
from megatron.planning.count.rank import CountedRank, Part
from megatron.planning.count.recorder import GRANULE
from megatron.planning.count.run import count_layers
from megatron.planning.count.subject import Subject
from megatron.run.run_config import RunConfig
from megatron.schedules.lower import lower
from megatron.schedules.plan import Plan
from megatron.schedules.settings import OffloadSettings, SliceSettings
from megatron.simulator.costs.count import Launch, RankCount, Segment, Work

LENGTH: Final = 2048
GPT: Final = MODEL.replaced(num_layers=2, seq_length=LENGTH, max_position_embeddings=LENGTH)
GROUPED: Final = replace(LLAMA, num_layers=2, seq_length=LENGTH)
MIXED: Final = GROUPED.replaced(
    num_experts=8,
    moe_ffn_hidden_size=32,
    moe_router_topk=2,
    moe_router_load_balancing_type=("aux_loss", "seq_aux_loss", "global_aux_loss"),
    moe_aux_loss_coeff=(0.1, 0.2, 0.3),
)
LATENT: Final = GROUPED.replaced(num_query_groups=4, multi_latent_attention=True, q_lora_rank=24)
NARROW: Final = EightBitSettings("hybrid", fp8_amax_history_len=4)
MOVED: Final = {"context": ContextRankSettings(2), "offload": OffloadSettings(True, 1)}


def sliced(
    model: ModelSettings, treatment: str, schedule: str, slices: int, options: dict[str, Any]
) -> tuple[RunConfig, Plan]:
    cut = SliceSettings(slices, options.get("strategy"))
    given = {key: own for key, own in options.items() if key != "strategy"}
    layout = {"slices": cut, **given.pop("sizes", {})}
    run = run_of(model, treatment, 2, 2, sizes=layout, **given)
    return run, plan_of(run, schedule, slices=slices)


class Counting:
    """Counts the two stages of a run, and notes the slices that were counted."""

    def __init__(self, run: RunConfig, plan: Plan) -> None:
        self.subject, self.plan = Subject.of(run, plan.slices), plan
        self.counted: list[Sequence[int]] = []

    def rank(self, rank: int, slices: Sequence[int] | None = None) -> CountedRank:
        placement = self.subject.placement(self.plan, [1] * len(self.plan.stages), rank)
        self.counted += [] if slices is None else [slices]
        part = Part(placement, self.subject.recomputation)
        return CountedRank(self.subject, self.plan, rank, part, slices)

    def few(self, rank: int) -> RankCount:
        program = lower(self.plan)
        return count_few(lambda own: self.rank(rank, own).count(program), self.subject.slices)

    def all(self, rank: int) -> RankCount:
        return self.rank(rank).count(lower(self.plan))


@pytest.mark.parametrize(
    ("model", "treatment", "schedule", "slices", "options"),
    [
        (GPT, "vocab-2", "1f1b", 16, {}),
        (GPT, "none", "zb-h1", 8, {"recomputation": Recomputation(group=1)}),
        (GROUPED, "vocab-1", "zb-h1", 8, {"eight_bits": NARROW}),
        (
            GROUPED,
            "vocab-2",
            "1f1b",
            8,
            {"sizes": MOVED},
        ),
        (MIXED, "vocab-2", "zb-h1", 8, {}),
        (MIXED, "none", "1f1b", 16, {"recomputation": Recomputation(group=1)}),
        (LATENT, "vocab-2", "1f1b", 8, {"recomputation": Recomputation(group=1)}),
        (LATENT, "none", "zb-h1", 8, {}),
    ],
)
def test_slices_that_are_left_out_have_their_own_counts(
    model: ModelSettings, treatment: str, schedule: str, slices: int, options: dict[str, Any]
) -> None:
    counting = Counting(*sliced(model, treatment, schedule, slices, options))
    for rank in range(2):
        assert counting.few(rank) == counting.all(rank)
    assert counting.counted == [[0, 1, slices // 2, slices - 2, slices - 1]] * 2


@pytest.mark.parametrize(
    ("slices", "strategy", "window"),
    [(5, "uniform", None), (8, "balanced", None), (8, "uniform", 700)],
    ids=["few", "of other lengths", "within a window"],
)
def test_all_slices_are_counted_where_no_line_leads_through_them(
    slices: int, strategy: str, window: int | None
) -> None:
    model = GROUPED.replaced(window_size=window, seq_length=2560 if slices == 5 else LENGTH)
    options = {"strategy": strategy}
    counting = Counting(*sliced(model, "vocab-2", "1f1b", slices, options))
    assert counting.few(0) == counting.all(0)
    assert counting.counted[-1] == range(slices)


@pytest.mark.parametrize("model", [MIXED, LATENT], ids=["mixture", "latent"])
def test_layers_that_are_counted_apart_have_their_own_counts(
    model: ModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"recomputation": Recomputation(group=1)} if model is MIXED else {}
    run, plan = sliced(model, "vocab-2", "zb-h1", 8, options)
    counting_run._counted_segment.cache_clear()
    found = count_layers(run, plan)[0]
    counting_run._counted_segment.cache_clear()
    monkeypatch.setattr(counting_run, "count_few", lambda count, all_: count(range(len(all_))))
    assert count_layers(run, plan)[0] == found


def segment(*sizes: int, name: str = "product") -> Segment:
    """A count whose slices move these bytes."""
    works = [Work((Launch(name, size),)) for size in sizes]
    return Segment(slices=tuple(Segment({"F": work}) for work in works))


def found_among(counts: Segment) -> tuple[Segment, int]:
    """The count of slices, and how many of them were counted in the end."""
    asked = list[Sequence[int]]()

    def count(numbers: Sequence[int]) -> Segment:
        asked.append(numbers)
        return counts.with_slices([counts.slices[number] for number in numbers])

    return count_few(count, [8] * len(counts.slices)), len(asked[-1])


def test_memory_between_granules_has_all_counted() -> None:
    """A tensor that grows by 64 bytes a slice, rounded up, is on a line at slices 1, 9 and 17."""
    sizes = [-(-64 * number // GRANULE) * GRANULE for number in range(19)]
    assert sizes[9] - sizes[1] == sizes[17] - sizes[9] == 8 * 64
    works = [Work(peak=size, heights=(size,)) for size in sizes]
    counts = Segment(slices=tuple(Segment({"F": work}) for work in works))
    assert found_among(counts) == (counts, 19)


def test_a_slice_off_the_line_has_all_counted() -> None:
    on_line = segment(70, 10, 13, 16, 19, 22, 90)
    assert found_among(on_line) == (on_line, 5)
    for off in (segment(70, 10, 13, 17, 19, 22, 90), segment(70, 10, 13, 16, 19, 23, 90)):
        assert found_among(off) == (off, 7)
    [other] = segment(10, name="sum").slices
    for at in (1, 3, 5):
        slices = [*on_line.slices]
        slices[at] = other
        changed = on_line.with_slices(slices)
        assert found_among(changed) == (changed, 7)
