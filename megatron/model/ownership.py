"""The parameters of one rank, each with its boxes in the whole model's tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn

from megatron.layers.tensor_cut import WHOLE, Holding, holdings_of
from megatron.parallel.box import Box, Piece, Shape, whole
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.tensor import ALONE, TensorParallel

WORD_EMBEDDINGS: Final = "embedding.word_embeddings.weight"
EMBEDDING_NORM: Final = "embedding.word_embeddings.norm"
POSITION_EMBEDDINGS: Final = "embedding.position_embeddings"
FINAL_NORM: Final = "decoder.final_layernorm"
OUTPUT_LAYER: Final = "output_layer.weight"
MULTI_TOKEN_PREDICTION: Final = "mtp"
LAYERS: Final = "decoder.layers."
"""Prefix of the names of all parameters of transformer layers."""


def layer_prefix(layer_number: int) -> str:
    """Return the prefix of a layer's parameter names in the whole model; layers count from 0."""
    return f"{LAYERS}{layer_number}."


@dataclass(frozen=True)
class OwnedParameter:
    """A parameter of this rank, and which part of the whole model's tensor it is.

    Attributes:
        name: name of the tensor in the whole model, as in Megatron's checkpoints.
        parameter: this rank's tensor. Elements outside of all pieces are padding, and zero.
        global_shape: shape of the whole tensor, without padding.
        pieces: the boxes that this rank holds.
        is_copy: whether another rank of the replica holds the same boxes and counts them: in the
            gradient norm, in checkpoints and when a whole tensor is assembled.
        is_partial: whether this rank's gradient is only one summand of the boxes' gradient. The
            other ranks of the tensor axis hold the other summands, which must be summed before the
            sum over the replicas.
        axis: the ranks over which the gradient is summed. They hold the same boxes and have
            different tokens. ``None``: all ranks of the job's axis ``gradients``. If these ranks
            hold different boxes of a parameter, as of experts, the parameter names only those with
            the same boxes.
        matrices: number of equal matrices that lie one below the other in the tensor; this rank
            holds a part of each. A stack of experts has one matrix for each expert of the rank.
    """

    name: str
    parameter: nn.Parameter
    global_shape: Shape
    pieces: tuple[Piece, ...]
    is_copy: bool = False
    is_partial: bool = False
    axis: ConnectedAxis | None = None
    matrices: int = 1

    def summed_over(self, usual: ConnectedAxis) -> ConnectedAxis:
        """Return the ranks over which the gradient is summed.

        Args:
            usual: the ranks for a parameter without an ``axis``.
        """
        return usual if self.axis is None else self.axis

    def sharers(self, usual: int) -> int:
        """Return the number of ranks over which the gradient is summed.

        Args:
            usual: this number for a parameter without an ``axis``.
        """
        return usual if self.axis is None else self.axis.size

    @classmethod
    def whole(cls, name: str, parameter: nn.Parameter) -> "OwnedParameter":
        """Return a parameter that is a whole tensor of the model."""
        return cls(name, parameter, tuple(parameter.shape), whole(parameter.shape))

    @classmethod
    def held(
        cls, name: str, parameter: nn.Parameter, tensor: TensorParallel, how: Holding = WHOLE
    ) -> "OwnedParameter":
        """Return a parameter of a layer.

        Args:
            name: of the tensor in the whole model.
            parameter: this rank's tensor.
            tensor: the tensor-parallel ranks.
            how: whether these ranks cut the parameter, or each holds all of it, or the ranks of
                experts share it.
        """
        own = tuple(parameter.shape)
        return cls(
            name,
            parameter,
            how.whole_shape(own, tensor),
            how.pieces(own, tensor),
            how.is_copy(tensor),
            how.is_partial(tensor),
            how.axis,
            how.matrices,
        )

    def parts(self, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield every box of this rank, with a view of the box's part of ``tensor``.

        Args:
            tensor: the parameter, or a tensor of the same shape such as the gradient.
        """
        for piece in self.pieces:
            yield piece.box, tensor[piece.local.slices]


@dataclass(frozen=True)
class OwnedBuffer:
    """A tensor of the model that no gradient reaches, such as the bias of experts for the choice.

    Every rank that has a part of the layer has the whole tensor.

    Attributes:
        name: name of the tensor in the whole model.
        buffer: the tensor.
    """

    name: str
    buffer: Tensor


def owned_by(
    module: nn.Module, prefix: str, tensor: TensorParallel = ALONE
) -> Iterator[OwnedParameter]:
    """Yield every parameter of a module that the tensor-parallel ranks share.

    Args:
        module: the module; the ``holdings`` of its parts tell which parameters are cut.
        prefix: of the parameters' names in the whole model.
        tensor: the tensor-parallel ranks.
    """
    holdings = holdings_of(module)
    for name, parameter in module.named_parameters():
        yield OwnedParameter.held(prefix + name, parameter, tensor, holdings[name])
