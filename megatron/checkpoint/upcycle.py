"""Begins a mixture of experts from the checkpoint of a dense model (upcycling, arXiv 2212.05055).

Every expert is a copy of the layer's MLP. With a granularity G an expert is one of G parts of the
MLP (arXiv 2410.07524): expert j has the inner channels of part j mod G, and experts that follow one
another make a whole MLP. Their rows of the router are equal, so a token that chooses one of them
chooses all of them.

The weights of a token's experts add up to a sum S. The second layer of each expert is multiplied by
G / S, so that the mixture has the output of the dense layer. The outputs are equal if S is the same
for all tokens. With a softmax over all experts, S depends on the token. Then S is that of a router
which gives all experts the same score.

Shapes: e experts, f inner width of an expert, h hidden size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from megatron.checkpoint.boxed import BoxedTensor
from megatron.layers.seeds import stable_seed
from megatron.model.maximal_update import in_usual_terms
from megatron.model.settings import ModelSettings
from megatron.parallel.box import Box, Shape, whole

_EXPERTS: Final = ".mlp.experts."
_ROUTER: Final = ".mlp.router."


@dataclass(frozen=True)
class Upcycling:
    """How experts are made of an MLP.

    Attributes:
        model: the mixture.
        granularity: parts G that an MLP is divided into.
        seed: seed of the run, for routers whose rows are repeated.
    """

    model: ModelSettings
    granularity: int
    seed: int

    def fault(self, dense: Mapping[str, Any]) -> str | None:
        """Return why experts cannot be made of the MLPs of a model; ``None``: there is no reason.

        Args:
            dense: fields of the dense model by name.
        """
        width, own = dense.get("ffn_hidden_size"), self.model.experts.moe_ffn_hidden_size
        if width == own * self.granularity:
            return None
        return (
            f"--moe-use-upcycling makes experts of an MLP of width {width}, which is not "
            f"--moe-upcycling-granularity {self.granularity} times --moe-ffn-hidden-size {own}: "
            "give another of the two"
        )

    def dense_tensors(self, tensors: Mapping[str, BoxedTensor]) -> dict[str, BoxedTensor]:
        """Return the tensors to read from the dense model's checkpoint.

        Tensors that the dense model has too are read into their own memory. Of each tensor of
        experts the whole tensor of the MLP is read. Routers are not read.

        Args:
            tensors: tensors of this rank by name in the whole mixture.
        """
        found = {}
        for name, tensor in tensors.items():
            if _EXPERTS in name:
                shape = self._blocks(name).dense
                dense = torch.empty(shape, dtype=tensor.dtype)
                found[_dense(name)] = BoxedTensor(dense, shape, whole(shape))
            elif _ROUTER not in name:
                found[name] = tensor
        return found

    def fill(self, tensors: Mapping[str, BoxedTensor], dense: Mapping[str, BoxedTensor]) -> None:
        """Make experts and routers.

        Args:
            tensors: as for ``dense_tensors``.
            dense: the result of ``dense_tensors``, which was read.
        """
        for name, tensor in tensors.items():
            if _EXPERTS in name:
                self._fill_experts(name, tensor, dense[_dense(name)].as_subclass(Tensor))
            elif _ROUTER in name and self.granularity > 1:
                self._repeat_rows(name, tensor)

    def _fill_experts(self, name: str, tensor: BoxedTensor, dense: Tensor) -> None:
        blocks, own = self._blocks(name), tensor.as_subclass(Tensor)
        dense = dense * blocks.factor
        for piece in tensor.pieces:
            for box, source in blocks.parts_of(piece.box):
                target = own[box.within(piece.box).moved(piece.at).slices]
                target.copy_(dense[source.slices])

    def _repeat_rows(self, name: str, tensor: BoxedTensor) -> None:
        """Draw a router anew, a row for each whole MLP; a rank's device makes no difference."""
        model, parts = self.model, self.granularity
        generator = torch.Generator().manual_seed(stable_seed(self.seed, name, parts))
        columns = tensor.size()[1:]  # none, if the tensor is the router's bias
        rows = torch.randn(model.experts.num_experts // parts, *columns, generator=generator)
        std = in_usual_terms(model).init_method_std
        whole_router = (std * rows).repeat_interleave(parts, 0)
        for piece in tensor.pieces:
            tensor.as_subclass(Tensor)[piece.local.slices].copy_(whole_router[piece.box.slices])

    def _blocks(self, name: str) -> "_Blocks":
        model, parts = self.model, self.granularity
        f, h, halves = model.experts.moe_ffn_hidden_size, model.hidden_size, 1 + model.mlp.is_gated
        is_bias, first = name.endswith(".bias"), ".linear_fc1." in name
        if first:
            columns = () if is_bias else (h,)
            return _Blocks(f, columns, halves, (halves * parts * f, *columns), parts)
        factor = 1 / sum_of_weights(model)
        if is_bias:
            return _Blocks(h, (), 1, (h,), 1, factor)
        return _Blocks(h, (f,), 1, (h, parts * f), parts, factor * parts, cuts_columns=True)


@dataclass(frozen=True)
class _Blocks:
    """Where the blocks of rows of an experts' tensor lie in the tensor of the MLP.

    Attributes:
        rows: rows of a block.
        columns: the other dimensions of the experts' tensor.
        fused: blocks of an expert, one after the other: 2 for gate and up.
        dense: shape of the tensor of the MLP.
        parts: parts of the MLP.
        factor: factor of all elements.
        cuts_columns: the parts are columns of the MLP's tensor, not rows.
    """

    rows: int
    columns: Shape
    fused: int
    dense: Shape
    parts: int
    factor: float = 1.0
    cuts_columns: bool = False

    def parts_of(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """Yield the parts of a box of experts, each with its box in the MLP's tensor."""
        first, last = box.start[0] // self.rows, -(-box.stop[0] // self.rows)
        for number in range(first, last):
            start = (number * self.rows, *(0 for _ in self.columns))
            common = Box(start, (self.rows, *self.columns)) & box
            yield common, common.moved(self._offset(number))

    def _offset(self, number: int) -> Shape:
        """Return the distance from a block in the experts' tensor to the block in the MLP's."""
        expert, half = divmod(number, self.fused)
        part = expert % self.parts
        if self.cuts_columns:
            return (-number * self.rows, part * self.columns[0])
        row = (half * self.parts + part) * self.rows
        return (row - number * self.rows, *(0 for _ in self.columns))


def sum_of_weights(model: ModelSettings) -> float:
    """Return the sum of the weights of a token's experts, for a router without preferences."""
    own, total = model.experts, 1.0
    topk, share = own.moe_router_topk, own.moe_router_topk / own.num_experts
    if model.balance.is_by_sinkhorn:
        return 0.5 if topk == 1 else share
    if own.moe_router_score_function == "sigmoid":
        total = 0.5 if topk == 1 else 1.0
    elif own.moe_router_pre_softmax:
        total = share
    return total * own.moe_router_topk_scaling_factor


def _dense(name: str) -> str:
    """Return the name of the MLP's tensor that experts are made of."""
    return name.replace(_EXPERTS, ".mlp.")
