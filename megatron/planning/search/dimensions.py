"""What ``plan-pretraining`` chooses: a declaration for each dimension.

To add a dimension, declare it here and list it in ``DIMENSIONS``. A dimension that ``auto`` knows
too stands in the file of its topic; here it gets the choices that suit a search of layouts.
"""

from collections.abc import Sequence
from math import gcd, prod
from typing import Final

from megatron.flags.groups import Flags
from megatron.layers.experts.settings import ExpertSettings
from megatron.layers.settings import MLPSettings
from megatron.model.settings import ShapeSettings
from megatron.parallel.context import CONTEXT_EXCHANGES
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.settings import PipelineRankSettings, TensorRankSettings
from megatron.run.cluster import known_gpu, linked_ranks, ranks_of_machine
from megatron.run.context_exchange import EXCHANGE as EXCHANGE_OF_AUTO
from megatron.run.dimension import Choices, Dimension, Kind
from megatron.run.edit import Choice, Edit, left_out, set_to
from megatron.run.expert_ranks import sizes_of_experts
from megatron.run.experts import is_mixture
from megatron.run.line import Line
from megatron.run.pairs import pairs_of
from megatron.run.schedule import COMPARED_TREATMENTS
from megatron.run.schedule import VOCABULARY as VOCABULARY_OF_AUTO
from megatron.run.slices import SLICES as SLICES_OF_AUTO
from megatron.run.train import TrainSettings
from megatron.schedules.block_options import BlockOptions
from megatron.schedules.catalogue import OF_EVERY_SHAPE, OPTION_FLAGS, SCHEDULES, TRIED_FIRST
from megatron.schedules.settings import SliceSettings
from megatron.schedules.treatment_settings import DEFAULT_TREATMENT
from megatron.schedules.treatments import TREATMENTS

_MOST_TENSOR: Final = 16
_MOST_CHUNKS: Final = 8
_MOST_EXPERT_RANKS: Final = 64
_EXPERT_SIZES: Final = 4
"""Numbers of expert ranks that are looked at: the largest, for they leave the most memory."""
_UNEVEN: Final = 1.1
"""The most layers of a stage, as a multiple of the mean."""
_LEAST_TOKENS: Final = 2048
"""Tokens of a sample or of a slice that a context-parallel rank has at least: products of fewer
tokens are small."""
_TOKENS: Final = 8192
"""Tokens of a microbatch on a rank that keep products large; micro batches near it come first."""


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _tensor(flags: Flags) -> Sequence[Choice]:
    """Return the sizes up to a machine; beyond it every activation would cross the network."""
    linked = linked_ranks(flags.world_size, ranks_of_machine(flags), known_gpu(flags))
    ranks = _replicas(flags, "tensor")
    return [
        (
            set_to("--tensor-model-parallel-size", size),
            Edit("--sequence-parallel", () if size > 1 else None),
        )
        for size in _powers_of_two(min(linked, _MOST_TENSOR))
        if ranks % size == 0
    ]


def _replicas(flags: Flags, apart: str = "") -> int:
    """Return the replicas of a job whose size of the axis ``apart`` is 1; 0: too few ranks."""
    sizes = {
        "tensor": flags[TensorRankSettings].size,
        "context": flags[ContextRankSettings].size,
        "pipeline": flags[PipelineRankSettings].size,
    }
    return flags.world_size // prod(size for name, size in sizes.items() if name != apart)


def _context(flags: Flags) -> Sequence[Choice]:
    most, ranks = flags[ShapeSettings].seq_length // _LEAST_TOKENS, _replicas(flags, "context")
    return [
        (set_to("--context-parallel-size", size),)
        for size in _powers_of_two(max(1, most))
        if ranks % size == 0
    ]


def _exchange(flags: Flags) -> Sequence[Choice]:
    if flags[ContextRankSettings].size == 1:
        return [()]
    names = [name for name, facts in CONTEXT_EXCHANGES.items() if not facts.in_levels]
    return [(set_to("--cp-comm-type", name),) for name in names]


def _expert_tensor(flags: Flags) -> Sequence[Choice]:
    """Return whole experts, and experts whose columns all tensor-parallel ranks share."""
    if not is_mixture(flags):
        return [()]
    sizes = dict.fromkeys((1, flags[TensorRankSettings].size))
    return [(set_to(_SHARED_EXPERT, size),) for size in sizes]


def _experts(flags: Flags) -> Sequence[Choice]:
    """Return the numbers of ranks over which the experts of a layer are spread."""
    experts = flags[ExpertSettings].num_experts
    if not is_mixture(flags) or experts is None:
        return [()]
    _, shared = sizes_of_experts(flags)
    most = min(gcd(experts, flags.world_size // shared), _MOST_EXPERT_RANKS)
    sizes = sorted(_powers_of_two(most), reverse=True)[: _EXPERT_SIZES if shared == 1 else 2]
    return [(set_to("--expert-model-parallel-size", size),) for size in sizes]


def _dispatcher(flags: Flags) -> Sequence[Choice]:
    """Return the ways in which tokens come to experts on other ranks without a package."""
    if not is_mixture(flags) or sizes_of_experts(flags)[0] == 1:
        return [()]
    return [(set_to(_DISPATCHER, name),) for name in ("allgather", "alltoall")]


def _pairs(flags: Flags) -> Sequence[Choice]:
    """Return passes one after the other, and pairs where ranks share layers or experts.

    Pairs of slices are tried only if the user has named the slices: every slice makes their plans
    longer.
    """
    apart: Choice = tuple(map(left_out, _PAIRS))
    shares = {
        _PAIRS[0]: flags[TensorRankSettings].size > 1,
        _PAIRS[1]: is_mixture(flags) and sizes_of_experts(flags)[0] > 1,
    }
    chosen_slices = flags[SliceSettings].num_seq_splits != 1 and not flags.asks(_SPLITS)
    if not any(shares.values()) or chosen_slices:
        return [apart]
    joined = tuple(Edit(option) if own else left_out(option) for option, own in shares.items())
    return [apart, joined]


def _pipeline(flags: Flags) -> Sequence[Choice]:
    ranks, layers = _replicas(flags, "pipeline"), flags[ShapeSettings].num_layers
    return [
        (set_to("--pipeline-model-parallel-size", size),)
        for size in _divisors(ranks)
        if _can_spread(layers, size)
    ]


def _can_spread(layers: int, stages: int) -> bool:
    """Whether the fullest of some stages has few layers more than the mean."""
    return stages <= layers and -(-layers // stages) * stages <= _UNEVEN * layers


def _micro_batch(flags: Flags) -> Sequence[Choice]:
    """Return micro batches that divide a replica's share, those with about ``_TOKENS`` first."""
    share, rest = divmod(flags[TrainSettings].global_batch_size or 1, max(1, _replicas(flags)))
    if rest:
        return [(set_to("--micro-batch-size", 1),)]
    tokens = flags[ShapeSettings].seq_length // flags[ContextRankSettings].size
    able = [size for size in (1, 2, 4, 8) if share % size == 0 and size * tokens <= 2 * _TOKENS]
    able.sort(key=lambda size: (abs(size * tokens - _TOKENS), size))
    return [(set_to("--micro-batch-size", size),) for size in able or [1]]


def _slices(flags: Flags) -> Sequence[Choice]:
    """Return whole microbatches, and beside stages the slices that go with the exchange.

    Beside pairs microbatches are whole, unless the user has named the pairs (``_pairs``).
    """
    whole: Choice = (left_out(_SPLITS), left_out(_STRATEGY))
    if flags[PipelineRankSettings].size == 1:  # no rank idles, and slices hold more
        return [whole]
    if pairs_of(flags).joins and not any(map(flags.asks, _PAIRS)):
        return [whole]
    tokens = flags[ShapeSettings].seq_length // flags[ContextRankSettings].size
    most = tokens // _LEAST_TOKENS
    cut = SLICES_OF_AUTO.choices(flags)[1:]
    return [whole, *(edits for edits in cut if int((edits[0].values or "1")[0]) <= most)]


def _names_of_schedules(flags: Flags) -> Sequence[str]:
    """Return the schedules that take all options that the user gives, the most promising first."""
    ranks = flags[PipelineRankSettings].size
    names = dict.fromkeys((*TRIED_FIRST, *SCHEDULES) if ranks > 1 else OF_EVERY_SHAPE[:1])
    if any(own.fault(ranks) for own in flags[BlockOptions].given):
        return []
    asked = [option for option in OPTION_FLAGS if flags.asks(option)]
    return [name for name in names if SCHEDULES[name].flags.issuperset(asked)]


def _schedule(flags: Flags) -> Sequence[Choice]:
    """Return the schedules with their chunks, the most promising first."""
    ranks, layers = flags[PipelineRankSettings].size, flags[ShapeSettings].num_layers
    found = list[tuple[bool, Choice]]()
    for name in _names_of_schedules(flags):
        known = SCHEDULES[name]
        counts = [known.chunks]
        if known.takes_chunks:
            steps = range(known.chunks, _MOST_CHUNKS + 1, known.chunk_step)
            counts = [size for size in steps if _can_spread(layers, ranks * size)]
            even = [size for size in counts if layers % (ranks * size) == 0]
            # The least bubble that no larger stage costs more than, and the fewest messages.
            counts = [*(even[-1:] or counts[-1:]), *counts[:1]]
        for chunks in dict.fromkeys(counts):
            if _can_spread(layers, ranks * chunks):
                spread = layers % (ranks * chunks) != 0
                named = _named(name, chunks if known.takes_chunks else None, spread=spread)
                found.append((spread, named))
    found.sort(key=lambda each: each[0])
    return [named for _, named in found]


def taking(name: str) -> Choice:
    """Return the edits that take a schedule, and leave out the flags that it does not take."""
    others = (option for option in OPTION_FLAGS if option not in SCHEDULES[name].flags)
    return (set_to("--pipeline-schedule", name), *map(left_out, others))


def _named(name: str, chunks: int | None, *, spread: bool) -> Choice:
    """Return the choice of a schedule; if layers do not divide, their costs spread them."""
    option = "--num-virtual-stages-per-pipeline-rank"
    return (
        set_to("--pipeline-schedule", name),
        left_out(option) if chunks is None else set_to(option, chunks),
        set_to("--layer-distribution", "cost") if spread else left_out("--layer-distribution"),
    )


def _treatment(flags: Flags) -> Sequence[Choice]:
    """Return all treatments; without stages there is nothing to spread the vocabulary over."""
    if flags[PipelineRankSettings].size == 1:
        return [(set_to(_VOCABULARY, DEFAULT_TREATMENT),)]
    return [(set_to(_VOCABULARY, name),) for name in _TREATMENTS]


def _whole_vocabulary(flags: Flags) -> Sequence[Choice]:
    """Return the treatments that leave the vocabulary layers whole."""
    whole = {name for name in _TREATMENTS if not TREATMENTS[name].is_sharded}
    return [own for own in _treatment(flags) if own[0].values and own[0].values[0] in whole]


_SHARED_EXPERT: Final = "--expert-tensor-parallel-size"
_DISPATCHER: Final = "--moe-token-dispatcher-type"
_PAIRS: Final = ("--tp-comm-overlap", "--overlap-moe-expert-parallel-comm")
_SPLITS: Final = "--num-seq-splits"
_STRATEGY: Final = "--seq-split-strategy"
_VOCABULARY: Final = "--vocab-parallel"
_TREATMENTS: Final = sorted(
    COMPARED_TREATMENTS,
    key=lambda name: (
        not TREATMENTS[name].is_sharded,
        TREATMENTS[name].synchronous,
        TREATMENTS[name].delay,
        not TREATMENTS[name].redistributed,
    ),
)
"""The treatments of the vocabulary: first those that are split, by the delay of the backwards."""

RECOMPUTE: Final = (
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


_GROUPS: Final = (
    RECOMPUTE,
    (_LOGITS.option,),
    tuple(edit.option for edit in _NARROW),
    (_HOST.option, "--offload-chunk-num"),
)
"""Flags of each way to hold less; a way of which the user gives a flag is the user's."""

LAST_RESORTS: Final = ("--main-grads-dtype", "--cpu-offload", *_PAIRS)
"""Flags with a price that no prediction has: they round every sum of gradients, rely on a bandwidth
to the host, or on turns of two passes that no GPU has measured. Of ways as near, one without them
is taken."""


def last_resorts(line: Line) -> int:
    """Return how many of ``LAST_RESORTS`` the edits of a line ask for."""
    return sum(edit.option in LAST_RESORTS and edit.values is not None for edit in line.edits)


def _beside(flags: Flags, way: Choice) -> Choice:
    """Return a way to hold less without edits of the user's ways, and without flags of other ways.

    Args:
        flags: the flags.
        way: the edits of the way.
    """
    free = [option for group in _GROUPS if not any(map(flags.asks, group)) for option in group]
    own = [edit for edit in way if edit.option in free]
    named = {edit.option for edit in own}
    return (*(left_out(option) for option in free if option not in named), *own)


def _selective(*names: str) -> Choice:
    return (
        set_to("--recompute-granularity", "selective"),
        Edit("--recompute-modules", names),
    )


def _memory(flags: Flags) -> Sequence[Choice]:
    """Return ways to hold less, about the fastest first; most hold less than the ones before."""
    mixture = is_mixture(flags)
    active = ["mlp_act"] * (flags[MLPSettings].activation != "squared_relu") + ["moe_act"] * mixture
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
    return list(dict.fromkeys(_beside(flags, way) for way in ways))


def _own(name: str, kind: Kind, choices: Choices, *options: str) -> Dimension:
    """Return a dimension that each of the flags that it sets closes."""
    return Dimension(name, kind, options, choices, options)


_SCHEDULE_FLAGS: Final = (
    "--pipeline-schedule",
    "--num-virtual-stages-per-pipeline-rank",
    "--layer-distribution",
)
ASKING_FOR_SCHEDULES: Final = (
    *_SCHEDULE_FLAGS,
    "--num-layers-per-virtual-pipeline-stage",
    "--pipeline-model-parallel-layout",
    "--schedule-file",
    "--enable-zero-bubble",
    "--zero-bubble-v-schedule",
)

TENSOR: Final = _own(
    "tensor ranks", "shape", _tensor, "--tensor-model-parallel-size", "--sequence-parallel"
)
CONTEXT: Final = _own("context ranks", "shape", _context, "--context-parallel-size")
EXPERT_TENSOR: Final = _own(
    "ranks that share an expert", "shape", _expert_tensor, _SHARED_EXPERT
)._replace(later=True)
EXPERTS: Final = _own("expert ranks", "shape", _experts, "--expert-model-parallel-size")
PAIRS: Final = _own("pairs of passes", "shape", _pairs, *_PAIRS)._replace(later=True)
PIPELINE: Final = _own("pipeline ranks", "pipeline", _pipeline, "--pipeline-model-parallel-size")
MICRO_BATCH: Final = _own("micro batch", "factor", _micro_batch, "--micro-batch-size")
EXCHANGE: Final = EXCHANGE_OF_AUTO._replace(choices=_exchange)
DISPATCHER: Final = _own("dispatcher of tokens", "factor", _dispatcher, _DISPATCHER)._replace(
    later=True
)
MEMORY: Final = Dimension(
    "memory", "factor", tuple(option for group in _GROUPS for option in group), _memory
)
SLICES: Final = SLICES_OF_AUTO._replace(
    choices=_slices, stand_ins=4, beside=EXCHANGE.options, later=True
)
SCHEDULE: Final = Dimension(
    "schedule",
    "order",
    _SCHEDULE_FLAGS,
    _schedule,
    ASKING_FOR_SCHEDULES,
    stand_ins=len(TRIED_FIRST),
)
VOCABULARY: Final = VOCABULARY_OF_AUTO._replace(choices=_treatment)
WHOLE_VOCABULARY: Final = VOCABULARY._replace(choices=_whole_vocabulary)

LAYOUT: Final = (
    TENSOR,
    CONTEXT,
    EXPERT_TENSOR,
    EXPERTS,
    PAIRS,
    PIPELINE,
    MICRO_BATCH,
    EXCHANGE,
    DISPATCHER,
    MEMORY,
)
DIMENSIONS: Final = (*LAYOUT, SLICES, SCHEDULE, VOCABULARY)
"""All dimensions, in the order in which the search decides them."""
CHOSEN: Final = frozenset(option for own in DIMENSIONS for option in own.options)
"""The flags that a search chooses."""
UNSPLIT: Final = (*LAYOUT, SLICES, SCHEDULE, WHOLE_VOCABULARY)
"""The same for a job whose vocabulary layers stay whole."""
