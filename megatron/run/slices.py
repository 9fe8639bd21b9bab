"""Rules about slices of microbatches, and slices as a dimension of ``auto``."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final

from megatron.flags.auto import AUTO
from megatron.flags.groups import Flags, Rule, faults_of, result_of
from megatron.flags.rules import refuses
from megatron.layers.experts.settings import BalanceSettings
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.settings import TensorRankSettings
from megatron.run.dimension import Auto, Dimension
from megatron.run.edit import Choice, left_out, set_to
from megatron.run.eight_bit_sizes import fault_of_tokens
from megatron.run.experts import is_mixture
from megatron.run.model import sound_model
from megatron.run.slice_lengths import lengths_of_slices
from megatron.schedules.settings import SliceSettings
from megatron.schedules.slice_lengths import SliceStrategy

_SPLITS: Final = "--num-seq-splits"
_STRATEGY: Final = "--seq-split-strategy"


def _lengths_of(flags: Flags) -> tuple[int, ...]:
    """Return the tokens of every slice; errors as in ``lengths_of_slices``."""
    own = flags[SliceSettings]
    return lengths_of_slices(sound_model(flags), own.num_seq_splits, own.strategy)


@refuses
def _lengths(flags: Flags) -> Iterator[str]:
    slices = flags[SliceSettings].num_seq_splits
    if slices < 2:
        return
    yield from faults_of(partial(_lengths_of, flags))
    lengths = result_of(partial(_lengths_of, flags)) or ()
    words = ", ".join(map(str, sorted(set(lengths))))
    context, tensor = flags[ContextRankSettings].size, flags[TensorRankSettings].size
    chunks = 2 * context if context > 1 else 1
    if any(length % chunks for length in lengths):
        yield (
            f"{_SPLITS} {slices} makes slices of {words} tokens, which --context-parallel-size "
            f"{context} cannot divide into two equal chunks for every rank: choose fewer slices, "
            f"or a --seq-length that {slices * chunks} divides"
        )
    elif flags[TensorRankSettings].sequence_parallel and any(
        length // context % tensor for length in lengths
    ):
        shared = f" among {context} context-parallel ranks and then" if context > 1 else ""
        multiple = slices * tensor * chunks if context > 1 else slices * tensor
        yield (
            f"{_SPLITS} {slices} makes slices of {words} tokens, which --sequence-parallel cannot "
            f"divide{shared} among --tensor-model-parallel-size {tensor}: choose fewer slices, or "
            f"a --seq-length that {multiple} divides"
        )


@refuses
def _rings(flags: Flags) -> Iterator[str]:
    """Refuse rings, which pass on keys of their own slice only."""
    slices, own = flags[SliceSettings].num_seq_splits, flags[ContextRankSettings]
    if slices > 1 and own.size > 1 and own.facts.has_ring:
        yield (
            f"{_SPLITS} {slices} with --cp-comm-type {own.cp_comm_type}: for every slice, the "
            "keys of all earlier slices would travel around the ring once more; choose "
            "--cp-comm-type all_gather or a2a, which keep them"
        )


@refuses
def _experts(flags: Flags) -> Iterator[str]:
    """Refuse what compares the tokens of a whole microbatch."""
    slices, own = flags[SliceSettings].num_seq_splits, flags[BalanceSettings]
    if slices < 2 or not is_mixture(flags):
        return
    if own.is_by_sinkhorn:
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


@refuses
def _eight_bits(flags: Flags) -> Iterator[str]:
    """Refuse slices with a number of tokens that products in 8 bits cannot take."""
    slices = flags[SliceSettings].num_seq_splits
    if slices < 2:
        return
    lengths = result_of(partial(_lengths_of, flags)) or ()
    for length in sorted(set(lengths)):
        yield from fault_of_tokens(flags, length, f"{length} tokens of {_SPLITS} {slices}")


def _cut(flags: Flags, slices: int, strategy: SliceStrategy) -> Flags:
    own = flags[SliceSettings]
    return flags.replaced(replace(own, num_seq_splits=slices, seq_split_strategy=strategy))


def _mistakes(flags: Flags, slices: int, strategy: SliceStrategy) -> Iterator[str]:
    """Yield the reasons why some slices do not go with the other flags."""
    asking = _cut(flags, slices, strategy)
    return (mistake for rule in SLICE_RULES for mistake in rule(asking))


def _choices(flags: Flags) -> list[Choice]:
    """Return whole microbatches, and the slices that go with the other flags.

    Slices of equally many FLOPs come first, if the model has them: with slices of equally many
    tokens, ranks wait for the rank that has the last slice. If the flags name a strategy, no other
    strategy is returned.
    """
    named, found = flags[SliceSettings].seq_split_strategy, [_choice(1, "uniform")]
    strategies: tuple[SliceStrategy, ...] = ("balanced", "uniform") if named is None else (named,)
    for slices in (2, 4, 8):
        able = (one for one in strategies if not any(_mistakes(flags, slices, one)))
        found += [_choice(slices, one) for one in islice(able, 1)]
    return found


def _choice(slices: int, strategy: SliceStrategy) -> Choice:
    equal = left_out(_STRATEGY)  # slices of equally many tokens are the usual ones
    return set_to(_SPLITS, slices), equal if strategy == "uniform" else set_to(_STRATEGY, strategy)


def _closed(flags: Flags) -> str:
    return next(_mistakes(flags, 2, flags[SliceSettings].strategy), "")


SLICE_RULES: Final[tuple[Rule, ...]] = (_lengths, _rings, _experts, _eight_bits)

SLICES: Final = Dimension(
    "slices",
    "order",
    (_SPLITS, _STRATEGY),
    _choices,
    closing=(_SPLITS,),
    auto=Auto(
        f"{_SPLITS} auto", lambda flags: flags[SliceSettings].num_seq_splits == AUTO, _closed
    ),
    counted=True,
)
"""Slices as a dimension that the plan chooses in."""
