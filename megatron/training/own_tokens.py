"""The tokens of every sample that a rank has, and the slices that its passes cut them into."""

from torch import Tensor

from megatron.layers.slices import SequenceSlice
from megatron.parallel.context import own_positions_in_slices
from megatron.run.run_config import RunConfig
from megatron.run.slice_lengths import lengths_of_slices
from megatron.runtime.units import are_cut


def slices_of(config: RunConfig) -> tuple[SequenceSlice, ...]:
    """Return the slices of every microbatch; empty: microbatches are whole."""
    own = config.parallel.slices
    if own.num_seq_splits == 1:
        return ()
    lengths = lengths_of_slices(config.model, own.num_seq_splits, own.strategy)
    return SequenceSlice.of_lengths(lengths)


def kept_tokens(config: RunConfig, context_rank: int) -> Tensor | None:
    """Return the positions of a rank's tokens in every sample, int64 [u]; ``None``: all.

    Ranks that share sequences share every slice. If further tokens are predicted, data is read with
    the tokens that follow each position, but only if the positions are named. Slices need the
    following tokens too, so all positions are named for slices.
    """
    size, length = config.parallel.context.size, config.model.seq_length
    slices = slices_of(config)
    if not are_cut(size, slices) or (size == 1 and not config.model.further.mtp_num_layers):
        return None
    lengths = [part.end - part.first for part in slices] or [length]
    return own_positions_in_slices(lengths, context_rank, size)
