"""Numbers about the whole model for the log: zeros in the gradient, norm of the weights.

Every element of the model counts once under any layout: copies and padding are left out, and each
replica counts only its own shards.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.kernels.reference.optimizer import sum_of_squares
from megatron.optimizer.parameters import ParameterPart
from megatron.parallel.groups import ConnectedAxis


def zeros_in_gradient(
    parts: Sequence[ParameterPart], world: ConnectedAxis, device: torch.device
) -> int:
    """Return how many elements of the model's gradient are zero.

    Args:
        parts: the parts of parameters that this rank counts, with reduced gradients.
        world: all ranks of the job; each calls this function.
        device: of the gradients.
    """
    own = torch.zeros((), dtype=torch.float64, device=device)
    for part in _counted(parts):
        for piece in part.pieces:
            gradient = part.gradient[piece.local.slices]
            own += gradient.numel() - torch.count_nonzero(gradient)
    world.all_reduce(own)
    return int(own)


def norm_of_weights(
    parts: Sequence[ParameterPart], world: ConnectedAxis, device: torch.device
) -> float:
    """Return the norm of all weights of the model, in the dtype that the forward pass reads.

    Args:
        parts: the parts of parameters that this rank counts.
        world: all ranks of the job; each calls this function.
        device: of the weights.
    """
    own = torch.zeros((), dtype=torch.float64, device=device)
    for part in _counted(parts):  # padding is zero
        own += sum_of_squares(_in_full(part.weight))
    world.all_reduce(own)
    return float(own.sqrt())


def _counted(parts: Sequence[ParameterPart]) -> list[ParameterPart]:
    return [part for part in parts if part.counts_in_norm]


def _in_full(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
