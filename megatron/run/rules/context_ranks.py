"""Rules about context-parallel ranks, which share every sequence."""

from collections.abc import Iterator
from typing import Final

from megatron.flags.groups import Flags, Rule
from megatron.flags.rules import refuses
from megatron.layers.settings import AttentionSettings
from megatron.model.settings import ShapeSettings
from megatron.parallel.context_settings import ContextRankSettings, context_levels
from megatron.parallel.settings import TensorRankSettings
from megatron.run.model import sound_model


@refuses
def _sequence(flags: Flags) -> Iterator[str]:
    ranks, length = flags[ContextRankSettings].size, flags[ShapeSettings].seq_length
    if ranks == 1:
        return
    tensor = flags[TensorRankSettings].size
    parts = tensor if flags[TensorRankSettings].sequence_parallel else 1
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


@refuses
def _exchanged_heads(flags: Flags) -> Iterator[str]:
    own, ranks = flags[ContextRankSettings], flags[ContextRankSettings].size
    if ranks == 1 or not own.facts.has_heads or any(context_levels(flags)):
        return
    tensor = flags[TensorRankSettings].size
    heads = own.heads_size if own.facts.in_levels else ranks
    groups = sound_model(flags).attention.num_query_groups
    if groups % (tensor * heads):
        yield (
            f"--cp-comm-type {own.cp_comm_type} with --context-parallel-size {ranks}: "
            f"--tensor-model-parallel-size {tensor} x {heads} ranks cannot share "
            f"{groups} heads of keys and values evenly; choose fewer ranks, or "
            "--cp-comm-type all_gather"
        )


@refuses
def _passed_on(flags: Flags) -> Iterator[str]:
    own, dropout = flags[ContextRankSettings], flags[AttentionSettings].attention_dropout
    if own.size > 1 and own.facts.has_ring and dropout:
        yield (
            f"--attention-dropout {dropout} with --cp-comm-type {own.cp_comm_type}: a ring "
            "forms the probabilities part by part, and would have to keep what every part has "
            "dropped; use --attention-dropout 0, or choose --cp-comm-type all_gather or a2a"
        )


CONTEXT_RULES: Final[tuple[Rule, ...]] = (_sequence, context_levels, _exchanged_heads, _passed_on)
"""The rules that an exchange may break."""
