"""Where the seconds of an iteration go: they add up, and each reason has its cause."""

from functools import cache
from typing import Final

import pytest

from megatron.planning.forecast_run import RunForecast, forecast_run
from megatron.planning.run_costs import cluster_of
from megatron.planning.run_plan import asked
from megatron.planning.where_time_goes import REASONS, Reason, Waits, where_time_goes
from megatron.run.command_line import parse
from megatron.simulator.costs.gpus import gpu
from megatron.simulator.simulate import Span, Timeline

MODEL: Final = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --swiglu "
    "--max-position-embeddings 2048 --vocab-size 64000 --untie-embeddings-and-output-weights "
    "--micro-batch-size 1 --global-batch-size 16 --train-iters 1 --lr 1 --bf16 --dry-run "
    "--dry-run-gpu H100 "
)
P4: Final = "--pipeline-model-parallel-size 4 "
D2: Final = "--dry-run-replicas 2 --use-distributed-optimizer "
EXPERTS: Final = "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 "

JOBS: Final = {
    "one GPU": "",
    "t": "--tensor-model-parallel-size 2 --sequence-parallel",
    "c": "--context-parallel-size 2",
    "d": D2,
    "d, overlapped": D2 + "--overlap-grad-reduce --overlap-param-gather",
    "p, none": P4,
    "p, vocab-2": P4 + "--vocab-parallel vocab-2",
    "p, vocab-1, interleaved": P4 + "--vocab-parallel vocab-1 --pipeline-schedule interleaved",
    "p, v-half": P4 + "--vocab-parallel vocab-2 --pipeline-schedule v-half",
    "p, zb-v, d": P4 + D2 + "--pipeline-schedule zb-v --overlap-grad-reduce",
    "d, gathered after the step": P4
    + D2
    + "--pipeline-schedule zb-h1 --enable-optimizer-post-validation",
    "p, slices": P4 + "--num-seq-splits 4 --vocab-parallel vocab-2",
    "p, recomputed": P4 + "--recompute-granularity full --recompute-method uniform",
    "p, offloaded": P4 + "--cpu-offload",
    "e": D2 + EXPERTS,
    "e, pairs": P4
    + D2
    + EXPERTS
    + "--pipeline-schedule interleaved --overlap-moe-expert-parallel-comm",
    "t, c, p, d, e": P4
    + D2
    + EXPERTS
    + "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 "
    "--vocab-parallel vocab-2",
    "8 bits": P4 + "--fp8-format hybrid --fp8-recipe tensorwise",
}


@cache
def forecast(flags: str) -> RunForecast:
    """The forecast of the model with these flags on H100s."""
    run = parse((MODEL + flags).split(), 1)
    return forecast_run(run, asked(run)[0].run_plan, gpu("H100"))


@pytest.mark.parametrize("flags", JOBS.values(), ids=JOBS)
def test_the_reasons_add_up_to_the_iteration(flags: str) -> None:
    found = forecast(flags)
    seconds = where_time_goes(found)
    assert tuple(seconds) == REASONS
    assert sum(seconds.values()) == pytest.approx(found.outcome.seconds, rel=1e-9)
    assert min(seconds.values()) > -1e-12 * found.outcome.seconds
    assert min(seconds["products"], seconds["attention"], seconds["other kernels"]) > 0


ABSENT: Final[list[tuple[str, list[Reason], list[Reason]]]] = [
    ("one GPU", ["idle", "transfers"], ["products", "optimizer's step"]),
    ("t", ["context", "experts", "replicas", "transfers", "idle"], ["tensor"]),
    ("c", ["tensor", "experts", "transfers", "idle"], ["context"]),
    ("d", ["tensor", "context", "experts", "vocabulary", "transfers"], ["replicas"]),
    ("p, none", ["tensor", "vocabulary", "replicas", "host"], ["transfers", "idle"]),
    ("p, vocab-2", ["tensor", "replicas", "host"], ["vocabulary", "transfers", "idle"]),
    ("e", ["tensor", "context", "vocabulary", "transfers"], ["experts", "replicas"]),
    (
        "t, c, p, d, e",
        ["host"],
        ["tensor", "context", "experts", "vocabulary", "replicas", "transfers", "idle"],
    ),
]


@pytest.mark.parametrize(("job", "absent", "there"), ABSENT, ids=[job for job, _, _ in ABSENT])
def test_a_reason_without_its_axis_takes_no_time(
    job: str, absent: list[Reason], there: list[Reason]
) -> None:
    seconds = where_time_goes(forecast(JOBS[job]))
    assert {reason: seconds[reason] for reason in absent} == pytest.approx(
        dict.fromkeys(absent, 0.0), abs=1e-9
    )
    assert all(seconds[reason] > 0 for reason in there)


@pytest.mark.parametrize("job", ["p, none", "p, vocab-2", "p, v-half", "e, pairs"])
def test_waits_and_idle_time_are_the_time_without_passes(job: str) -> None:
    """As the timeline says it: 1 - the passes' share of the ranks' time."""
    found = forecast(JOBS[job])
    seconds = where_time_goes(found)
    waiting: list[Reason] = ["transfers", "vocabulary", "idle"]
    without = sum(seconds[reason] for reason in waiting) + seconds["replicas"]
    after = found.outcome.step - min(
        found.outcome.step, max(found.exchanges.update) if found.exchanges else found.outcome.step
    )
    assert without - after == pytest.approx(found.timeline.idle() * found.timeline.end, rel=1e-6)


def test_pairs_hide_the_travel_of_tokens() -> None:
    """The same job without pairs waits longer, and no kernel takes another time."""
    paired = where_time_goes(forecast(JOBS["e, pairs"]))
    alone = where_time_goes(
        forecast(JOBS["e, pairs"].replace("--overlap-moe-expert-parallel-comm", ""))
    )
    assert 0 <= paired["experts"] < 0.9 * alone["experts"]
    assert paired["products"] == pytest.approx(alone["products"], rel=1e-6)


def test_a_wait_is_for_a_communication_only_while_one_is_under_way() -> None:
    """Two messages that overlap count once; before and after them the rank is idle."""

    def span(lane: str, kind: str, start: float, end: float, rank: int = 0) -> Span:
        return Span(rank, lane, f"{kind}0", kind, 0, 0, start, end)

    spans = (
        *(span("comm", "X", 1, 3), span("comm", "G", 2, 4), span("comm", "C1", 4, 9)),
        span("comm", "X", 0, 9, rank=1),
    )
    waits = (span("wait", "X", 0.5, 5), span("wait", "X", 6, 7), span("wait", "C1", 7, 8))
    found = list(Waits(Timeline(2, spans, waits)).of(0))
    assert found == [("transfers", 3.0), ("transfers", 0.0), ("vocabulary", 1.0)]


def test_tensor_ranks_wait_for_the_all_reduces_of_megatron() -> None:
    """2 in the forward of a layer and 2 in its backward (arXiv 1909.08053, figure 4).

    Those of the backward run beside the product of a weight gradient, so they may be hidden.
    """
    layers, microbatches = 8, 16
    own, more = (
        where_time_goes(forecast(f"--tensor-model-parallel-size 2 {words}"))["tensor"]
        for words in ("", f"--num-layers {2 * layers}")
    )
    run = parse((MODEL + "--tensor-model-parallel-size 2").split(), 1)
    size = 2048 * 1024 * 2  # bytes of [s, h] in 16 bits
    alone = cluster_of(run.parallel, gpu("H100")).exchange("tensor", "all_reduce", 2, size)
    times = (more - own) / (layers * microbatches * alone)
    assert 2 - 1e-6 < times < 4 + 1e-6


def test_recomputation_repeats_kernels() -> None:
    """The backward computes the forward again: products of 4 units in place of 3 for the layers."""
    plain, again = (where_time_goes(forecast(JOBS[job])) for job in ("p, none", "p, recomputed"))
    assert 1.2 < again["attention"] / plain["attention"] < 1.5
    assert 1.1 < again["products"] / plain["products"] < 4 / 3
