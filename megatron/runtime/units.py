"""Units: the slices of an iteration's microbatches, each of which the passes treat as a microbatch.

Unit ``i n + s`` is slice s of microbatch i, as ``Plan.unit`` numbers them. With one slice the units
are the microbatches themselves.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.layers.slices import SequenceSlice
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


def shapes_of(
    shape_buh: tuple[int, int, int], slices: Sequence[SequenceSlice]
) -> list[tuple[int, int, int]]:
    """Return the shape of a rank's activations in every slice, from their shape in a microbatch."""
    b, u, h = shape_buh
    return [(b, part.share(u), h) for part in slices] or [shape_buh]
