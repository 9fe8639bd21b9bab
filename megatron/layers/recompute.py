"""Activations that a backward computes again instead of finding them kept.

The graph of autograd is the one that it is without: what an operation would keep is only formed
anew, from the same inputs by the same operations, when the first operation of the backward asks
for it. Dropout seeds itself. So losses and gradients are the same bits, and a backward in parts (B
and W) works as ever. Computing again ends with the last tensor that was kept, so a product whose
result nobody keeps is not repeated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

Part: TypeAlias = Literal["core_attn", "layernorm", "mlp"]
"""A part of a layer by Megatron's name: attention between its two projections, the norms before
attention and before the MLP, or the MLP."""

PARTS: Final[tuple[Part, ...]] = get_args(Part)

Layer = TypeVar("Layer")


@dataclass(frozen=True)
class Recomputation:
    """What the layers of a chunk compute again in their backward.

    Attributes:
        parts: of every layer, from the inputs of each part.
        group: layers in a row that are computed again together, from the input of the first; 0: no
            whole layer is.
        most: groups of a chunk at most, its first ones; ``None``: as many as its layers make.
    """

    parts: frozenset[Part] = frozenset()
    group: int = 0
    most: int | None = None

    def __str__(self) -> str:
        named: list[str] = [part for part in PARTS if part in self.parts]
        if self.group:
            named.append("all layers" if self.most is None else f"{self.most} groups")
            named.append(f"by {self.group}")
        return " ".join(named) or "nothing"

    def run(
        self, layers: Sequence[Layer], forward: Callable[[Layer, Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Run the layers of a chunk one after the other.

        Args:
            layers: of a chunk.
            forward: runs one of them; it must give the same bits whenever it is called.
            x: input of the first.

        Returns:
            The output of the last.
        """
        kept_from = 0
        for group in self._groups(layers):
            x = again(_run_all, group, forward, x)
            kept_from += len(group)
        return _run_all(layers[kept_from:], forward, x)

    def _groups(self, layers: Sequence[Layer]) -> Iterator[Sequence[Layer]]:
        """Yield the layers that are computed again together."""
        if self.group:
            first = range(0, len(layers), self.group)[: self.most]
            yield from (layers[i : i + self.group] for i in first)


NO_RECOMPUTATION: Final = Recomputation()


def again(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Return what ``function`` returns, keeping only the tensors among ``arguments``.

    Args:
        function: must give the same bits whenever it is called.
        arguments: of the function.
    """
    result: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


def forgetting(
    make: Callable[[Tensor], Tensor], x: Tensor, use: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return ``use(make(x))``; where the backward needs ``make(x)`` itself, it makes it again.

    Args:
        make: must give the same bits whenever it is called.
        x: is kept.
        use: whatever it keeps of its own is kept.
    """
    made = make(x)
    memory, size = StorageWeakRef(made.untyped_storage()), made.numel()

    def pack(kept: Tensor) -> Tensor | torch.Size:
        is_made = kept.numel() == size and StorageWeakRef(kept.untyped_storage()) == memory
        return kept.shape if is_made else kept

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return make(x).view(kept)

    with saved_tensors_hooks(pack, unpack):
        return use(made)


def applied(make: Callable[[Tensor], Tensor], x: Tensor, use: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``use(make(x))``, whatever is kept of it."""
    return use(make(x))


def prepare(model: nn.Module, recomputation: Recomputation) -> None:
    """Let the layers in ``model`` compute parts of themselves again.

    Every module that has such a part has an attribute ``recompute_PART``. Where a linear layer may
    be the last that is computed again, its product is not repeated.
    """
    names = [f"recompute_{part}" for part in recomputation.parts]
    if recomputation.group or "mlp" in recomputation.parts:
        names.append("keeps_first")
    for name in names:
        for module in model.modules():
            if hasattr(module, name):
                setattr(module, name, True)


def _run_all(
    layers: Sequence[Layer], forward: Callable[[Layer, Tensor], Tensor], x: Tensor
) -> Tensor:
    for layer in layers:
        x = forward(layer, x)
    return x
