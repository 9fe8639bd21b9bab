"""F, B and W of a stage as graphs of launches, which the host replays at the cost of one launch.

Shapes never change, so a pass launches the same kernels on the same memory again and again. A
*slot* is the static memory of one microbatch, for inputs and outputs, together with one graph for
each pass, captured when the slot is first used. A microbatch occupies a slot from its F to its B,
or to its W. Microbatches in flight have different slots, and slots share no memory, because slots
may overtake each other. Within a slot the graphs always run in the order of their capture.

A graph's addresses are fixed, so inputs are copied into the slot and outputs out of it. A graph
always adds to gradients, so gradients are set to zero before an iteration's first backward.

Shapes: b batch, u tokens of a sequence that a rank has, h hidden.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.layers.forward_pass import ForwardPass
from megatron.layers.left_losses import LayerLosses
from megatron.layers.main_grad import main_grad_of
from megatron.layers.weight_gradients import parts_of
from megatron.model.stage import RankModel
from megatron.runtime.buckets import parts_of_chunks
from megatron.runtime.entry import Entry

Work: TypeAlias = Callable[[], None]


class Graph(Protocol):
    """Launches that can be repeated on the same memory."""

    def capture(self, work: Work) -> None:
        """Record the launches of ``work`` without running them; only ``replay`` gives results."""
        ...

    def replay(self) -> None:
        """Launch the recorded work."""
        ...

    def reset(self) -> None:
        """Let go of the recorded work; the graph is not used any more."""
        ...


NewGraph: TypeAlias = Callable[[], Graph]
"""Returns a graph that shares memory with the other graphs of the same slot."""


class CudaGraph:
    """A graph of CUDA.

    Args:
        pool: memory that the graphs of a slot share; a ``torch.cuda.graph_pool_handle()``.
    """

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture(self, work: Work) -> None:
        """See ``Graph``; other threads, such as NCCL's, may launch work during the capture."""
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            work()

    def replay(self) -> None:
        """See ``Graph``."""
        self._graph.replay()

    def reset(self) -> None:
        """See ``Graph``."""
        # The last replay may still run.
        torch.cuda.current_stream().synchronize()
        self._graph.reset()


def cuda_graphs() -> NewGraph:
    """Return a function that makes the graphs of one slot, which share memory."""
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)


class Replayed:
    """One pass of a slot: captured once, then replayed.

    Args:
        graph: records and replays the pass.
        work: launches it.
    """

    def __init__(self, graph: Graph, work: Work) -> None:
        self._graph, self._work = graph, work
        self._is_captured = False

    def run(self) -> None:
        """Run the pass."""
        if not self._is_captured:
            self._graph.capture(self._work)
            self._is_captured = True
        self._graph.replay()

    def close(self) -> None:
        """Let go of the graph."""
        if self._is_captured:
            self._graph.reset()


class Slot:
    """The passes of one microbatch in flight through one stage.

    Args:
        run: the stage's layers, [b, u, h] -> [b, u, h].
        take_deferred: returns the work that a backward has just left for W; ``None``: there are
            no W passes.
        new_graph: makes the graphs of this slot.
        complete: called before the backward; it sets gradients to zero if they hold no sum yet.
        free: called when the slot is free again.
    """

    def __init__(
        self,
        run: Callable[[Tensor, ForwardPass], Tensor],
        take_deferred: Callable[[], Sequence[Work]] | None,
        new_graph: NewGraph,
        complete: Work,
        free: Callable[["Slot"], None],
    ) -> None:
        self._run, self._take_deferred = run, take_deferred
        self._complete, self._free = complete, free
        self._forward = Replayed(new_graph(), self._launch_forward)
        self._backward = Replayed(new_graph(), self._launch_backward)
        self._weights = Replayed(new_graph(), self._launch_weights)
        self._x: Tensor | None = None
        self._gradient: Tensor | None = None
        self._edge: GradientEdge | None = None
        self._deferred: list[Work] = []

    def forward(self, x_buh: Tensor) -> Tensor:
        """F: return the output of the stage."""
        self._x = _placed(x_buh, self._x)
        self._forward.run()
        return self._y.clone()

    def backward(self, gradient_buh: Tensor) -> Tensor:
        """B: return the gradient of the input."""
        self._complete()
        self._gradient = _placed(gradient_buh.view_as(self._y), self._gradient)
        self._backward.run()
        if self._take_deferred is None:
            # The next F of this slot follows on the same stream, behind the copy of the gradient.
            self._free(self)
        return self._x_gradient.clone()

    def weight_gradients(self) -> None:
        """W: form the weight gradients that B has left."""
        self._weights.run()
        self._free(self)

    def close(self) -> None:
        """Let go of the graphs."""
        for replayed in (self._forward, self._backward, self._weights):
            replayed.close()

    def _launch_forward(self) -> None:
        assert self._x is not None
        self._entry, losses = Entry(), LayerLosses()
        y_buh = self._run(self._entry.connect(self._x), ForwardPass(losses=losses))
        assert losses.close() == ([], []), "layers leave losses, which no graph takes along"
        self._edge, self._y = get_gradient_edge(y_buh), y_buh.detach()

    def _launch_backward(self) -> None:
        assert self._edge is not None, "captured once, after F"
        assert self._gradient is not None
        torch.autograd.backward((self._edge,), (self._gradient,))
        self._edge, self._x_gradient = None, self._entry.take_gradient()
        if self._take_deferred is not None:
            self._deferred += self._take_deferred()

    def _launch_weights(self) -> None:
        for part in parts_of(self._deferred):
            part()
            del part  # its activations


class StageGraphs:
    """The graphs of all stages of a rank.

    Args:
        model: this rank's part of the model.
        new_slot: returns, for a new slot, the function that makes the slot's graphs.
    """

    def __init__(
        self,
        model: RankModel,
        new_slot: Callable[[], NewGraph] = cuda_graphs,
    ) -> None:
        self._model, self._new_slot = model, new_slot
        self._parameters: defaultdict[int, list[Tensor]] = defaultdict(list)
        for part, chunk in parts_of_chunks(model):
            self._parameters[chunk] += part.parameters()
        self._slots: defaultdict[int, list[Slot]] = defaultdict(list)
        self._free: dict[int, list[Slot]] = {}
        self._incomplete: set[int] = set()

    @property
    def slots(self) -> int:
        """Slots of all stages so far: the most microbatches that were in flight."""
        return sum(map(len, self._slots.values()))

    def begin(self) -> None:
        """Begin an iteration: all slots are free, and no gradient has been formed."""
        self._free = {chunk: list(slots) for chunk, slots in self._slots.items()}
        self._incomplete = set(self._parameters)

    def forward(
        self, chunk: int, x_buh: Tensor, take_deferred: Callable[[], Sequence[Work]] | None
    ) -> tuple[Slot, Tensor]:
        """Run F of a chunk in a free slot; return the slot and the output of the stage.

        Args:
            chunk: of this rank.
            x_buh: input of its stage.
            take_deferred: see ``Slot``; the same in all calls.
        """
        free = self._free.setdefault(chunk, [])
        if not free:
            slot = Slot(
                partial(self._model, chunk),
                take_deferred,
                self._new_slot(),
                partial(self._complete, chunk),
                partial(self._let_go, chunk),
            )
            self._slots[chunk].append(slot)
            free.append(slot)
        slot = free.pop()
        return slot, slot.forward(x_buh)

    def close(self) -> None:
        """Let go of all graphs.

        NCCL cannot destroy a communicator before the graphs that hold its collectives are gone: the
        process would wait for ever.
        """
        for slots in self._slots.values():
            for slot in slots:
                slot.close()

    def _complete(self, chunk: int) -> None:
        """Set gradients to zero before the first backward of a chunk in an iteration."""
        if chunk in self._incomplete:
            self._incomplete.remove(chunk)
            for parameter in self._parameters[chunk]:
                main_grad_of(parameter)

    def _let_go(self, chunk: int, slot: Slot) -> None:
        self._free[chunk].append(slot)


def _placed(x: Tensor, place: Tensor | None) -> Tensor:
    """Copy ``x`` to the static tensor ``place`` and return it; ``None``: make the tensor."""
    if place is None:
        return x.clone()
    assert x.shape == place.shape, "shapes never change"
    return place.copy_(x)
