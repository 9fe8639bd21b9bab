"""Everything that a rank holds of the model and its optimizer, and a checksum of each tensor.

Which ranks hold copies of a tensor follows from the boxes alone: ranks with the same boxes of a
tensor of the whole model must have the same bits there. These ranks may be replicas, tensor
parallel ranks (norms, routers), the two stages with the embedding, or ranks with the same experts.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from megatron.kernels.checksum import checksum
from megatron.parallel.box import Piece, whole
from megatron.training.setup import TrainState

OF_OPTIMIZER: Final = "of the optimizer"


@dataclass(frozen=True)
class Held:
    """A tensor of this rank.

    Attributes:
        kind: such as ``value``, or the name of a tensor of the optimizer.
        name: of the parameter, in the whole model.
        pieces: the boxes of the whole model's tensor that this rank holds. If they are smaller than
            a tensor of the parameter's shape, the rest is padding, which copies need not share.
        tensor: this rank's tensor, of the parameter's shape or with a number for every block of it.
        is_moment: whether the optimizer keeps the tensor and changes it with every step.
    """

    kind: str
    name: str
    pieces: tuple[Piece, ...]
    tensor: Tensor
    is_moment: bool = False

    def __str__(self) -> str:
        """Return the tensor in words."""
        return self.name if self.kind == "value" else f"{self.name} ({self.kind})"

    @property
    def key(self) -> int:
        """A number of 64 bits that only ranks with the same boxes share."""
        described = repr((self.kind, self.name, self.pieces)).encode()
        return int.from_bytes(hashlib.sha256(described).digest()[:8], "little", signed=True)

    def checksum(self) -> Tensor:
        """Return the checksum without padding, int64 [] on the tensor's device."""
        tensor = self.tensor.detach()
        if sum(piece.box.size for piece in self.pieces) >= tensor.numel():
            return checksum(tensor)
        found = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for number, piece in enumerate(self.pieces):
            found = found + checksum(tensor[piece.local.slices]) * (2 * number + 1)
        return found


def held_by(state: TrainState) -> Iterator[Held]:
    """Yield every tensor that a save reads or a pass uses; a sharded optimizer must be settled."""
    for bucket in state.buckets:
        for owned, tensors in bucket.read_by_passes():
            for kind, tensor in tensors.items():
                yield Held(kind, owned.name, owned.pieces, tensor)
    for part in state.updated:
        for kind, tensor in state.optimizer.tensors_of(part.name).items():
            if tensor.data_ptr() != part.weight.data_ptr():  # an fp32 weight is its own master
                kind = f"{kind} {OF_OPTIMIZER}"
                moment = not kind.startswith("weight ")
                yield Held(kind, part.name, part.pieces, tensor, moment)
    for own in state.pipeline.model.owned_buffers():
        yield Held("value", own.name, whole(tuple(own.buffer.shape)), own.buffer)
    delayed = state.delayed_scales
    if delayed is not None and delayed.has_history:
        for name, tensor in delayed.tensors().items():
            yield Held("scales of 8 bits", name, whole(tuple(tensor.shape)), tensor)


def checksums(held: Iterable[Held]) -> list[int]:
    """Return the checksums of some tensors; the host waits once for each device."""
    found = [own.checksum() for own in held]
    values = [0] * len(found)
    for device in {value.device for value in found}:
        places = [place for place, value in enumerate(found) if value.device == device]
        together = torch.stack([found[place] for place in places]).tolist()
        for place, value in zip(places, together, strict=True):
            values[place] = value
    return values
