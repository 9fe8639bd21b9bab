"""Recomputation: activations that the forward drops, and that the backward computes again.

Autograd records the same graph as without recomputation, but drops the tensors that its operations
would keep. The dropped tensors are computed again by the same operations from the same inputs. This
happens in the pass R, or when the first operation of the backward needs such a tensor. Dropout
seeds itself, so losses and gradients have the same bits as without recomputation. A backward in two
parts (B and W) works too. There is one exception to the same bits: a norm that was written only in
8 bits (``normed_input.py``) is computed in 16 bits when a whole layer is computed again.

Computing again ends with the last tensor that the graph needs. So a product at the end is not
repeated if no operation keeps its result.

PyTorch's own checkpoints work in the same way, but they recompute only in the backward, never
before it.
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

Part: TypeAlias = Literal[
    "core_attn", "mla_up_proj", "layernorm", "mlp", "mlp_act", "moe", "moe_act"
]
"""A part of a layer by Megatron's name: attention between its two projections, the heads that
multi-latent attention makes of its latents, the norms before attention and before the MLP, the MLP,
the mixture of experts in its place, or only the activation functions of its experts. ``mlp_act`` is
a name of this project: only the activation function of the MLP, or of shared experts."""

PARTS: Final[tuple[Part, ...]] = get_args(Part)

Layer = TypeVar("Layer")


@dataclass(frozen=True)
class Recomputation:
    """The parts and layers of a chunk that are computed again for the backward.

    Attributes:
        parts: parts of every layer, each computed again from its inputs.
        group: number of consecutive layers that are computed again together, from the input of the
            first; 0: no whole layer is computed again.
        most: largest number of groups in a chunk, beginning with its first layer; ``None``: all
            layers are in groups.
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
        """Whether a linear layer may be the last operation that is computed again.

        Such a layer must keep its input before the product is formed, so that computing again ends
        before the product. (Autograd's own layer keeps its input after the product.)
        """
        return bool(self.group) or not self.parts.isdisjoint(("mlp", "moe"))

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
            forward: runs one layer; it must give the same bits whenever it is called.
            x: input of the first layer.
            left_out: gets the groups that are to be computed again, in order.

        Returns:
            The output of the last layer.
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
        """Yield every group of layers that are computed again together."""
        if self.group:
            first = range(0, len(layers), self.group)[: self.most]
            yield from (layers[i : i + self.group] for i in first)


NO_RECOMPUTATION: Final = Recomputation()


class Again:
    """A function call that keeps only its arguments, and computes the rest again for the backward.

    Tensor arguments are kept in the same way as an autograd operation keeps tensors. So an
    enclosing context (``forgotten``) may drop such an argument too, and compute it again.

    Args:
        function: must give the same bits whenever it is called.
        arguments: of the function.
    """

    def __init__(self, function: Callable[..., Tensor], *arguments: object) -> None:
        self._function = function
        self._arguments = arguments
        self._kept: KeptInGraph | None = None
        self._left_out = 0
        self._computed: dict[int, Tensor] | None = None

    def run(self) -> Tensor:
        """Return the function's result, connected with the arguments in autograd's graph."""
        connected = self._arguments
        tensors = [argument for argument in connected if isinstance(argument, Tensor)]
        self._arguments = tuple(
            _Slot(argument.requires_grad) if isinstance(argument, Tensor) else argument
            for argument in connected
        )
        self._kept = KeptInGraph(*tensors)
        with saved_tensors_hooks(self._leave_out, self._use):
            return self._function(*connected)

    def compute(self) -> None:
        """Compute all dropped tensors again, unless that has been done."""
        if self._computed is not None:
            return
        computed: dict[int, Tensor] = {}

        def collect(tensor: Tensor) -> None:
            computed[len(computed)] = tensor.detach()
            if len(computed) == self._left_out:
                raise _CompleteError

        arguments = self._kept_arguments()
        # A backward runs without gradients, where autograd would keep no tensors.
        with torch.enable_grad(), saved_tensors_hooks(collect, _unused), suppress(_CompleteError):
            self._function(*arguments)
        assert len(computed) == self._left_out, "computed again, it keeps something else"
        self._computed, self._kept = computed, None

    def _kept_arguments(self) -> list[object]:
        """Return the arguments, detached from the graph that made them."""
        assert self._kept is not None
        tensors = iter(self._kept.read())
        return [
            # As in the first run: it decides which tensors autograd keeps.
            next(tensors).detach().requires_grad_(argument.requires_grad)
            if isinstance(argument, _Slot)
            else argument
            for argument in self._arguments
        ]

    def _leave_out(self, _: Tensor) -> int:
        self._left_out += 1
        return self._left_out - 1

    def _use(self, number: int) -> Tensor:
        """Return a dropped tensor after computing it again; each is used once, and then freed."""
        self.compute()
        assert self._computed is not None
        return self._computed.pop(number)


class _CompleteError(Exception):
    """Ends computing again when all dropped tensors have been computed."""


def _unused(_: None) -> Tensor:
    raise AssertionError("computing again has no backward")


class _Slot(NamedTuple):
    """Stands for a tensor in the list of arguments."""

    requires_grad: bool


class KeptInGraph:
    """Tensors that are kept as an operation of autograd's graph keeps its tensors.

    So an enclosing context may drop the tensors, and compute them again.
    """

    def __init__(self, *tensors: Tensor) -> None:
        anchor = torch.empty(0, requires_grad=True)
        # PyTorch 2.11 frees a node with the last tensor whose node it is.
        self._end: Any = apply(_Kept, anchor, *(tensor.detach() for tensor in tensors))

    def read(self) -> tuple[Tensor, ...]:
        """Return the tensors, once; only where gradients were on."""
        kept: tuple[Tensor, ...] = self._end.grad_fn.saved_tensors
        return kept


class _Kept(torch.autograd.Function):
    """Keeps tensors for the backward, and returns an empty tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        """Keep ``tensors``; ``anchor`` requires a gradient, so that autograd makes a node."""
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        """Raise an error: nobody reads the result of the forward, so no gradient arrives."""
        raise AssertionError("it has no backward")


def again(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Return the result of ``function``, and keep only its arguments; see ``Again``."""
    return Again(function, *arguments).run()


@contextmanager
def forgotten(make: Callable[[Tensor], Tensor], x: Tensor, made: Tensor) -> Iterator[None]:
    """Return a context whose operations do not keep ``made``: their backward computes it again.

    Args:
        make: must give the same bits whenever it is called.
        x: argument of ``make``; it is kept.
        made: the tensor ``make(x)``, connected with autograd's graph.
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


class _PartOf(NamedTuple):
    """Stands for a view of one of several tensors that are made again."""

    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def all_forgotten(
    make: Callable[[], tuple[Tensor, ...]], made: tuple[Tensor, ...]
) -> Iterator[None]:
    """As ``forgotten``, for several tensors that are made together, and made again once.

    Args:
        make: must give the same bits in the same memory layout whenever it is called.
        made: the tensors ``make()``, connected with autograd's graph.
    """
    numbers = {StorageWeakRef(one.untyped_storage()): i for i, one in enumerate(made)}
    found: list[Tensor] = []

    def pack(kept: Tensor) -> Tensor | _PartOf:
        number = numbers.get(StorageWeakRef(kept.untyped_storage()))
        if number is None:
            return kept
        return _PartOf(number, kept.shape, kept.stride(), int(kept.storage_offset()))

    def unpack(kept: Tensor | _PartOf) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if not found:
            with torch.no_grad():
                found.extend(make())
        return found[kept.number].as_strided(kept.shape, kept.stride, kept.offset)

    with saved_tensors_hooks(pack, unpack):
        yield


def _run_all(
    layers: Sequence[Layer], forward: Callable[[Layer, Tensor], Tensor], x: Tensor
) -> Tensor:
    for layer in layers:
        x = forward(layer, x)
    return x
