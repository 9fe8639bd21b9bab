"""The layout over ranks: flags, sizes, and rules about how ranks can share a model."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal, TypeAlias

import torch

from megatron.flags.declare import flag
from megatron.flags.groups import Flags, Rule
from megatron.flags.ranges import MINUTES, RANKS, WIDTH
from megatron.flags.rules import notes, refuses
from megatron.layers.experts.settings import ExpertSettings
from megatron.layers.settings import AttentionSettings
from megatron.model.cut_faults import faults_of_cut
from megatron.model.settings import ShapeSettings
from megatron.parallel.context import CONTEXT_EXCHANGES, ContextExchange, ExchangeFacts
from megatron.run.dimension import Dimension, NamedChoice
from megatron.run.dry_run import DryRunSettings
from megatron.run.edit import set_to
from megatron.run.experts import is_mixture
from megatron.run.model import sound_model
from megatron.schedules.treatments import TREATMENTS

DEFAULT_TREATMENT: Final = "none"
AUTO_TREATMENT: Final = "auto"
"""The value with which the plan chooses the treatment of the vocabulary layers."""

NamedExchange: TypeAlias = Literal[ContextExchange, "auto"]
"""A ``ContextExchange``, or ``auto``, which takes one of them."""


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class ParallelFlags:
    """The layout over ranks."""

    pipeline_model_parallel_size: int = flag(1, "Pipeline ranks.", RANKS)
    vocab_parallel: str | None = flag(None,
        "none: the vocabulary layers are whole, on the first and the last stage. redis: the same, "
        "with fewer transformer layers on these stages. The other treatments split the vocabulary "
        "layers into passes of every rank: vocab-2 with one barrier, vocab-1 with two, naive with "
        "three, interlaced with two that do not overlap with passes. auto: the fastest of none, "
        "redis, vocab-1, vocab-2 and interlaced, or one nearly as fast that holds less.",
        choices=(*TREATMENTS, AUTO_TREATMENT), unset=DEFAULT_TREATMENT)
    enable_vocab_parallel: bool = flag(False,
        "Another name of --vocab-parallel vocab-2, from the paper's code.")
    disable_backward_fusion: bool = flag(False,
        "With --enable-vocab-parallel: another name of --vocab-parallel vocab-1, from the paper's "
        "code.",
        idle_without="--enable-vocab-parallel", excludes="--use-interlaced-schedule")
    use_interlaced_schedule: bool = flag(False,
        "Another name of --vocab-parallel interlaced, from the paper's code.")
    vocab_recompute: bool = flag(False,
        "Keep no logits for the output layer's backward; form them again there. This saves memory "
        "and costs one more product, under every treatment.", idle_with="--skip-train")
    make_vocab_size_divisible_by: int = flag(128,
        "Number that divides the rows of every shard of the vocabulary.", WIDTH)
    tensor_model_parallel_size: int = flag(1,
        "Tensor-parallel ranks. They share every layer, by its heads and columns.", RANKS)
    sequence_parallel: bool = flag(False,
        "Let tensor-parallel ranks also share the tokens, wherever they do not share a layer.")
    context_parallel_size: int = flag(1,
        "Context-parallel ranks. They share every sequence.", RANKS)
    cp_comm_type: NamedExchange = flag("all_gather",
        "How attention sees the tokens of all context-parallel ranks. all_gather: it gathers keys "
        "and values. p2p: keys and values pass along a ring of the ranks while attention to those "
        "that are there is computed. a2a: ranks exchange heads for tokens, and each computes "
        "attention of some heads for all tokens. a2a+p2p: neighbours exchange heads, and keys and "
        "values pass along a ring of sets of neighbours. auto: the one with which the run is "
        "the fastest that fits the job's GPUs by prediction, or nearly as fast and holds less; "
        "a2a+p2p only where --hierarchical-context-parallel-sizes are given.",
        idle_without="--context-parallel-size > 1")
    hierarchical_context_parallel_sizes: tuple[int, ...] = flag((),
        "With --cp-comm-type a2a+p2p: number of neighbours that exchange heads, and number of such "
        "sets, which make a ring.", RANKS, metavar="HEADS RING",
        idle_without="--cp-comm-type a2a+p2p or --cp-comm-type auto")
    device: Literal["auto", "cpu", "cuda"] = flag("auto",
        "Device to compute on; auto takes CUDA if there is a CUDA device.")
    distributed_backend: Literal["nccl", "gloo"] | None = flag(None, "Communication library.",
        unset="nccl on CUDA, gloo on CPUs")
    distributed_timeout_minutes: int = flag(10, "Minutes that a collective may wait.", MINUTES)
# fmt: on


def on_cuda(flags: Flags) -> bool:
    """Return whether the ranks compute on CUDA devices."""
    return flags[ParallelFlags].device != "cpu" and torch.cuda.is_available()


def ranks_of_replica(flags: ParallelFlags) -> int:
    """Return the number of ranks that work on a microbatch together: p x t x c.

    These are the pipeline-, tensor- and context-parallel ranks of a replica.
    """
    sizes = flags.pipeline_model_parallel_size, flags.tensor_model_parallel_size
    return prod(sizes) * flags.context_parallel_size


def number_of_replicas(flags: Flags) -> int:
    """Return the number of replicas that the job's ranks make, or that a dry run names."""
    named = flags[DryRunSettings].dry_run_replicas if flags[DryRunSettings].dry_run else None
    return named or max(1, flags.world_size // ranks_of_replica(flags[ParallelFlags]))


@refuses
def _cuts(flags: Flags) -> Iterator[str]:
    ranks, sequence = _size(flags), flags[ParallelFlags].sequence_parallel
    if ranks == 1:
        return
    try:
        model = sound_model(flags)
    except ValueError:  # another rule reports this mistake
        return
    yield from faults_of_cut(model, ranks, sequence_parallel=sequence)
    if model.hidden_size % ranks:  # only with --kv-channels; otherwise heads make it divisible
        yield (
            f"--tensor-model-parallel-size {ranks} does not divide --hidden-size "
            f"{model.hidden_size}: activations travel in as many parts, so choose a multiple of "
            f"{ranks}, or fewer ranks"
        )


@refuses
def _shared_experts(flags: Flags) -> Iterator[str]:
    own, ranks = flags[ExpertSettings], _size(flags)
    if is_mixture(flags) and ranks > 1 and not flags[ParallelFlags].sequence_parallel:
        yield (
            f"--tensor-model-parallel-size {ranks} with --num-experts {own.num_experts}: add "
            "--sequence-parallel, as Megatron-LM needs it too; otherwise every rank chooses for "
            "all tokens, and a bit that differs sends one to other experts"
        )


@notes
def _no_parts(flags: Flags) -> Iterator[str]:
    if flags[ParallelFlags].sequence_parallel and _size(flags) == 1:
        yield (
            "--sequence-parallel changes nothing at --tensor-model-parallel-size 1: the sequence "
            "is split over tensor-parallel ranks"
        )


def _size(flags: Flags) -> int:
    return flags[ParallelFlags].tensor_model_parallel_size


@refuses
def _sequence(flags: Flags) -> Iterator[str]:
    ranks, length = flags[ParallelFlags].context_parallel_size, flags[ShapeSettings].seq_length
    if ranks == 1:
        return
    tensor = flags[ParallelFlags].tensor_model_parallel_size
    parts = tensor if flags[ParallelFlags].sequence_parallel else 1
    if length % (2 * ranks):
        yield (
            f"--context-parallel-size {ranks} does not divide --seq-length {length} into two equal "
            f"chunks for every rank: choose a multiple of {2 * ranks}, or fewer ranks"
        )
    elif length // ranks % parts:
        yield (
            f"--context-parallel-size {ranks} leaves a rank {length // ranks} of the tokens of "
            f"--seq-length {length}, which --sequence-parallel cannot divide among "
            f"--tensor-model-parallel-size {tensor}: choose a multiple of {2 * ranks * parts}"
        )


def adjacent_heads(flags: ParallelFlags) -> int:
    """Return the number of adjacent ranks that exchange heads, if sets of them form a ring."""
    if flags.context_parallel_size == 1 or not exchange_facts(flags).in_levels:
        return 1
    return flags.hierarchical_context_parallel_sizes[0]


def exchange_facts(flags: ParallelFlags) -> ExchangeFacts:
    """Return the facts about the exchange of the flags; ``auto`` takes one that no rule refuses."""
    return (
        ExchangeFacts() if flags.cp_comm_type == "auto" else CONTEXT_EXCHANGES[flags.cp_comm_type]
    )


def first_exchange(flags: Flags) -> ContextExchange:
    """Return the exchange that flags name; auto remains where no ranks share a sequence."""
    named = flags[ParallelFlags].cp_comm_type
    return "all_gather" if named == "auto" else named


@refuses
def _levels(flags: Flags) -> Iterator[str]:
    parallel = flags[ParallelFlags]
    ranks, sizes = parallel.context_parallel_size, parallel.hierarchical_context_parallel_sizes
    may = parallel.cp_comm_type == "auto" and sizes
    in_levels = may or exchange_facts(parallel).in_levels
    if ranks == 1 or not in_levels:
        return
    if len(sizes) != 2 or prod(sizes) != ranks or min(sizes) == 1:
        given = " ".join(map(str, sizes)) if sizes else "unset"
        yield (
            f"--hierarchical-context-parallel-sizes {given} with --cp-comm-type "
            f"{parallel.cp_comm_type} and "
            f"--context-parallel-size {ranks}: give two numbers above 1 whose product is {ranks}, "
            "first the ranks that exchange heads; for a single level choose --cp-comm-type a2a or "
            "p2p"
        )


@refuses
def _exchanged_heads(flags: Flags) -> Iterator[str]:
    parallel, ranks = flags[ParallelFlags], flags[ParallelFlags].context_parallel_size
    if ranks == 1 or not exchange_facts(parallel).has_heads or any(_levels(flags)):
        return
    try:
        model = sound_model(flags)
    except ValueError:  # another rule reports this mistake
        return
    tensor = parallel.tensor_model_parallel_size
    heads = adjacent_heads(parallel) if exchange_facts(parallel).in_levels else ranks
    groups = model.attention.num_query_groups
    if groups % (tensor * heads):
        yield (
            f"--cp-comm-type {parallel.cp_comm_type} with --context-parallel-size {ranks}: "
            f"--tensor-model-parallel-size {tensor} x {heads} ranks cannot share "
            f"{groups} heads of keys and values evenly; choose fewer ranks, or "
            "--cp-comm-type all_gather"
        )


@refuses
def _passed_on(flags: Flags) -> Iterator[str]:
    parallel, dropout = flags[ParallelFlags], flags[AttentionSettings].attention_dropout
    if parallel.context_parallel_size > 1 and exchange_facts(parallel).has_ring and dropout:
        yield (
            f"--attention-dropout {dropout} with --cp-comm-type {parallel.cp_comm_type}: a ring "
            "forms the probabilities part by part, and would have to keep what every part has "
            "dropped; use --attention-dropout 0, or choose --cp-comm-type all_gather or a2a"
        )


CONTEXT_RULES: Final[tuple[Rule, ...]] = (_sequence, _levels, _exchanged_heads, _passed_on)


def _exchanges(flags: Flags) -> list[NamedChoice]:
    """Return the exchanges that no rule about context-parallel ranks refuses."""
    own = flags[ParallelFlags]
    asked = (replace(own, cp_comm_type=name) for name in CONTEXT_EXCHANGES)
    able = (one for one in asked if not any(_mistakes(flags.replaced(one))))
    return [NamedChoice((set_to("--cp-comm-type", one.cp_comm_type),)) for one in able]


def _mistakes(flags: Flags) -> Iterator[str]:
    return (mistake for rule in CONTEXT_RULES for mistake in rule(flags))


EXCHANGE: Final = Dimension(
    "--cp-comm-type auto",
    lambda flags: (
        flags[ParallelFlags].cp_comm_type == "auto"
        and flags[ParallelFlags].context_parallel_size > 1
    ),
    _exchanges,
)
"""The exchange of context-parallel ranks as a dimension that the plan chooses in."""
