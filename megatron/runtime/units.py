"""Units: the slices of an iteration's microbatches, each of which the passes treat as a microbatch.

Unit ``i n + s`` is slice s of microbatch i, as ``Plan.unit`` numbers them. With one slice the units
are the microbatches themselves. ``UnitTensors`` says which tensors ranks send each other in a unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.layers.slices import SequenceSlice
from megatron.model.mtp import width_ahead
from megatron.model.stage import RankModel
from megatron.runtime.batch import DeviceMicrobatch


def units_of(
    batch: Sequence[DeviceMicrobatch], slices: Sequence[SequenceSlice]
) -> list[DeviceMicrobatch]:
    """Return the units of microbatches; without ``slices`` these are the microbatches."""
    if not slices:
        return list(batch)
    usual_1s = torch.arange(slices[0].length, device=batch[0].tokens_n.device)[None]
    return [_unit(microbatch, part, usual_1s) for microbatch in batch for part in slices]


def _unit(own: DeviceMicrobatch, part: SequenceSlice, usual_1s: Tensor) -> DeviceMicrobatch:
    """Return a slice of a microbatch; every token keeps its weight, its position and its document.

    If ranks share sequences, the microbatch has this rank's part of every slice. Losses of layers
    and tokens that count are shared out by the slices' lengths.

    Args:
        own: the microbatch.
        part: the slice.
        usual_1s: positions in a sample, [1, s], for a microbatch without positions of its own.
    """
    tokens_bu = own.tokens_n.view(own.samples, -1)
    positions_bu = usual_1s if own.positions_bs is None else own.positions_bs
    kept = part.among(tokens_bu.shape[1])

    def cut(tensor_n: Tensor) -> Tensor:
        return tensor_n.view_as(tokens_bu)[:, kept].flatten()

    return replace(
        own,
        tokens_n=cut(own.tokens_n),
        targets_n=cut(own.targets_n),
        weight_n=cut(own.weight_n),
        valid_tokens=own.valid_tokens * part.fraction,
        positions_bs=positions_bu[:, kept],
        mean_weight=own.mean_weight * part.fraction,
        further=_cut_further(own.further, kept),
    )


def _cut_further(
    further: tuple[Tensor, Tensor, Tensor] | None, kept: slice
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return what follows the tokens of a slice, for multi-token prediction."""
    if further is None:
        return None
    ids_bdu, targets_bdu, weight_bdu = further
    return ids_bdu[..., kept], targets_bdu[..., kept], weight_bdu[..., kept]


def are_cut(context_size: int, slices: Sequence[SequenceSlice]) -> bool:
    """Return whether a rank's unit has only a part of each of its samples.

    The rest is on ranks that share the sequences, or in other slices.
    """
    return context_size > 1 or bool(slices)


@dataclass(frozen=True)
class UnitTensors:
    """The shapes and types of the tensors that ranks send each other, in every unit.

    Between stages a rank sends the activations of its own tokens, [b, u, h], and behind the stage
    of multi-token prediction the output of all depths (``message``). Passes of the vocabulary move
    all tokens of the tensor-parallel ranks, [n, h].

    Attributes:
        shapes_buh: of the tensors between stages, in every slice of a microbatch.
        dtype: of activations.
        stream_dtype: of the residual stream, which stages send.
        sequence_parts: tensor-parallel ranks with u tokens each of every sample.
        cut: whether a unit has parts of samples (``are_cut``).
    """

    shapes_buh: Sequence[tuple[int, int, int]]
    dtype: torch.dtype
    stream_dtype: torch.dtype
    sequence_parts: int = 1
    cut: bool = False

    @classmethod
    def of(
        cls,
        shape_buh: tuple[int, int, int],
        dtype: torch.dtype,
        slices: Sequence[SequenceSlice],
        model: RankModel,
    ) -> "UnitTensors":
        """Return the tensors of a model's stages, from the shape of a whole microbatch."""
        b, u, h = shape_buh
        return cls(
            [(b, part.share(u), h) for part in slices] or [shape_buh],
            dtype,
            model.stream_dtype,
            model.tensor.sequence_parts,
            are_cut(model.context.size, slices),
        )

    def stage(self, i: int) -> tuple[int, int, int]:
        """Return the shape of a tensor between stages, [b, u, h], in unit ``i``."""
        return self.shapes_buh[i % len(self.shapes_buh)]

    def message(
        self, i: int, depths: int, *, has_depths: bool
    ) -> tuple[tuple[int, int, int], torch.dtype]:
        """Return the shape and the type of a message between two stages in unit ``i``.

        Args:
            i: the unit.
            depths: D, further tokens that every token predicts.
            has_depths: whether the stage of multi-token prediction is before the message, which
                then has the normed output of all depths in place of the stream.
        """
        if has_depths:
            return self.output(i, depths), self.dtype
        return self.stage(i), self.stream_dtype

    def output(self, i: int, depths: int) -> tuple[int, int, int]:
        """Return the shape [(1 + D) b, u, h] of what the output layer reads, on each rank.

        Every token predicts D = ``depths`` further tokens besides the next one.
        """
        b, u, h = self.stage(i)
        return (1 + depths) * b, u, h

    def ahead(self, i: int, depths: int) -> tuple[int, int, int]:
        """Return the shape [b, w, h], on each rank, of the embeddings of further tokens."""
        b, u, h = self.stage(i)
        return b, width_ahead(u, depths, cut=self.cut), h

    def of_all(self, shape_buh: tuple[int, int, int]) -> tuple[int, int]:
        """Return the shape [n, h] with the tokens of all ranks, from that of one rank's part."""
        b, u, h = shape_buh
        return self.sequence_parts * b * u, h
