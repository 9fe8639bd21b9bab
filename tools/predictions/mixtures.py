"""Predictions of mixtures of experts: jobs as data, and the figures of each from its dry run.

Every job runs on H100s with the optimizer sharded over the replicas (ZeRO-1), one sequence of 4,096
tokens a microbatch, in bf16.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from megatron.run.recompute import EVERY_LAYER
from megatron.schedules.held import in_flight
from megatron.schedules.passes import PassKind
from megatron.simulator.costs.gpus import GIB
from tools.predictions.kept import kept
from tools.predictions.scenarios import DEEPSEEK, MIXTRAL, QWEN, Scenario

GPU: Final = "H100"
LOSS: Final = "--moe-aux-loss-coeff 0.001"
"""The flag of the loss that balances experts; the jobs of the table of pairs have no such loss."""
PAIRS: Final = "--overlap-moe-expert-parallel-comm"


class Found(NamedTuple):
    """The prediction of a job.

    Attributes:
        seconds: of an iteration.
        mfu: model FLOPs as a share of the peak rate.
        idle: share of the time in which a rank runs no pass.
        held: GiB of the fullest rank.
        fits: whether the memory suffices.
        in_flight: most microbatches in flight on a rank.
    """

    seconds: float
    mfu: float
    idle: float
    held: float
    fits: bool
    in_flight: float

    @property
    def memory(self) -> str:
        """The GiB of the fullest rank, and whether they are too many."""
        return f"{self.held:.1f}{'' if self.fits else ', does not fit'}"


@cache
def predicted(job: Scenario, keep: Path | None = None) -> Found:
    """Return the prediction of a job; ``keep`` is the folder of predictions that are kept."""

    def predict() -> Found:
        found = job.forecast
        outcome = found.outcome
        held = max(outcome.peak) / GIB
        most = max(in_flight(found.run_plan.plan))
        assert outcome.mfu is not None, "a data sheet has a peak rate"
        return Found(outcome.seconds, outcome.mfu, outcome.idle, held, found.fits, most)

    own: Found = kept(keep, f"mixture {job.words}", Found, predict)
    return own


def layout(
    model: str, tensor: int, expert: int, expert_tensor: int, way: str = "alltoall"
) -> Scenario:
    """Return a job of 32 GPUs with 4 pipeline ranks."""
    ranks = (8 // tensor, tensor, 1, expert, expert_tensor)
    return Scenario(model, GPU, 4, *ranks, dispatcher=way, more=LOSS)


LAYOUTS: Final = (
    layout(MIXTRAL, 8, 1, 8),
    layout(MIXTRAL, 8, 8, 1),
    layout(MIXTRAL, 2, 4, 2),
    layout(MIXTRAL, 2, 8, 1),
    layout(MIXTRAL, 1, 8, 1),
    layout(QWEN, 4, 1, 4),
    layout(QWEN, 2, 8, 1),
    layout(QWEN, 1, 1, 1),
    layout(QWEN, 1, 8, 1),
    layout(QWEN, 1, 8, 1, "allgather"),
    layout(QWEN, 1, 8, 1, "flex"),
)
MIXTRAL_JOB, QWEN_JOB = LAYOUTS[3], LAYOUTS[8]
"""The jobs of all further tables on 32 GPUs."""

_ALL: Final = ("none", "redis", "vocab-2")
VOCABULARIES: Final = (
    *((MIXTRAL_JOB._replace(vocabulary=own), _ALL) for own in (32_000, 128_000, 256_000)),
    *((QWEN_JOB._replace(vocabulary=own), _ALL) for own in (32_000, 128_000, 256_000)),
    (QWEN_JOB._replace(schedule="interleaved/4"), ("none", "vocab-2")),
    (QWEN_JOB._replace(schedule="zb-h1"), ("none", "vocab-2")),
    (QWEN_JOB._replace(schedule="zb-v"), ("none", "vocab-2")),
)
"""Jobs with the treatments of the vocabulary that are predicted for each."""

IMBALANCES: Final = {
    "the mean": QWEN_JOB,
    "1.3 times the mean": QWEN_JOB._replace(more=f"{LOSS} --dry-run-expert-imbalance 1.3"),
    "2 times the mean": QWEN_JOB._replace(more=f"{LOSS} --dry-run-expert-imbalance 2"),
}
"""Jobs by the tokens of the busiest rank."""

_LARGE: Final = Scenario(
    DEEPSEEK, GPU, 16, 64, expert=64, vocabulary=129_280, samples=4096, more=LOSS
)
_AGAIN: Final = _LARGE._replace(more=f"{LOSS} {EVERY_LAYER}")
DEEPSEEKS: Final = (
    *(_AGAIN._replace(treatment=own) for own in ("vocab-2", "redis", "none")),
    _LARGE,
)
"""Jobs of DeepSeek-V3: three with every layer computed again, and one without."""

PAIRED: Final = Scenario(QWEN, GPU, 8, 8, expert=8)
"""The job of the table of pairs, on 64 GPUs, without its schedule."""
PAIRED_SCHEDULES: Final = (
    *("1f1b", "gpipe", "zb-h1", "zb-h2", "hanayo", "interleaved/2", "gis", "gis-h"),
    *("pipeoffload", "1f1b-v", "zb-v", "v-half", "v-min", "dualpipe-v"),
)
LIMIT: Final = 18
"""Microbatches in flight that the last column of the table of pairs allows."""


def paired(schedule: str) -> tuple[Scenario | None, ...]:
    """Return the jobs of a schedule: without pairs, with pairs, with pairs and ``LIMIT``.

    GPipe holds all 32 microbatches, so it has no limit.
    """
    alone = PAIRED._replace(schedule=schedule)
    limited = f"{PAIRS} --zero-bubble-max-pending-backward {LIMIT}"
    last = None if schedule == "gpipe" else alone._replace(more=limited)
    return alone, alone._replace(more=PAIRS), last


class PassTimes(NamedTuple):
    """Seconds of the passes of one chunk, and the part in which tokens travel.

    Attributes:
        forward: of F.
        forward_wait: of F's exchanges.
        backward: of B, the input gradient alone.
        backward_wait: of B's exchanges.
        weight: of W.
    """

    forward: float
    forward_wait: float
    backward: float
    backward_wait: float
    weight: float


def pass_times(keep: Path | None = None) -> PassTimes:
    """Return the times of a chunk in the middle of ``PAIRED`` under DualPipeV."""
    job = PAIRED._replace(schedule="dualpipe-v")

    def predict() -> PassTimes:
        found = job.forecast
        costs, middle = found.alone, job.pipeline // 2

        def of(times: Mapping[Any, Any], kind: PassKind) -> float:
            return float(times[kind][middle][0])

        waits = [of(costs.waits, "F"), of(costs.waits, "B")]
        forward, backward, weight = (of(costs.passes, kind) for kind in ("F", "B", "W"))
        return PassTimes(forward, waits[0], backward, waits[1], weight)

    own: PassTimes = kept(keep, f"passes of {job.words}", PassTimes, predict)
    return own
