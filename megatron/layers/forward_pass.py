"""The data of a forward pass for every layer. A new property of a batch is a new field here.

A stage receives a ``ForwardPass`` for a microbatch, and gives each layer a copy with the layer's
own rotation and seeds. Code between a pass and a part of a layer hands the object on as a whole, so
a new field needs no change there.
"""

from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from megatron.kernels.documents import Documents
from megatron.layers.dropout import DropoutSeeds
from megatron.layers.left_losses import LayerLosses, LeftLoad, LeftLoss
from megatron.layers.recompute import Again
from megatron.layers.rope import RotaryEmbedding
from megatron.layers.slices import SequenceSlice, SlicedPass


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass of a microbatch.

    Attributes:
        seeds: of dropout, for the current layer; ``None``: no dropout, as outside of training.
        rope: the current layer's rotation for the tokens of this rank; ``None``: no rotation.
        documents: the documents of whole samples; tokens of one document do not see another.
            ``None``: a position sees all earlier positions.
        positions_bs: positions of all tokens of the microbatch, [b, s], or [1, s] if all samples
            have the same; ``None``: 0, 1, 2, ...
        ahead_bwh: embeddings of the following tokens for multi-token prediction, on the last stage;
            ``None``: only the next token is predicted.
        left_out: gets the groups of layers to recompute, for R; ``None``: the backward recomputes
            them when it needs them.
        losses: gets the losses of layers and the loads of their experts; ``None``: nobody wants
            them, as in an evaluation.
        layer: index of the current layer in the whole model.
        sliced: the slice that the pass is of, and the keys of earlier ones; ``None``: the samples
            are whole.
        is_apart: whether no token may change the result of an earlier token or of another sample.
            Then experts are never full, and their router does not force a balance. In 8 bits, a
            scale of a whole tensor still comes from all samples and tokens of the pass.
    """

    seeds: DropoutSeeds | None = None
    rope: RotaryEmbedding | None = None
    documents: Documents | None = None
    positions_bs: Tensor | None = None
    ahead_bwh: Tensor | None = None
    left_out: list[Again] | None = None
    losses: LayerLosses | None = None
    layer: int = -1
    sliced: SlicedPass | None = None
    is_apart: bool = False

    @property
    def part(self) -> SequenceSlice | None:
        """The slice of every sample that the pass is of; ``None``: the samples are whole."""
        return None if self.sliced is None else self.sliced.part

    @property
    def of_layers(self) -> "ForwardPass":
        """The same pass without the parts that only a stage reads.

        Layers to recompute keep the pass alive until then. They would also keep ``ahead_bwh``
        alive, and the list ``left_out`` would contain a reference to itself.
        """
        return replace(self, ahead_bwh=None, left_out=None)

    def in_layer(self, index: int, rope: RotaryEmbedding | None) -> "ForwardPass":
        """Return the pass for one layer.

        Args:
            index: of the layer in the whole model.
            rope: the layer's rotation for the tokens of this rank.
        """
        seeds = None if self.seeds is None else replace(self.seeds, layer=index)
        return replace(self, seeds=seeds, rope=rope, layer=index)

    def leave_loss(self, name: str, value: Tensor, coefficient: float = 1.0) -> None:
        """Leave a layer's own loss, such as a router's balancing loss.

        The loss times its coefficient is added to the iteration's loss, weighted by the
        microbatch's tokens that count. The log has the mean over the layers that leave a loss of
        this name, without the coefficient. A part declares its names (``LeavesLosses``).

        Args:
            name: of the loss in the log.
            value: a scalar, the mean over the tokens that this rank has outside of attention and
                MLP.
            coefficient: factor of the value in the loss that is trained on.
        """
        if self.losses is not None:
            self.losses.leave(LeftLoss(self.layer, name, value.detach(), coefficient * value))

    @property
    def counts_load(self) -> bool:
        """Whether the layer shall leave the load of its experts, once for every microbatch."""
        return self.losses is not None and self.losses.is_open

    def leave_load(self, times_e: Tensor) -> None:
        """Leave how often this rank's tokens have chosen each expert of the layer, int64 [e]."""
        assert self.losses is not None, "nobody asks for it"
        self.losses.leave_load(LeftLoad(self.layer, times_e))


PLAIN_PASS: Final = ForwardPass()
"""A pass with defaults only: whole samples from position 0 on, and no dropout."""
