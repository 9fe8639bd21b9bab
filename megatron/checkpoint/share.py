"""What a rank writes of tensors that other ranks hold as well.

Replicas hold the same boxes. Their bytes, laid end to end, are cut into equal lengths, one for each
of the ranks that hold them. A cut lies between two rows. So all of them write equally much, and
none copies or writes what another one does.
"""

import hashlib
from collections.abc import Iterator, Mapping

from megatron.checkpoint.boxed import BoxedTensor
from megatron.parallel.box import Piece
from megatron.parallel.groups import ConnectedAxis

Part = tuple[int, int]
"""Place of a rank among those that hold the same boxes, and their number."""


def part_of(tensors: Mapping[str, BoxedTensor], hosts: ConnectedAxis) -> Part:
    """Return this rank's part of its tensors; every rank of the job calls it.

    Args:
        tensors: what this rank holds, by name in the whole model.
        hosts: all ranks of the job.
    """
    described = [(name, tensor.dtype, tensor.pieces) for name, tensor in tensors.items()]
    own = hashlib.sha256(repr(described).encode()).digest()
    everybody = hosts.all_gather_object(own)
    return everybody[: hosts.rank].count(own), everybody.count(own)


def share(tensors: Mapping[str, BoxedTensor], part: Part) -> dict[str, BoxedTensor]:
    """Return what is written here of tensors; together the parts are all of them, once.

    Args:
        tensors: by name in the whole model, in the same order in every part.
        part: as ``part_of`` returns it.
    """
    place, holders = part
    total = sum(_bytes(tensor, piece) for tensor in tensors.values() for piece in tensor.pieces)
    begin, end = total * place // holders, total * (place + 1) // holders
    found, passed = {}, 0
    for name, tensor in tensors.items():
        pieces = list(_between(tensor, begin - passed, end - passed))
        passed += sum(_bytes(tensor, piece) for piece in tensor.pieces)
        if pieces:
            found[name] = tensor.only(pieces)
    return found


def _between(tensor: BoxedTensor, begin: int, end: int) -> Iterator[Piece]:
    """Yield the rows whose first bytes lie from ``begin`` to ``end`` - 1, counted over pieces."""
    for piece in tensor.pieces:
        rows, size = piece.box.shape[0], _bytes(tensor, piece)
        first, last = (min(max(-(-at * rows // size), 0), rows) for at in (begin, end))
        if first < last:
            yield Piece(piece.box.rows(first, last), (piece.at[0] + first, *piece.at[1:]))
        begin, end = begin - size, end - size


def _bytes(tensor: BoxedTensor, piece: Piece) -> int:
    return piece.box.size * tensor.dtype.itemsize
