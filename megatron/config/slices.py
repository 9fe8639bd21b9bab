"""Slices of microbatches: flags, and the rules about what a slice cannot do."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from megatron.config.balancing import BalancingFlags, is_by_sinkhorn
from megatron.config.experts import ExpertFlags, experts_of
from megatron.config.layers import sound_model
from megatron.config.parallelism import ParallelFlags, exchange_facts
from megatron.flags.declare import COUNT, flag
from megatron.flags.groups import Flags, Rule
from megatron.model.slices import BALANCED_MULTIPLE, SplitStrategy, slice_lengths

_SPLITS: Final = "--num-seq-splits"

SlicesChoice: TypeAlias = tuple[int, SplitStrategy]
"""Slices of a microbatch, and which tokens each has."""


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class SliceFlags:
    """Slices of microbatches."""

    num_seq_splits: int = flag(1,
        "Slices into which every microbatch is cut along its sequence. Each has passes of its own, "
        "so that the pipeline fills sooner and holds less.", COUNT)
    seq_split_strategy: SplitStrategy = flag("uniform",
        "uniform: slices have equally many tokens. balanced: their layers have equally many FLOPs. "
        "Attention of later tokens sees more, so later slices are shorter, by multiples of "
        f"{BALANCED_MULTIPLE} tokens.", idle_without=f"{_SPLITS} > 1")
# fmt: on


def _lengths(flags: Flags) -> Iterator[str]:
    slices, parallel = flags[SliceFlags].num_seq_splits, flags[ParallelFlags]
    if slices == 1:
        return
    try:
        model = sound_model(flags)
    except ValueError:  # another rule reports this mistake
        return
    try:
        lengths = slice_lengths(model, slices, flags[SliceFlags].seq_split_strategy)
    except ValueError as error:
        yield str(error)
        return
    words = ", ".join(map(str, sorted(set(lengths))))
    context, tensor = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    chunks = 2 * context if context > 1 else 1
    if any(length % chunks for length in lengths):
        yield (
            f"{_SPLITS} {slices} makes slices of {words} tokens, which --context-parallel-size "
            f"{context} cannot divide into two equal chunks for every rank: choose fewer slices, "
            f"or a --seq-length that {slices * chunks} divides"
        )
    elif parallel.sequence_parallel and any(length // context % tensor for length in lengths):
        shared = f" among {context} context-parallel ranks and then" if context > 1 else ""
        multiple = slices * tensor * chunks if context > 1 else slices * tensor
        yield (
            f"{_SPLITS} {slices} makes slices of {words} tokens, which --sequence-parallel cannot "
            f"divide{shared} among --tensor-model-parallel-size {tensor}: choose fewer slices, or "
            f"a --seq-length that {multiple} divides"
        )


def _rings(flags: Flags) -> Iterator[str]:
    """Refuse rings, which pass on keys of their own slice only."""
    slices, parallel = flags[SliceFlags].num_seq_splits, flags[ParallelFlags]
    if slices > 1 and parallel.context_parallel_size > 1 and exchange_facts(parallel).has_ring:
        yield (
            f"{_SPLITS} {slices} with --cp-comm-type {parallel.cp_comm_type}: for every slice, the "
            "keys of all earlier slices would travel around the ring once more; choose "
            "--cp-comm-type all_gather or a2a, which keep them"
        )


def _experts(flags: Flags) -> Iterator[str]:
    """Refuse what compares the tokens of a whole microbatch."""
    slices, own = flags[SliceFlags].num_seq_splits, flags[BalancingFlags]
    if slices == 1 or experts_of(flags) is None:
        return
    if is_by_sinkhorn(flags):
        yield (
            f"{_SPLITS} {slices} with --moe-router-load-balancing-type sinkhorn, which balances "
            "the choices of a whole microbatch; balance by aux_loss or by "
            "--moe-router-enable-expert-bias"
        )
    if own.moe_expert_capacity_factor is not None:
        yield (
            f"{_SPLITS} {slices} with --moe-expert-capacity-factor "
            f"{own.moe_expert_capacity_factor:g}: an expert's room is for a whole microbatch: "
            "leave one of them out"
        )
    if flags[ExpertFlags].overlap_moe_expert_parallel_comm:
        yield (
            f"{_SPLITS} {slices} with --overlap-moe-expert-parallel-comm: no schedule joins the "
            "passes of slices: leave one of them out"
        )


def possible_slices(flags: Flags) -> tuple[SlicesChoice, ...]:
    """Return the ways of cutting microbatches that go with the other flags, for advice.

    Slices of equally many FLOPs come first, where they can be had: with slices of equally many
    tokens, ranks wait for the rank that has the last slice.
    """
    own, found = flags[SliceFlags], list[SlicesChoice]()
    strategies: tuple[SplitStrategy, ...] = ("balanced", "uniform")
    for slices in (2, 4, 8):
        for strategy in strategies:
            with_them = replace(own, num_seq_splits=slices, seq_split_strategy=strategy)
            cut = flags.replaced(with_them)
            if not any(mistake for rule in SLICE_RULES for mistake in rule(cut)):
                found.append((slices, strategy))
                break
    return tuple(found)


SLICE_RULES: Final[tuple[Rule, ...]] = (_lengths, _rings, _experts)
