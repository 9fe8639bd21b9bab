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
    return [_unit(microbatch, part) for microbatch in batch for part in slices]


def _unit(own: DeviceMicrobatch, part: SequenceSlice) -> DeviceMicrobatch:
    """Return a slice of a microbatch; every token keeps its weight, its position and its document.

    Losses of layers and tokens that count are shared out by the slices' lengths.
    """
    positions_bs = own.positions_bs
    if positions_bs is None:
        positions_bs = torch.arange(part.length, device=own.tokens_n.device)[None]
    share = (part.end - part.first) / part.length

    def cut(tensor_n: Tensor) -> Tensor:
        return tensor_n.view(own.samples, part.length)[:, part.first : part.end].flatten()

    return replace(
        own,
        tokens_n=cut(own.tokens_n),
        targets_n=cut(own.targets_n),
        weight_n=cut(own.weight_n),
        valid_tokens=own.valid_tokens * share,
        positions_bs=positions_bs[:, part.first : part.end],
        mean_weight=own.mean_weight * share,
    )


def shapes_of(
    shape_buh: tuple[int, int, int], slices: Sequence[SequenceSlice]
) -> list[tuple[int, int, int]]:
    """Return the shape of a rank's activations in every slice, from their shape in a microbatch."""
    b, u, h = shape_buh
    return [(b, part.share(u), h) for part in slices] or [shape_buh]
