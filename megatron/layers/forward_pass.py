"""What a forward pass brings to every layer. A new property of a batch is a field here.

A stage receives the object for a microbatch, and hands each layer the same object with the layer's
own rotation and seeds. Nothing on the way from a pass to a part of a layer names a single field.
"""

from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from megatron.kernels.documents import Documents
from megatron.layers.dropout import DropoutSeeds
from megatron.layers.recompute import Again
from megatron.layers.rope import RotaryEmbedding


class LayerLosses:
    """The place where the layers of a stage leave losses of their own in one forward pass.

    A layer that is computed again for its backward leaves its loss again. The place is closed by
    then, and such a loss is dropped.
    """

    def __init__(self) -> None:
        self._left: list[Tensor] = []
        self._is_closed = False

    def leave(self, loss: Tensor) -> None:
        """Leave a loss, a scalar."""
        if not self._is_closed:
            self._left.append(loss)

    def close(self) -> list[Tensor]:
        """Return all losses in the order in which they were left; none can be left from now on."""
        left, self._left, self._is_closed = self._left, [], True
        return left


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass of a microbatch.

    Attributes:
        seeds: of dropout, at the place of the layer at hand; ``None``: nothing is dropped, as
            outside of training.
        rope: rotation of the tokens that this rank has, by the layer at hand; ``None``: the layer
            rotates nothing.
        documents: of whole samples, none of which sees another; ``None``: a position sees all
            earlier ones.
        positions_bs: of all tokens of the microbatch, [b, s], or [1, s] for all samples alike;
            ``None``: 0, 1, 2, ...
        ahead_bwh: embeddings of the tokens that follow, on the last stage, to predict further
            tokens from; ``None``: only the next token is predicted.
        left_out: gets the groups of layers that the backward needs computed again; ``None``: nobody
            computes them ahead of their backward.
        losses: gets the losses of layers; ``None``: they count for nothing.
    """

    seeds: DropoutSeeds | None = None
    rope: RotaryEmbedding | None = None
    documents: Documents | None = None
    positions_bs: Tensor | None = None
    ahead_bwh: Tensor | None = None
    left_out: list[Again] | None = None
    losses: LayerLosses | None = None

    @property
    def of_layers(self) -> "ForwardPass":
        """The same pass without the parts that only a stage reads.

        Layers that are computed again hold the pass until then. Further embeddings would be held
        as long, and the list of these layers would hold itself.
        """
        return replace(self, ahead_bwh=None, left_out=None)

    def in_layer(self, index: int, rope: RotaryEmbedding | None) -> "ForwardPass":
        """Return what the pass brings to one layer.

        Args:
            index: of the layer in the whole model.
            rope: rotation by the layer, of the tokens that this rank has.
        """
        seeds = None if self.seeds is None else replace(self.seeds, layer=index)
        return replace(self, seeds=seeds, rope=rope)

    def leave_loss(self, loss: Tensor) -> None:
        """Leave a loss of a layer's own, such as that of a router.

        The loss is added to the iteration's, weighted by the microbatch's tokens that count.

        Args:
            loss: a scalar, the mean over the tokens that this rank has outside of attention and
                MLP, already multiplied by its coefficient.
        """
        if self.losses is not None:
            self.losses.leave(loss)


PLAIN_PASS: Final = ForwardPass()
"""A pass that brings nothing: whole samples from position 0 on, and no dropout."""
