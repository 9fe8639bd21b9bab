"""Predictions of mixtures of experts: jobs as data, and the figures of each from its dry run.

Every job runs on H100s with the optimizer sharded over the replicas (ZeRO-1), one sequence of 4,096
tokens a microbatch, in bf16.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from megatron.config.command_line import parse
from megatron.config.recompute import EVERY_LAYER
from megatron.config.run_config import RunConfig
from megatron.planning.forecast_run import RunForecast, forecast_run
from megatron.planning.run_plan import make_run_plan
from megatron.schedules.held import in_flight
from megatron.schedules.passes import PassKind
from megatron.simulator.costs.gpus import GIB, GPUS
from tools.predictions.kept import kept
from tools.predictions.splitting import SHARDED

GPU: Final = "H100"
MIXTRAL: Final = "Mixtral 8x7B"
QWEN: Final = "Qwen3-30B-A3B"
DEEPSEEK: Final = "DeepSeek-V3"

MODELS: Final[Mapping[str, str]] = {
    MIXTRAL: """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
        --group-query-attention --num-query-groups 8 --num-experts 8 --moe-router-topk 2""",
    QWEN: """--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
        --kv-channels 128 --group-query-attention --num-query-groups 4 --qk-layernorm
        --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768""",
    DEEPSEEK: """--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
        --num-attention-heads 128 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
        --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
        --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048
        --moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid
        --moe-layer-freq [0]*3+[1]*58""",
}
"""Flags of every model; DeepSeek-V3 is without multi-token prediction."""

LOSS: Final = "--moe-aux-loss-coeff 0.001"
"""The flag of the loss that balances experts; the jobs of the table of pairs have no such loss."""
PAIRS: Final = "--overlap-moe-expert-parallel-comm"


class Job(NamedTuple):
    """A mixture on GPUs.

    Attributes:
        model: its name.
        pipeline: pipeline ranks.
        replicas: of the model.
        tensor: ranks that share a layer.
        expert: ranks over which the experts of a layer are spread.
        expert_tensor: ranks that share an expert.
        schedule: its name, with the chunks of a rank behind a slash.
        treatment: of the vocabulary.
        vocabulary: its entries.
        samples: of an iteration.
        dispatcher: the way in which tokens travel, if experts are spread.
        more: further flags.
    """

    model: str
    pipeline: int
    replicas: int
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    schedule: str = "1f1b"
    treatment: str = "vocab-2"
    vocabulary: int = 128_000
    samples: int = 256
    dispatcher: str = "alltoall"
    more: str = ""

    @property
    def flags(self) -> str:
        """The flags of training."""
        name, _, chunks = self.schedule.partition("/")
        experts = f"""--expert-model-parallel-size {self.expert}
            --moe-token-dispatcher-type {self.dispatcher}"""
        more = [
            f"--num-virtual-stages-per-pipeline-rank {chunks}" if chunks else "",
            f"--tensor-model-parallel-size {self.tensor} --sequence-parallel" * (self.tensor > 1),
            experts * (self.expert > 1),
            f"--expert-tensor-parallel-size {self.expert_tensor}" * (self.tensor > 1),
            f"--dry-run-replicas {self.replicas} {SHARDED}" * (self.replicas > 1),
            self.more,
        ]
        return f"""--dry-run --dry-run-gpu {GPU} --pipeline-model-parallel-size {self.pipeline}
            --vocab-parallel {self.treatment} --pipeline-schedule {name}
            --vocab-size {self.vocabulary} {MODELS[self.model]} --seq-length 4096
            --micro-batch-size 1 --global-batch-size {self.samples} --lr 1e-4 --train-iters 1
            --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
            --untie-embeddings-and-output-weights --bf16 {" ".join(more)}"""

    @property
    def config(self) -> RunConfig:
        """The run."""
        return parse(self.flags.split(), 1, speak=False)

    @property
    def words(self) -> str:
        """A name for the file of the prediction, of all attributes."""
        return " ".join(str(own) for own in self if own != "")


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


def forecast_of(job: Job) -> RunForecast:
    """Return the dry run of a job."""
    config = job.config
    return forecast_run(config, make_run_plan(config), GPUS[GPU])


@cache
def predicted(job: Job, keep: Path | None = None) -> Found:
    """Return the prediction of a job; ``keep`` is the folder of predictions that are kept."""

    def predict() -> Any:
        found = forecast_of(job)
        outcome = found.outcome
        held = max(outcome.peak) / GIB
        most = max(in_flight(found.run_plan.plan))
        return [outcome.seconds, outcome.mfu, outcome.idle, held, found.fits, most]

    return Found(*kept(keep, f"mixture {job.words}", predict))


def layout(model: str, tensor: int, expert: int, expert_tensor: int, way: str = "alltoall") -> Job:
    """Return a job of 32 GPUs with 4 pipeline ranks."""
    return Job(model, 4, 8 // tensor, tensor, expert, expert_tensor, dispatcher=way, more=LOSS)


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

_LARGE: Final = Job(DEEPSEEK, 16, 64, expert=64, vocabulary=129_280, samples=4096, more=LOSS)
_AGAIN: Final = _LARGE._replace(more=f"{LOSS} {EVERY_LAYER}")
DEEPSEEKS: Final = (
    *(_AGAIN._replace(treatment=own) for own in ("vocab-2", "redis", "none")),
    _LARGE,
)
"""Jobs of DeepSeek-V3: three with every layer computed again, and one without."""

PAIRED: Final = Job(QWEN, 8, 8, expert=8)
"""The job of the table of pairs, on 64 GPUs, without its schedule."""
PAIRED_SCHEDULES: Final = (
    *("1f1b", "gpipe", "zb-h1", "zb-h2", "hanayo", "interleaved/2", "gis", "gis-h"),
    *("pipeoffload", "1f1b-v", "zb-v", "v-half", "v-min", "dualpipe-v"),
)
LIMIT: Final = 18
"""Microbatches in flight that the last column of the table of pairs allows."""


def paired(schedule: str) -> tuple[Job | None, ...]:
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

    def predict() -> Any:
        found = forecast_of(job)
        costs, middle = found.alone, job.pipeline // 2

        def of(times: Mapping[Any, Any], kind: PassKind) -> float:
            return float(times[kind][middle][0])

        waits = [of(costs.waits, "F"), of(costs.waits, "B")]
        forward, backward, weight = (of(costs.passes, kind) for kind in ("F", "B", "W"))
        return [forward, waits[0], backward, waits[1], weight]

    return PassTimes(*kept(keep, f"passes of {job.words}", predict))
