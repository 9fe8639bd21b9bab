"""Recomputation: activations that the forward drops, and that the backward computes again.

Autograd records the same graph as without recomputation. Only the tensors that its operations would
keep are dropped. They are computed again, from the same inputs by the same operations, when the
first operation of the backward asks for one, or earlier, in the pass R. Dropout seeds itself. So
losses and gradients are the same bits, and a backward in two parts (B and W) works as ever. There
is one exception: a norm that was written only in 8 bits (``normed_input.py``) has 16 bits when it
is computed again as a part of a layer.

Computing again ends with the last tensor that the graph needs. So a product whose result no
operation keeps is not repeated.

PyTorch's own checkpoints work alike, but only their backward can compute them again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.kernels.autograd import apply

Part: TypeAlias = Literal["core_attn", "layernorm", "mlp", "moe"]
"""A part of a layer by Megatron's name: attention between its two projections, the norms before
attention and before the MLP, the MLP, or the mixture of experts in its place."""

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

    @property
    def repeats_products(self) -> bool:
        """Whether a linear layer may be the last that is computed again.

        The layer then keeps its input before the product is formed, not after it as autograd's own
        layer does, so that computing again ends before that product.
        """
        return bool(self.group) or "mlp" in self.parts

    def run(
        self,
        layers: Sequence[Layer],
        forward: Callable[[Layer, Tensor], Tensor],
        x: Tensor,
        left_out: "list[Again] | None" = None,
    ) -> Tensor:
        """Run the layers of a chunk one after the other.

        Args:
            layers: of a chunk.
            forward: runs one of them; it must give the same bits whenever it is called.
            x: input of the first.
            left_out: gets the groups that are to be computed again, in order.

        Returns:
            The output of the last.
        """
        kept_from = 0
        for layers_of_group in self.groups(layers):
            group = Again(_run_all, layers_of_group, forward, x)
            x = group.run()
            kept_from += len(layers_of_group)
            if left_out is not None:
                left_out.append(group)
        return _run_all(layers[kept_from:], forward, x)

    def groups(self, layers: Sequence[Layer]) -> Iterator[Sequence[Layer]]:
        """Yield the layers that are computed again together."""
        if self.group:
            first = range(0, len(layers), self.group)[: self.most]
            yield from (layers[i : i + self.group] for i in first)


NO_RECOMPUTATION: Final = Recomputation()


class Again:
    """A function of which only the arguments are kept; its backward computes the rest again.

    The tensors among the arguments are kept as an operation of autograd would keep them. So an
    enclosing context may drop one of them too (``forgotten``), and make that tensor anew.

    Args:
        function: must give the same bits whenever it is called.
        arguments: of the function.
    """

    def __init__(self, function: Callable[..., Tensor], *arguments: object) -> None:
        self._function = function
        self._arguments = arguments
        self._kept: Any = None
        self._left_out = 0
        self._computed: dict[int, Tensor] | None = None

    def run(self) -> Tensor:
        """Return what the function returns, connected with its arguments."""
        connected = self._arguments
        tensors = [argument for argument in connected if isinstance(argument, Tensor)]
        self._arguments = tuple(
            _Slot(argument.requires_grad) if isinstance(argument, Tensor) else argument
            for argument in connected
        )
        anchor = torch.empty(0, requires_grad=True)
        self._kept = apply(_Kept, anchor, *(tensor.detach() for tensor in tensors)).grad_fn
        with saved_tensors_hooks(self._leave_out, self._use):
            return self._function(*connected)

    def compute(self) -> None:
        """Compute all that was left out, if that has not been done."""
        if self._computed is not None:
            return
        computed: dict[int, Tensor] = {}

        def collect(tensor: Tensor) -> None:
            computed[len(computed)] = tensor.detach()
            if len(computed) == self._left_out:
                raise _CompleteError

        arguments = self._kept_arguments()
        with torch.enable_grad(), saved_tensors_hooks(collect, _unused), suppress(_CompleteError):
            self._function(*arguments)
        assert len(computed) == self._left_out, "computed again, it keeps something else"
        self._computed, self._kept = computed, None

    def _kept_arguments(self) -> list[object]:
        """Return the arguments without the graph that they came from."""
        tensors = iter(self._kept.saved_tensors)
        return [
            next(tensors).detach().requires_grad_(argument.requires_grad)
            if isinstance(argument, _Slot)
            else argument
            for argument in self._arguments
        ]

    def _leave_out(self, _: Tensor) -> int:
        self._left_out += 1
        return self._left_out - 1

    def _use(self, number: int) -> Tensor:
        """Return a tensor that was left out; each is used once, and then gone."""
        self.compute()
        assert self._computed is not None
        return self._computed.pop(number)


class _CompleteError(Exception):
    """Ends computing again: all that was left out is there."""


def _unused(_: None) -> Tensor:
    raise AssertionError("computing again has no backward")


class _Slot(NamedTuple):
    """The place of a tensor among arguments."""

    requires_grad: bool


class _Kept(torch.autograd.Function):
    """Keeps tensors; what it returns is empty."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        """Keep ``tensors``; ``anchor`` requires a gradient, so that there is something to keep."""
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        """Nobody reads what the forward returns."""
        raise AssertionError("it has no backward")


def again(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Return what ``function`` returns, keeping as little as ``Again`` does; arguments as there."""
    return Again(function, *arguments).run()


@contextmanager
def forgotten(make: Callable[[Tensor], Tensor], x: Tensor, made: Tensor) -> Iterator[None]:
    """Within the context operations keep no ``made``: their backward makes the tensor again.

    Args:
        make: must give the same bits whenever it is called.
        x: is kept.
        made: what ``make(x)`` returns, connected with whatever it came from.
    """
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
        yield


def _run_all(
    layers: Sequence[Layer], forward: Callable[[Layer, Tensor], Tensor], x: Tensor
) -> Tensor:
    for layer in layers:
        x = forward(layer, x)
    return x
