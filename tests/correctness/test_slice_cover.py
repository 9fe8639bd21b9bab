"""Slices beside all that goes with them: every pair of two factors trains as one process does.

Weight gradients are apart from B, or not, by the schedule.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations
from typing import Any, Final

import pytest
from command_lines import with_flags
from correctness.agreement import check, trained
from correctness.cover import Case, Pair, pairs_of, sampled_cover
from correctness.rank_runs import assemble
from correctness.short_runs import Job, Layout
from correctness.test_schedules import evaluated
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from reference.plain_training import Training
from run.test_slice_flags import BASE

from megatron.layers.recompute import NO_RECOMPUTATION, PARTS, Recomputation
from megatron.parallel.context import ContextExchange
from megatron.run.command_line import parse
from megatron.schedules.catalogue import TRAINABLE_SCHEDULES, TRAITS
from megatron.schedules.settings import ALL_CHUNKS
from megatron.schedules.treatments import TREATMENTS

RANKS: Final = 2
SEQUENCE: Final = 32
"""Tokens of a sample: of 8 slices, 2 x 2 ranks have a token of each of their 2 chunks."""

SCHEDULES: Final = tuple(name for name in TRAINABLE_SCHEDULES if name != "file")
ONE_CHUNK: Final = tuple(own for own in SCHEDULES if own != "auto" and TRAITS[own].chunks == 1)
CONTEXT: Final[dict[str, tuple[int, ContextExchange]]] = {
    "1": (1, "all_gather"),
    "2": (2, "all_gather"),
    "2 a2a": (2, "a2a"),
    "2 ring": (2, "p2p"),
}
AGAIN: Final = {
    "nothing": NO_RECOMPUTATION,
    "parts": Recomputation(frozenset(PARTS)),
    "all": Recomputation(group=1),
    "all ahead": Recomputation(group=1),
}
FACTORS: Final[dict[str, tuple[Any, ...]]] = {
    "slices": (1, 2, 4, 8),
    "schedule": SCHEDULES,
    "treatment": tuple(TREATMENTS),
    "tensor": ("1", "2", "2 sequence"),
    "context": tuple(CONTEXT),
    "replicas": ("1", "2", "2 sharded"),
    "recomputed": tuple(AGAIN),
    "depths": (0, 2),
    "documents": (False, True),
    "windows": (False, True),
    "tied": (False, True),
    "offload": ("none", "half", "full"),
}

GPT: Final = GPTOptions(
    num_layers=4, vocab_size=37, max_position_embeddings=SEQUENCE, label_smoothing=0.1
)
LLAMA: Final = replace(
    GPT,
    tie_embeddings=False,
    num_attention_heads=8,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    qk_layernorm=True,
    label_smoothing=0.0,
)


def impossible(case: Case) -> bool:
    """Whether the configuration refuses a pair of the case: see the test of the refusals."""
    ring, half = case["context"] == "2 ring", case["offload"] == "half"
    return (ring and case["slices"] > 1) or (half and case["schedule"] in ONE_CHUNK)


def allowed(case: Case) -> bool:
    return not impossible(case) and layout_of(case).world_size <= 8


def layout_of(case: Case) -> Layout:
    schedule = case["schedule"]
    context, exchange = CONTEXT[case["context"]]
    sharded = "sharded" in case["replicas"]
    return Layout(
        RANKS,
        case["treatment"],
        schedule,
        memory_limit=RANKS + 2.0 if TRAITS[schedule].needs_memory_limit else None,
        slices=case["slices"],
        tensor=int(case["tensor"][0]),
        sequence="sequence" in case["tensor"],
        context=context,
        exchange=exchange,
        replicas=int(case["replicas"][0]),
        sharded=sharded,
        overlap=sharded,
        bucket_size=3000,
        recomputation=AGAIN[case["recomputed"]],
        recompute_ahead=1 if case["recomputed"] == "all ahead" else None,
        offloaded={"none": None, "half": 1, "full": ALL_CHUNKS}[case["offload"]],
    )


def trained_layout(case: Case) -> Layout:
    """Return the layout of the case, with ranks enough that activations can move if they are to.

    With two ranks, 1F1B and ZB-1P keep whole microbatches for two passes only, so no copy has time.
    """
    layout = layout_of(case)
    is_short = layout.schedule in ("1f1b", "zb-1p") and layout.slices == 1
    is_short = is_short and layout.vocabulary == "none"
    return replace(layout, ranks=2 * RANKS) if is_short and layout.offloaded else layout


def job_of(case: Case) -> Job:
    """Four microbatches. With two replicas the second has none that counts."""
    options = replace(
        GPT if case["tied"] else LLAMA,
        mtp_num_layers=case["depths"],
        mtp_loss_scaling_factor=0.3,
    )
    if case["windows"]:
        options = replace(
            options,
            position_embedding_type="alibi",
            window_size=5,
            window_pattern=(1, 0),
            attn_logit_softcapping=2.0,
            softmax_type="learnable",
        )
    return Job(
        options,
        1 + case["documents"],
        microbatches=4,
        masked_out=(1, 3),
        iterations=3,
        warmup=1,
        sequence=SEQUENCE,
        documents=case["documents"],
    )


def name_of(case: Case) -> str:
    host = "" if case["offload"] == "none" else f"-{case['offload']} offload"
    further = f"-mtp{case['depths']}" * (case["depths"] > 0) + "-documents" * case["documents"]
    model = f"{'-windows' * case['windows']}-{'tied' if case['tied'] else 'untied'}"
    return f"{replace(trained_layout(case), offloaded=None)}{host}{further}{model}"


def cost(case: Case) -> float:
    """Prefer few ranks and slices, where that takes few more cases."""
    return float((layout_of(case).world_size * (2 + case["slices"])) ** 0.5)


def fitting(case: Case) -> list[Case]:
    """Return a case of at most eight ranks as it is, and otherwise a case without each axis."""
    if trained_layout(case).world_size <= 8:
        return [case]
    axes = [name for name in ("tensor", "context", "replicas") if case[name] != "1"]
    return [{**case, name: "1"} for name in axes]


COVER: Final = sorted(chain(*map(fitting, sampled_cover(FACTORS, allowed, cost))), key=cost)


def test_every_pair_occurs_but_those_that_are_refused() -> None:
    """Apart from a schedule's own pairs, so does every pair of a split backward and a value."""
    assert len(COVER) <= 121
    assert max(trained_layout(case).world_size for case in COVER) <= 8
    found = set[Pair]().union(*map(pairs_of, COVER))
    every = {
        ((one, own), (other, further))
        for one, other in combinations(sorted(FACTORS), 2)
        for own in FACTORS[one]
        for further in FACTORS[other]
    }
    assert every - found == {
        *((("context", "2 ring"), ("slices", slices)) for slices in (2, 4, 8)),
        *((("offload", "half"), ("schedule", schedule)) for schedule in ONE_CHUNK),
    }
    for split in (False, True):
        with_it = [case for case in COVER if TRAITS[case["schedule"]].split is split]
        for name in FACTORS.keys() - {"schedule"}:
            assert {case[name] for case in with_it} == set(FACTORS[name]), (split, name)


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_a_ring_beside_slices_is_refused(slices: int) -> None:
    flags = f"--num-seq-splits {slices} --context-parallel-size 2 --cp-comm-type p2p"
    with pytest.raises(ValueError, match=f"--num-seq-splits {slices} with --cp-comm-type p2p"):
        parse(with_flags(BASE.split(), [*flags.split(), "--attention-dropout", "0"]), 4)


@pytest.mark.parametrize("schedule", ONE_CHUNK)
def test_half_of_one_chunk_is_not_offered(schedule: str) -> None:
    flags = f"--pipeline-schedule {schedule} --cpu-offload --offload-chunk-num auto"
    flags += " --zero-bubble-max-pending-backward 4" * TRAITS[schedule].needs_memory_limit
    opened = parse(with_flags(BASE.split(), flags.split()), 2)
    assert {own.parallel.offload.chunks for own in opened.alternatives} == {0, ALL_CHUNKS}


@pytest.mark.full
@pytest.mark.parametrize("case", COVER, ids=name_of)
def test_every_pair_trains_what_one_process_trains(
    case: Case, eight_ranks: RankPool, alone: Callable[[Job], Training]
) -> None:
    """An evaluation finds the loss of the weights. Every case with offload moves activations."""
    job, layout = job_of(case), trained_layout(case)
    by_rank = trained(eight_ranks, job, layout)
    check(by_rank, alone(job))
    final = assemble([own.final for own in by_rank])
    assert by_rank[0].evaluations == pytest.approx([evaluated(job, final)], rel=1e-5)
