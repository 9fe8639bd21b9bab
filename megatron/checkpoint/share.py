"""Divides the writing of tensors among the ranks that hold the same tensors.

Replicas hold the same boxes (parts of tensors). The bytes of these boxes, laid end to end, are cut
into equal lengths, one for each rank that holds them. A cut lies between two rows. So all these
ranks write equally much, and no byte is written twice.
"""

import hashlib
from collections.abc import Iterator, Mapping

from megatron.checkpoint.boxed import BoxedTensor
from megatron.parallel.box import Piece
from megatron.parallel.groups import ConnectedAxis

Part = tuple[int, int]
"""Place of a rank among the ranks that hold the same boxes, and the number of these ranks."""


def part_of(tensors: Mapping[str, BoxedTensor], hosts: ConnectedAxis) -> Part:
    """Return this rank's part of its tensors; every rank of the job calls it.

    Args:
        tensors: tensors of this rank, by name in the whole model.
        hosts: all ranks of the job.
    """
    described = [(name, tensor.dtype, tensor.pieces) for name, tensor in tensors.items()]
    own = hashlib.sha256(repr(described).encode()).digest()
    everybody = hosts.all_gather_object(own)
    return everybody[: hosts.rank].count(own), everybody.count(own)


def share(tensors: Mapping[str, BoxedTensor], part: Part) -> dict[str, BoxedTensor]:
    """Return the pieces that this rank writes; together the ranks write every row once.

    Args:
        tensors: tensors by name in the whole model, in the same order on every rank.
        part: result of ``part_of``.
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
    """Yield the rows whose first byte is number ``begin`` to ``end`` - 1, counted over pieces."""
    for piece in tensor.pieces:
        rows, size = piece.box.shape[0], _bytes(tensor, piece)
        first, last = (min(max(-(-at * rows // size), 0), rows) for at in (begin, end))
        if first < last:
            yield Piece(piece.box.rows(first, last), (piece.at[0] + first, *piece.at[1:]))
        begin, end = begin - size, end - size


def _bytes(tensor: BoxedTensor, piece: Piece) -> int:
    return piece.box.size * tensor.dtype.itemsize
