"""Matrices that tensor-parallel ranks share, gathered for updates that need whole matrices.

Every rank gathers the other ranks' parts, forms the whole update, and keeps its own part of the
update (``--muon-tp-mode duplicated``, as in Megatron). All t ranks do the same work. The update
therefore does not depend on how the matrix is cut.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.optimizer.parameters import ParameterPart
from megatron.parallel import collectives
from megatron.parallel.box import check_tiling, whole
from megatron.parallel.groups import ConnectedAxis


class WholeMatrices:
    """Some matrices of the model; every rank of the axis makes an object with its own parts.

    Args:
        parts: this rank's parts of the matrices.
        axis: the ranks that share the matrices, with a process group for communication outside of
            the schedule.

    Raises:
        ValueError: the parts of all ranks together are not the whole matrices.
    """

    def __init__(self, parts: Sequence[ParameterPart], axis: ConnectedAxis) -> None:
        self._axis = axis
        shared = [part for part in parts if axis.size > 1 and not _is_here(part)]
        self._pieces = axis.all_gather_object({part.name: part.pieces for part in shared})
        self._shared = {part.name for part in shared}
        for part in shared:
            boxes = [piece.box for pieces in self._pieces for piece in pieces[part.name]]
            check_tiling(part.global_shape, boxes)

    def gathered(self, part: ParameterPart, own: Tensor) -> Tensor:
        """Gather a whole tensor from the ranks' parts; all ranks make these calls in one order.

        Matrices that this rank has whole are returned as they are. Of experts that are spread over
        ranks, they are the matrices of this rank's experts.

        Args:
            part: this rank's part of a matrix, which says where the tensor is cut.
            own: this rank's part of the tensor, of the shape of ``part``.
        """
        if part.name not in self._shared:
            return own
        whole = torch.empty(part.global_shape, dtype=own.dtype, device=own.device)
        shares = collectives.all_gather(own.contiguous(), self._axis)
        for share, pieces in zip(shares, self._pieces, strict=True):
            for piece in pieces[part.name]:
                whole[piece.box.slices] = share[piece.local.slices]
        return whole

    def own_part(self, part: ParameterPart, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor.

        Args:
            part: this rank's part of the matrix.
            whole: the tensor, as ``gathered`` returns it.
        """
        if part.name not in self._shared:
            return whole
        own = torch.empty_like(part.gradient, dtype=whole.dtype)
        for piece in part.pieces:
            own[piece.local.slices] = whole[piece.box.slices]
        return own


def _is_here(part: ParameterPart) -> bool:
    """Return whether this rank has all of a matrix, or all matrices of its experts."""
    return part.owned.axis is not None or part.pieces == whole(part.global_shape)
