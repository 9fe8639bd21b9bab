"""What ``plan-pretraining`` chooses: a declaration for each dimension.

To add a dimension, declare it here and list it in ``DIMENSIONS``.
"""

from collections.abc import Sequence
from math import gcd, prod
from typing import Final

from megatron.config.cluster import known_gpu, linked_ranks, ranks_of_machine
from megatron.config.experts import ExpertFlags, experts_of
from megatron.config.model import ModelFlags
from megatron.config.parallelism import ParallelFlags
from megatron.config.train import TrainFlags
from megatron.planning.search.dimension import Dimension
from megatron.planning.search.line import Choice, Edit, Line, left_out, set_to
from megatron.schedules.catalogue import SCHEDULES

_MOST_TENSOR: Final = 16
_MOST_CHUNKS: Final = 8
_MOST_EXPERT_RANKS: Final = 64
_EXPERT_SIZES: Final = 4
"""Numbers of expert ranks that are looked at: the largest, for they leave the most memory."""
_UNEVEN: Final = 1.1
"""The most layers of a stage, as a multiple of the mean."""
_LEAST_TOKENS: Final = 2048
"""Tokens of a sample that a context-parallel rank has at least: with fewer, products are small."""
_TOKENS: Final = 8192
"""Tokens of a microbatch on a rank that keep products large; micro batches near it come first."""


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _tensor(line: Line) -> Sequence[Choice]:
    """Return the sizes up to a machine; beyond it every activation would cross the network."""
    linked = linked_ranks(line.world_size, ranks_of_machine(line.flags), known_gpu(line.flags))
    ranks = _replicas(line, "tensor")
    return [
        (
            set_to("--tensor-model-parallel-size", size),
            Edit("--sequence-parallel", () if size > 1 else None),
        )
        for size in _powers_of_two(min(linked, _MOST_TENSOR))
        if ranks % size == 0
    ]


def _replicas(line: Line, apart: str = "") -> int:
    """Return the replicas of a line whose size of the axis ``apart`` is 1; 0: too few ranks."""
    own = line.flags[ParallelFlags]
    sizes = {
        "tensor": own.tensor_model_parallel_size,
        "context": own.context_parallel_size,
        "pipeline": own.pipeline_model_parallel_size,
    }
    return line.world_size // prod(size for name, size in sizes.items() if name != apart)


def _context(line: Line) -> Sequence[Choice]:
    most, ranks = line.flags[ModelFlags].seq_length // _LEAST_TOKENS, _replicas(line, "context")
    return [
        (set_to("--context-parallel-size", size),)
        for size in _powers_of_two(max(1, most))
        if ranks % size == 0
    ]


def _exchange(line: Line) -> Sequence[Choice]:
    if line.flags[ParallelFlags].context_parallel_size == 1:
        return [()]
    return [(set_to("--cp-comm-type", name),) for name in ("p2p", "a2a", "all_gather")]


def _experts(line: Line) -> Sequence[Choice]:
    """Return the numbers of ranks that share experts, whole experts on each."""
    experts = line.flags[ExpertFlags].num_experts
    if experts_of(line.flags) is None or experts is None:
        return [()]
    whole = set_to("--expert-tensor-parallel-size", 1)
    most = min(gcd(experts, line.world_size), _MOST_EXPERT_RANKS)
    sizes = sorted(_powers_of_two(most), reverse=True)[:_EXPERT_SIZES]
    return [(set_to("--expert-model-parallel-size", size), whole) for size in sizes]


def _pipeline(line: Line) -> Sequence[Choice]:
    ranks, layers = _replicas(line, "pipeline"), line.flags[ModelFlags].num_layers
    return [
        (set_to("--pipeline-model-parallel-size", size),)
        for size in _divisors(ranks)
        if _can_spread(layers, size)
    ]


def _can_spread(layers: int, stages: int) -> bool:
    """Whether the fullest of some stages has few layers more than the mean."""
    return stages <= layers and -(-layers // stages) * stages <= _UNEVEN * layers


def _micro_batch(line: Line) -> Sequence[Choice]:
    """Return micro batches that divide a replica's share, those with about ``_TOKENS`` first."""
    train, sizes = line.flags[TrainFlags], line.flags[ParallelFlags]
    share, rest = divmod(train.global_batch_size or 1, max(1, _replicas(line)))
    if rest:
        return [(set_to("--micro-batch-size", 1),)]
    tokens = line.flags[ModelFlags].seq_length // sizes.context_parallel_size
    able = [size for size in (1, 2, 4, 8) if share % size == 0 and size * tokens <= 2 * _TOKENS]
    able.sort(key=lambda size: (abs(size * tokens - _TOKENS), size))
    return [(set_to("--micro-batch-size", size),) for size in able or [1]]


_FASTEST: Final = ("zb-v", "interleaved", "dualpipe-v", "1f1b", "zb-h1", "v-half", "v-min")
"""The schedules that a search looks at first."""


def _schedule(line: Line) -> Sequence[Choice]:
    """Return the schedules with their chunks, the most promising first."""
    ranks = line.flags[ParallelFlags].pipeline_model_parallel_size
    layers = line.flags[ModelFlags].num_layers
    if ranks == 1:
        return [_named("1f1b", None, spread=False)]
    names = [*_FASTEST, *(name for name in SCHEDULES if name not in _FASTEST)]
    found = list[tuple[bool, Choice]]()
    for name in names:
        known = SCHEDULES[name]
        counts = [known.chunks]
        if known.takes_chunks:
            steps = range(known.chunks, _MOST_CHUNKS + 1, known.chunk_step)
            counts = [size for size in steps if _can_spread(layers, ranks * size)]
            counts = [*counts[-1:], *counts[:1]]  # the least bubble, and the fewest messages
        for chunks in dict.fromkeys(counts):
            if _can_spread(layers, ranks * chunks):
                spread = layers % (ranks * chunks) != 0
                named = _named(name, chunks if known.takes_chunks else None, spread=spread)
                found.append((spread, named))
    found.sort(key=lambda each: each[0])
    return [named for _, named in found]


def _named(name: str, chunks: int | None, *, spread: bool) -> Choice:
    """Return the choice of a schedule; if layers do not divide, their costs spread them."""
    option = "--num-virtual-stages-per-pipeline-rank"
    return (
        set_to("--pipeline-schedule", name),
        left_out(option) if chunks is None else set_to(option, chunks),
        set_to("--layer-distribution", "cost") if spread else left_out("--layer-distribution"),
    )


def _treatment(line: Line) -> Sequence[Choice]:
    """Return all treatments; without stages there is nothing to spread the vocabulary over."""
    if line.flags[ParallelFlags].pipeline_model_parallel_size == 1:
        return [(set_to("--vocab-parallel", "none"),)]
    names = ("vocab-2", "vocab-1", "interlaced", "redis", "none")
    return [(set_to("--vocab-parallel", name),) for name in names]


def _whole_vocabulary(line: Line) -> Sequence[Choice]:
    ranks = line.flags[ParallelFlags].pipeline_model_parallel_size
    names = ("redis", "none") if ranks > 1 else ("none",)
    return [(set_to("--vocab-parallel", name),) for name in names]


_RECOMPUTE: Final = (
    "--recompute-granularity",
    "--recompute-modules",
    "--recompute-method",
    "--recompute-num-layers",
    "--recompute-activations",
)
_NARROW: Final = (Edit("--use-precision-aware-optimizer"), set_to("--main-grads-dtype", "bf16"))
"""Gradients in bf16, as many published runs have them."""
_LOGITS: Final = Edit("--vocab-recompute")
_HOST: Final = Edit("--cpu-offload")


def _instead(way: Choice, options: Sequence[str]) -> Choice:
    """Return a choice that also leaves out those of the options that it does not set."""
    own = {edit.option for edit in way}
    return (*(left_out(option) for option in options if option not in own), *way)


def _selective(*names: str) -> Choice:
    return (
        set_to("--recompute-granularity", "selective"),
        Edit("--recompute-modules", names),
    )


def _memory(line: Line) -> Sequence[Choice]:
    """Return ways to hold less, the fastest first; each holds less than the ones before it."""
    mixture = experts_of(line.flags) is not None
    active = ["mlp_act"] * (not line.flags[ModelFlags].squared_relu) + ["moe_act"] * mixture
    quick, cheap = _selective("layernorm"), _selective("layernorm", *active)
    dear = _selective("layernorm", "mlp", *(["moe"] if mixture else []))
    whole = (
        set_to("--recompute-granularity", "full"),
        set_to("--recompute-method", "uniform"),
    )
    narrow = (_LOGITS, *_NARROW)
    ways: Sequence[Choice] = (
        (),
        *([quick] if active else []),
        cheap,
        (*cheap, _LOGITS),
        (*cheap, *narrow),
        (*dear, *narrow),
        (*whole, *narrow),
        (*cheap, *narrow, _HOST),
        (*whole, *narrow, _HOST),
    )
    return [_instead(way, _MEMORY_FLAGS) for way in ways]


_TENSOR_FLAGS: Final = ("--tensor-model-parallel-size", "--sequence-parallel")
_SCHEDULE_FLAGS: Final = (
    "--pipeline-schedule",
    "--num-virtual-stages-per-pipeline-rank",
    "--layer-distribution",
)
_VOCABULARY_FLAGS: Final = ("--vocab-parallel", "--enable-vocab-parallel")
_MEMORY_FLAGS: Final = (*_RECOMPUTE, *(edit.option for edit in (*_NARROW, _LOGITS, _HOST)))

TENSOR: Final = Dimension("tensor ranks", "shape", _TENSOR_FLAGS, _tensor)
CONTEXT: Final = Dimension("context ranks", "shape", ("--context-parallel-size",), _context)
EXPERTS: Final = Dimension(
    "expert ranks",
    "shape",
    ("--expert-model-parallel-size", "--expert-tensor-parallel-size"),
    _experts,
)
MICRO_BATCH: Final = Dimension("micro batch", "factor", ("--micro-batch-size",), _micro_batch)
EXCHANGE: Final = Dimension("exchange of context ranks", "factor", ("--cp-comm-type",), _exchange)
MEMORY: Final = Dimension("memory", "factor", _MEMORY_FLAGS, _memory)
PIPELINE: Final = Dimension(
    "pipeline ranks", "pipeline", ("--pipeline-model-parallel-size",), _pipeline
)
SCHEDULE: Final = Dimension("schedule", "order", _SCHEDULE_FLAGS, _schedule)
VOCABULARY: Final = Dimension("vocabulary", "order", _VOCABULARY_FLAGS, _treatment)
WHOLE_VOCABULARY: Final = Dimension("vocabulary", "order", _VOCABULARY_FLAGS, _whole_vocabulary)

LAYOUT: Final = (TENSOR, CONTEXT, EXPERTS, PIPELINE, MICRO_BATCH, EXCHANGE, MEMORY)
DIMENSIONS: Final = (*LAYOUT, SCHEDULE, VOCABULARY)
"""All dimensions, in the order in which the search decides them."""
UNSPLIT: Final = (*LAYOUT, SCHEDULE, WHOLE_VOCABULARY)
"""The same for a job whose vocabulary layers stay whole."""
