"""How a tensor of ours is made of tensors of another program, and these of ours.

A family's table says for every name of ours which layout it has. A layout moves numbers and changes
none, so that what was imported is exported to the last bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.layers.site import Site
from megatron.model.config import ModelConfig
from megatron.model.ownership import LAYERS
from megatron.model.placement import place
from megatron.model.stage import RankModel
from megatron.parallel.box import Shape


class ForeignError(ValueError):
    """Weights that cannot be converted; the message names the file, what is wrong, and why."""


class Layout:
    """Tensors of theirs that make one of ours; unless a kind says otherwise, one that is ours.

    Args:
        names: of the tensors of theirs; ``{}`` stands for the number of the layer.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def names_in(self, model: ModelConfig) -> tuple[str, ...]:
        """Return the names of the tensors of theirs in a model."""
        return self.names

    def shapes(self, ours: Shape, model: ModelConfig) -> list[Shape]:
        """Return the shapes of their tensors, given that of ours."""
        return [ours]

    def join(self, theirs: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """Return our tensor."""
        return theirs[0]

    def split(self, ours: Tensor, model: ModelConfig) -> list[Tensor]:
        """Return their tensors."""
        return [ours]


class Same(Layout):
    """A tensor that both have alike."""


class Halves(Layout):
    """Two tensors of equal shape, the rows of one below those of the other: gate and up."""

    def shapes(self, ours: Shape, model: ModelConfig) -> list[Shape]:
        """As in ``Layout``."""
        return [(ours[0] // 2, *ours[1:])] * 2

    def join(self, theirs: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """As in ``Layout``."""
        return torch.cat(tuple(theirs))

    def split(self, ours: Tensor, model: ModelConfig) -> list[Tensor]:
        """As in ``Layout``."""
        return list(ours.chunk(2))


class Heads(Layout):
    """Queries, keys and values as three matrices of all heads; we have one, by query groups."""

    def shapes(self, ours: Shape, model: ModelConfig) -> list[Shape]:
        """As in ``Layout``."""
        return [(rows * model.num_query_groups, *ours[1:]) for rows in _rows_of_group(model)]

    def join(self, theirs: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """As in ``Layout``."""
        by_group = [part.unflatten(0, (model.num_query_groups, -1)) for part in theirs]
        return torch.cat(by_group, 1).flatten(0, 1)

    def split(self, ours: Tensor, model: ModelConfig) -> list[Tensor]:
        """As in ``Layout``."""
        by_group = ours.unflatten(0, (model.num_query_groups, -1))
        return [part.flatten(0, 1) for part in by_group.split(_rows_of_group(model), 1)]


def _rows_of_group(model: ModelConfig) -> list[int]:
    """Return the rows of queries, key and value of one query group."""
    width = model.kv_channels
    return [model.num_attention_heads // model.num_query_groups * width, width, width]


class InOne(Layout):
    """One tensor that holds the rows of several, one below the other.

    Args:
        name: of the tensor of theirs.
        parts: how those several make ours.
    """

    def __init__(self, name: str, parts: Layout) -> None:
        super().__init__(name)
        self._parts = parts

    def join(self, theirs: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """As in ``Layout``."""
        shapes = self._parts.shapes(tuple(theirs[0].shape), model)
        return self._parts.join(theirs[0].split([rows for rows, *_ in shapes]), model)

    def split(self, ours: Tensor, model: ModelConfig) -> list[Tensor]:
        """As in ``Layout``."""
        return [torch.cat(self._parts.split(ours, model))]


class Transposed(Layout):
    """Matrices that are stored the other way round.

    Args:
        stored: how they make ours once they are turned.
    """

    def __init__(self, stored: Layout) -> None:
        super().__init__(*stored.names)
        self._stored = stored

    def shapes(self, ours: Shape, model: ModelConfig) -> list[Shape]:
        """As in ``Layout``."""
        return [shape[::-1] for shape in self._stored.shapes(ours, model)]

    def join(self, theirs: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """As in ``Layout``."""
        return self._stored.join([part.T for part in theirs], model)

    def split(self, ours: Tensor, model: ModelConfig) -> list[Tensor]:
        """As in ``Layout``."""
        return [part.T for part in self._stored.split(ours, model)]


class OfExperts(Layout):
    """Tensors of every expert; in ours those of all experts lie one below the other.

    Args:
        expert: how the tensors of one expert make its part of ours; ``{expert}`` in their names
            stands for its number.
    """

    def __init__(self, expert: Layout) -> None:
        super().__init__(*expert.names)
        self._expert = expert

    def names_in(self, model: ModelConfig) -> tuple[str, ...]:
        """As in ``Layout``."""
        experts = range(model.num_experts)
        return tuple(name.replace("{expert}", str(e)) for e in experts for name in self.names)

    def shapes(self, ours: Shape, model: ModelConfig) -> list[Shape]:
        """As in ``Layout``."""
        one = (ours[0] // model.num_experts, *ours[1:])
        return self._expert.shapes(one, model) * model.num_experts

    def join(self, theirs: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """As in ``Layout``."""
        each = len(self.names)
        parts = [theirs[first : first + each] for first in range(0, len(theirs), each)]
        return torch.cat([self._expert.join(part, model) for part in parts])

    def split(self, ours: Tensor, model: ModelConfig) -> list[Tensor]:
        """As in ``Layout``."""
        parts = ours.chunk(model.num_experts)
        return [tensor for part in parts for tensor in self._expert.split(part, model)]


Table = Mapping[str, Layout]
"""The layout of every tensor by its name in our models, without the number of its layer."""


@dataclass(frozen=True)
class Recipe:
    """How one tensor of a certain model is converted.

    Attributes:
        model: the model.
        shape: of our tensor.
        layout: how it is made of theirs.
        theirs: names of their tensors.
    """

    model: ModelConfig
    shape: Shape
    layout: Layout
    theirs: tuple[str, ...]

    @property
    def their_shapes(self) -> dict[str, Shape]:
        """The shapes of their tensors by name."""
        shapes = self.layout.shapes(self.shape, self.model)
        return dict(zip(self.theirs, shapes, strict=True))

    def join(self, theirs: Sequence[Tensor]) -> Tensor:
        """Return our tensor, contiguous."""
        return self.layout.join(theirs, self.model).contiguous()

    def split(self, ours: Tensor) -> dict[str, Tensor]:
        """Return their tensors by name, each contiguous and in memory of its own."""
        parts = self.layout.split(ours, self.model)
        return {
            name: part.clone(memory_format=torch.contiguous_format)
            for name, part in zip(self.theirs, parts, strict=True)
        }


def recipes(model: ModelConfig, table: Table) -> dict[str, Recipe]:
    """Return how every tensor of a model is converted, by our names in the order of the forward.

    Args:
        model: every tensor that it has is in the table.
        table: of the family; tensors that the model lacks are left out.
    """
    found = {}
    for name, shape in tensor_shapes(model).items():
        key, number = without_number(name)
        layout = table[key]
        theirs = tuple(theirs.format(number) for theirs in layout.names_in(model))
        found[name] = Recipe(model, shape, layout, theirs)
    return found


def without_number(name: str) -> tuple[str, str]:
    """Return a name of ours without the number of its layer, and that number, or nothing."""
    if not name.startswith(LAYERS):
        return name, ""
    number, _, rest = name.removeprefix(LAYERS).partition(".")
    return LAYERS + rest, number


def tensor_shapes(model: ModelConfig) -> dict[str, Shape]:
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
    return {owned.name: owned.global_shape for owned in whole.owned_parameters()}
