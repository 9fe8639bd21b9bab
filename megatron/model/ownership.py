"""Who owns what: the parameters of one rank, each with the boxes of the whole model's tensor."""

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
"""Begin of the names of all parameters of transformer layers."""


def layer_prefix(layer_number: int) -> str:
    """Return the prefix of a layer's parameter names in the whole model; layers count from 0."""
    return f"{LAYERS}{layer_number}."


@dataclass(frozen=True)
class OwnedParameter:
    """A parameter of this rank, and which part of the whole model's tensor it is.

    Attributes:
        name: name of the tensor in the whole model, as in Megatron's checkpoints.
        parameter: the tensor here. What is in no piece is padding, and zero.
        global_shape: shape of the whole tensor, without padding.
        pieces: the boxes that are here.
        is_copy: whether another rank of the replica holds the same boxes and counts them: for
            the gradient norm, in checkpoints and when a tensor is put together.
        is_partial: whether the gradient here is only one summand of the boxes' gradient. The ranks
            of the tensor axis hold the others; their sum is due before that over the replicas.
        axis: the ranks over which the gradient is summed, of which each has other tokens and the
            same boxes; ``None``: all ranks of the job's axis ``gradients``. Ranks that hold other
            boxes under a name, as of experts, name fewer.
    """

    name: str
    parameter: nn.Parameter
    global_shape: Shape
    pieces: tuple[Piece, ...]
    is_copy: bool = False
    is_partial: bool = False
    axis: ConnectedAxis | None = None

    def summed_over(self, usual: ConnectedAxis) -> ConnectedAxis:
        """Return the ranks over which the gradient is summed.

        Args:
            usual: those of a parameter that names none.
        """
        return usual if self.axis is None else self.axis

    def sharers(self, usual: int) -> int:
        """Return the number of ranks over which the gradient is summed; ``usual`` likewise."""
        return usual if self.axis is None else self.axis.size

    @classmethod
    def whole(cls, name: str, parameter: nn.Parameter) -> "OwnedParameter":
        """Return a parameter that is a whole tensor of the model."""
        return cls(name, parameter, tuple(parameter.shape), whole(parameter.shape))

    @classmethod
    def held(
        cls, name: str, parameter: nn.Parameter, tensor: TensorParallel, how: Holding = WHOLE
    ) -> "OwnedParameter":
        """Return a parameter that the tensor ranks hold together.

        Args:
            name: of the tensor in the whole model.
            parameter: the tensor here.
            tensor: the tensor ranks.
            how: whether they cut it.
        """
        own = tuple(parameter.shape)
        return cls(
            name,
            parameter,
            how.whole_shape(own, tensor),
            how.pieces(own, tensor),
            how.is_copy(tensor),
            how.is_partial(tensor),
        )

    def parts(self, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield every box that is here, with its part of ``tensor``.

        Args:
            tensor: the parameter, or a tensor of its shape such as its gradient. The parts are
                views of it.
        """
        for piece in self.pieces:
            yield piece.box, tensor[piece.local.slices]


def owned_by(
    module: nn.Module, prefix: str, tensor: TensorParallel = ALONE
) -> Iterator[OwnedParameter]:
    """Yield every parameter of a module that the tensor ranks hold together.

    Args:
        module: says by ``holdings`` which parameters are cut.
        prefix: of the parameters' names in the whole model.
        tensor: the tensor ranks.
    """
    holdings = holdings_of(module)
    for name, parameter in module.named_parameters():
        yield OwnedParameter.held(prefix + name, parameter, tensor, holdings[name])
