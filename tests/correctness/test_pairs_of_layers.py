"""Any two neighbours in a pair leave the same bits as one after the other, at every collective."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from correctness.cover import Case, cover
from correctness.joined_jobs import in_pairs, same, switched
from correctness.short_runs import EIGHT_LAYER_GPT as GPT
from correctness.short_runs import EIGHT_LAYER_LLAMA as LLAMA
from correctness.short_runs import Job, Layout
from correctness.test_experts import PARTS, WHOLE
from harness.rank_pool import RankPool
from schedules.paired import kinds_of_pairs, paired

from megatron.layers.recompute import NO_RECOMPUTATION
from megatron.planning.run_plan import make_run_plan

QUICK: Final = [
    Layout(2, "vocab-2", "zb-v", tensor=2, sequence=True),
    Layout(1, "none", "zb-h1", tensor=2),
    Layout(1, "vocab-1", "1f1b", tensor=2, sequence=True, recomputation=PARTS),
    Layout(1, "vocab-2", "zb-h1", context=2),
    Layout(1, "vocab-2", "zb-h1", tensor=2, sequence=True, slices=2),
]
"""Every kind of pair, sequence parallelism on and off, ranks that share sequences only, slices."""

FACTORS: Final = {
    "schedule": ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "gpipe"),
    "treatment": ("none", "vocab-1", "vocab-2", "naive", "interlaced"),
    "ranks": (1, 2),
    "tensor": (1, 2, 4),
    "sequence": (False, True),
    "context": ("none", "all_gather", "a2a", "p2p"),
    "recomputation": ("nothing", "parts", "whole", "ahead"),
    "offloaded": (False, True),
    "slices": (1, 2),
    "model": ("gpt", "llama"),
}


def allowed(case: Case) -> bool:
    """Whether 8 ranks are enough, and some of them share a layer or a sequence."""
    context = 1 if case["context"] == "none" else 2
    shares = case["tensor"] * context > 1 and case["ranks"] * case["tensor"] * context <= 8
    recomputes = case["recomputation"] != "nothing"
    return bool(
        shares
        and (case["tensor"] > 1 or not case["sequence"])
        and not (case["schedule"] == "gpipe" and case["treatment"] == "interlaced")  # no neighbours
        and not (case["offloaded"] and recomputes)
        and not (case["tensor"] == 4 and context == 2)
        and (case["tensor"] > 1 or case["context"] != "p2p")  # passes do not switch at a ring
        and (
            case["slices"] == 1 or case["context"] != "p2p"
        )  # a ring has the keys of whole samples
    )


def layout_of(case: Case) -> Layout:
    again = {"nothing": NO_RECOMPUTATION, "parts": PARTS, "whole": WHOLE, "ahead": WHOLE}
    context = case["context"]
    return Layout(
        case["ranks"],
        case["treatment"],
        case["schedule"],
        tensor=case["tensor"],
        sequence=case["sequence"],
        context=1 if context == "none" else 2,
        exchange="all_gather" if context == "none" else context,
        recomputation=again[case["recomputation"]],
        recompute_ahead=2 if case["recomputation"] == "ahead" else None,
        slices=case["slices"],
        offloaded=1 if case["offloaded"] else None,
    )


def job_of(model: str = "gpt") -> Job:
    options = replace(GPT if model == "gpt" else LLAMA, num_layers=4)
    return Job(options, microbatches=4, masked_out=(1,), iterations=2, warmup=1, sequence=8)


def compare(job: Job, layout: Layout, ranks: RankPool, folder: Path) -> None:
    found = [
        ranks.run(
            switched,
            layout.world_size,
            config=in_pairs(job, layout, folder, joined=joined),
            batches=job.batches(),
        )
        for joined in (False, True)
    ]
    apart_turns, turns = ([own for _, own in runs] for runs in found)
    assert not any(apart_turns)
    assert any(turns)
    for (apart, _), (together, _) in zip(*found, strict=True):
        assert together.losses == apart.losses
        assert together.gradient_norms == apart.gradient_norms
        assert same(together.first_gradients, apart.first_gradients)
        assert same(together.final, apart.final)
        assert together.left_in_store == 0


@pytest.mark.parametrize("layout", QUICK, ids=str)
def test_joined_and_apart_leave_the_same_bits(
    layout: Layout, ranks: RankPool, tmp_path: Path
) -> None:
    compare(job_of(), layout, ranks, tmp_path)


def test_the_quick_cases_have_every_kind_of_pair() -> None:
    job = job_of()
    found = {
        kinds
        for layout in QUICK
        for kinds in kinds_of_pairs(paired(make_run_plan(job.config(layout)).plan, seed=1))
    }
    assert {("F", "B"), ("F", "W"), ("B", "W"), ("F", "S"), ("F", "T"), ("B", "IB")} <= found


@pytest.mark.full
@pytest.mark.parametrize("case", cover(FACTORS, allowed), ids=lambda case: str(layout_of(case)))
def test_a_cover_of_layouts_leaves_the_same_bits(
    case: Case, eight_ranks: RankPool, tmp_path: Path
) -> None:
    compare(job_of(case["model"]), layout_of(case), eight_ranks, tmp_path)
