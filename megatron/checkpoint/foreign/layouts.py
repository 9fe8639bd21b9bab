"""How a tensor of this program is made of tensors of another program, and back.

"Our" tensors belong to this program, "their" tensors to the other program. A family's table names
the layout of each of our tensors. A layout moves numbers and changes none, so an imported model is
exported bit for bit.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from megatron.layers.site import Site
from megatron.model.ownership import LAYERS, MULTI_TOKEN_PREDICTION
from megatron.model.placement import place
from megatron.model.settings import ModelSettings
from megatron.model.stage import RankModel
from megatron.parallel.box import Shape

DEPTHS: Final = f"{MULTI_TOKEN_PREDICTION}.layers."
"""Prefix of our names of all parameters of multi-token prediction."""


class ForeignError(ValueError):
    """Weights that cannot be converted; the message names the file, the fault and its reason."""


class Layout:
    """The foreign tensors ("their tensors") that make one of our tensors.

    By default one foreign tensor is equal to ours.

    Args:
        names: names of their tensors; ``{}`` stands for the number of the layer.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def names_in(self, model: ModelSettings) -> tuple[str, ...]:
        """Return the names of their tensors in a model."""
        return self.names

    def copies_in(self, model: ModelSettings) -> tuple[str, ...]:
        """Return the names of copies of other tensors: a file may leave these tensors out."""
        return ()

    def shapes(self, ours: Shape, model: ModelSettings) -> list[Shape]:
        """Return the shapes of their tensors, given the shape of our tensor."""
        return [ours]

    def join(self, theirs: Sequence[Tensor], model: ModelSettings) -> Tensor:
        """Return our tensor, made of their tensors."""
        return theirs[0]

    def split(self, ours: Tensor, model: ModelSettings) -> list[Tensor]:
        """Return their tensors, made of our tensor."""
        return [ours]


class Same(Layout):
    """A tensor that our model and the foreign model hold in the same form."""


class Halves(Layout):
    """Two of their tensors of equal shape (gate and up), which lie one below the other in ours."""

    def shapes(self, ours: Shape, model: ModelSettings) -> list[Shape]:
        """As in ``Layout``."""
        return [(ours[0] // 2, *ours[1:])] * 2

    def join(self, theirs: Sequence[Tensor], model: ModelSettings) -> Tensor:
        """As in ``Layout``."""
        return torch.cat(tuple(theirs))

    def split(self, ours: Tensor, model: ModelSettings) -> list[Tensor]:
        """As in ``Layout``."""
        return list(ours.chunk(2))


class Heads(Layout):
    """Three matrices for queries, keys and values; ours is one matrix, ordered by query groups."""

    def shapes(self, ours: Shape, model: ModelSettings) -> list[Shape]:
        """As in ``Layout``."""
        return [
            (rows * model.attention.num_query_groups, *ours[1:]) for rows in _rows_of_group(model)
        ]

    def join(self, theirs: Sequence[Tensor], model: ModelSettings) -> Tensor:
        """As in ``Layout``."""
        by_group = [part.unflatten(0, (model.attention.num_query_groups, -1)) for part in theirs]
        return torch.cat(by_group, 1).flatten(0, 1)

    def split(self, ours: Tensor, model: ModelSettings) -> list[Tensor]:
        """As in ``Layout``."""
        by_group = ours.unflatten(0, (model.attention.num_query_groups, -1))
        return [part.flatten(0, 1) for part in by_group.split(_rows_of_group(model), 1)]


def _rows_of_group(model: ModelSettings) -> list[int]:
    """Return how many rows the queries, the key and the value of one query group have."""
    width = model.attention.kv_channels
    return [
        model.attention.num_attention_heads // model.attention.num_query_groups * width,
        width,
        width,
    ]


class InOne(Layout):
    """One of their tensors that holds several tensors, one below the other.

    Args:
        name: name of their tensor.
        parts: layout of the several tensors.
    """

    def __init__(self, name: str, parts: Layout) -> None:
        super().__init__(name)
        self._parts = parts

    def join(self, theirs: Sequence[Tensor], model: ModelSettings) -> Tensor:
        """As in ``Layout``."""
        shapes = self._parts.shapes(tuple(theirs[0].shape), model)
        return self._parts.join(theirs[0].split([rows for rows, *_ in shapes]), model)

    def split(self, ours: Tensor, model: ModelSettings) -> list[Tensor]:
        """As in ``Layout``."""
        return [torch.cat(self._parts.split(ours, model))]


class Transposed(Layout):
    """Matrices that the foreign model stores transposed.

    Args:
        stored: layout of the matrices after they are transposed.
    """

    def __init__(self, stored: Layout) -> None:
        super().__init__(*stored.names)
        self._stored = stored

    def shapes(self, ours: Shape, model: ModelSettings) -> list[Shape]:
        """As in ``Layout``."""
        return [shape[::-1] for shape in self._stored.shapes(ours, model)]

    def join(self, theirs: Sequence[Tensor], model: ModelSettings) -> Tensor:
        """As in ``Layout``."""
        return self._stored.join([part.T for part in theirs], model)

    def split(self, ours: Tensor, model: ModelSettings) -> list[Tensor]:
        """As in ``Layout``."""
        return [part.T for part in self._stored.split(ours, model)]


class OfExperts(Layout):
    """Tensors of every expert; in our tensor the experts lie one below the other.

    Args:
        expert: layout of one expert's part of our tensor; ``{expert}`` in its names stands for the
            number of the expert.
    """

    def __init__(self, expert: Layout) -> None:
        super().__init__(*expert.names)
        self._expert = expert

    def names_in(self, model: ModelSettings) -> tuple[str, ...]:
        """As in ``Layout``."""
        experts = range(model.experts.num_experts)
        return tuple(name.replace("{expert}", str(e)) for e in experts for name in self.names)

    def shapes(self, ours: Shape, model: ModelSettings) -> list[Shape]:
        """As in ``Layout``."""
        one = (ours[0] // model.experts.num_experts, *ours[1:])
        return self._expert.shapes(one, model) * model.experts.num_experts

    def join(self, theirs: Sequence[Tensor], model: ModelSettings) -> Tensor:
        """As in ``Layout``."""
        each = len(self.names)
        parts = [theirs[first : first + each] for first in range(0, len(theirs), each)]
        return torch.cat([self._expert.join(part, model) for part in parts])

    def split(self, ours: Tensor, model: ModelSettings) -> list[Tensor]:
        """As in ``Layout``."""
        parts = ours.chunk(model.experts.num_experts)
        return [tensor for part in parts for tensor in self._expert.split(part, model)]


Table = Mapping[str, Layout]
"""The layout of every tensor by its name in our models, without the number of its layer."""


@dataclass(frozen=True)
class Recipe:
    """How one tensor of a model is converted.

    Attributes:
        model: the model.
        shape: shape of our tensor.
        layout: how our tensor is made of their tensors.
        their_shapes: shapes of their tensors by name.
    """

    model: ModelSettings
    shape: Shape
    layout: Layout
    their_shapes: Mapping[str, Shape]

    @property
    def theirs(self) -> tuple[str, ...]:
        """The names of their tensors."""
        return tuple(self.their_shapes)

    def among(self, names: Collection[str]) -> "Recipe":
        """Return the recipe without the copies that are not among ``names``."""
        lacking = set(self.layout.copies_in(self.model)) - set(names)
        shapes = {name: own for name, own in self.their_shapes.items() if name not in lacking}
        return replace(self, their_shapes=shapes)

    def join(self, theirs: Sequence[Tensor]) -> Tensor:
        """Return our tensor, contiguous."""
        return self.layout.join(theirs, self.model).contiguous()

    def split(self, ours: Tensor) -> dict[str, Tensor]:
        """Return their tensors by name; each is contiguous and has its own memory."""
        parts = self.layout.split(ours, self.model)
        return {
            name: part.clone(memory_format=torch.contiguous_format)
            for name, part in zip(self.theirs, parts, strict=True)
        }


def recipes(model: ModelSettings, table: Table) -> dict[str, Recipe]:
    """Return the recipe of every tensor of a model, by our names in the order of the forward.

    Args:
        model: the model; the table has all its tensors.
        table: table of the family; tensors that the model lacks are left out.
    """
    found = {}
    for name, shape in tensor_shapes(model).items():
        key, number = _in_table(name, model)
        layout = table[key]
        theirs = [theirs.format(number) for theirs in layout.names_in(model)]
        shapes = layout.shapes(shape, model)
        found[name] = Recipe(model, shape, layout, dict(zip(theirs, shapes, strict=True)))
    return found


def _in_table(name: str, model: ModelSettings) -> tuple[str, str]:
    """Return the name in a table, and the number of the layer.

    In their numbers the depths of multi-token prediction follow the last layer.
    """
    if not name.startswith(DEPTHS):
        return without_number(name)
    depth, _, rest = name.removeprefix(DEPTHS).partition(".")
    of_layer = rest.removeprefix("transformer_layer.")
    key = DEPTHS + rest if of_layer == rest else LAYERS + of_layer
    return key, str(model.num_layers + int(depth))


def without_number(name: str) -> tuple[str, str]:
    """Return one of our names without the layer's number, and the number; ``""``: it has none."""
    if not name.startswith(LAYERS):
        return name, ""
    number, _, rest = name.removeprefix(LAYERS).partition(".")
    return LAYERS + rest, number


def tensor_shapes(model: ModelSettings) -> dict[str, Shape]:
    """Return the shape of every tensor of a model by name, in the order of the forward."""
    placement = place(
        model,
        [(0, 0)],
        0,
        layers=[model.num_layers],
        padded_vocab_size=model.vocab_size,
        vocabulary_shard=None,
    )
    whole = RankModel(model, placement, Site(torch.device("meta"), torch.float32))
    buffers = {owned.name: tuple(owned.buffer.shape) for owned in whole.owned_buffers()}
    return {owned.name: owned.global_shape for owned in whole.owned_parameters()} | buffers
