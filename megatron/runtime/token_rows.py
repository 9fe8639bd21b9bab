"""Rows of tokens that run forward through the stages, for the tokens that follow them.

A row is shorter than a sample if it can be: attention is causal, so tokens behind the place that is
read change nothing there. The passes of all layers and of the vocabulary are those of an evaluation
of one microbatch, under any schedule and any treatment of the vocabulary.

Shapes: b rows, s tokens of a row, u tokens of a row that this rank has, h hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from megatron.layers.slices import SequenceSlice
from megatron.model.stage import RankModel
from megatron.parallel import collectives
from megatron.parallel.context import own_positions_in_slices
from megatron.parallel.groups import Groups
from megatron.runtime.batch import DeviceMicrobatch
from megatron.runtime.executor import Executor
from megatron.runtime.stage_passes import StagePasses
from megatron.schedules.lower import Program

_UNIT: Final = 32
"""Tokens of a row that a rank has in each slice are a multiple of it, as products in 8 bits want.

A multiple of 2 also lets ranks that share sequences have two equal chunks."""


def row_length(model: RankModel, slices: int, tokens: int) -> int:
    """Return the length of the shortest rows with room for ``tokens``; all ranks know the same.

    Args:
        model: this rank's part of the model.
        slices: n, the slices of every sample in training.
        tokens: at most those of a sample.
    """
    assert tokens <= model.config.seq_length, "a row is no longer than a sample"
    unit = _UNIT * slices * model.context.size * model.tensor.sequence_parts
    return min(model.config.seq_length, -(-tokens // unit) * unit)


def slices_of_row(length: int, slices: int) -> tuple[SequenceSlice, ...]:
    """Return equal slices of a row of ``row_length`` tokens; empty: the row is whole."""
    return SequenceSlice.of_lengths([length // slices] * slices) if slices > 1 else ()


@dataclass(frozen=True)
class TokenRows:
    """Runs rows of tokens forward; all ranks of a job call the methods alike, between iterations.

    Attributes:
        passes: of this rank.
        executor: runs the passes.
        program: an evaluation of one microbatch.
        groups: the axes and their process groups.
        slices: of every row; empty: rows are whole.
        samples: rows at a time, b.
        length: tokens of a row, s.
    """

    passes: StagePasses
    executor: Executor
    program: Program
    groups: Groups
    slices: Sequence[SequenceSlice]
    samples: int
    length: int

    @torch.no_grad()
    def outputs(self, tokens_bs: Tensor, last_b: Tensor) -> Tensor | None:
        """Run rows through all layers.

        Args:
            tokens_bs: int64, on the host, the same on every rank; anything behind ``last_b``.
            last_b: for every row the position of a token, int64, on the host.

        Returns:
            The input of the output layer at these tokens, [b, h], the same on every rank that has a
            part of the output layer; ``None`` on other ranks.
        """
        assert tokens_bs.shape == (self.samples, self.length), tokens_bs.shape
        # Targets are not needed here, so they tell the tokens apart, in whatever order a rank has
        # its own. To the output layer most of them are targets of other shards.
        marks_bs = torch.arange(tokens_bs.numel()).view_as(tokens_bs)
        marks_b = marks_bs.gather(1, last_b[:, None])[:, 0].to(self.groups.device)
        batch = [self._microbatch(tokens_bs, marks_bs)]
        self.passes.begin(batch, 0, training=False, predicts_ahead=False, marks_b=marks_b)
        self.executor.run(self.program)
        found_bh = self.passes.marked_bh
        if found_bh is not None:  # one of the ranks that share a row has its token, others zeros
            collectives.all_reduce(found_bh, collectives.SUM, self.groups.context)
        return found_bh

    def _microbatch(self, tokens_bs: Tensor, marks_bs: Tensor) -> DeviceMicrobatch:
        """Return the rows as this rank has them."""
        device, positions_1u = self.groups.device, None
        if self.groups.context.size > 1:
            lengths = [part.end - part.first for part in self.slices] or [self.length]
            context = self.groups.context
            kept_u = own_positions_in_slices(lengths, context.rank, context.size)
            tokens_bs, marks_bs = tokens_bs[:, kept_u], marks_bs[:, kept_u]
            positions_1u = kept_u[None].to(device)
        tokens_n = tokens_bs.flatten().to(device)
        return DeviceMicrobatch(
            tokens_n,
            marks_bs.flatten().to(device),
            torch.zeros(len(tokens_n), device=device),
            samples=len(tokens_bs),
            valid_tokens=0.0,
            positions_bs=positions_1u,
        )
