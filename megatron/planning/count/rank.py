"""One pipeline rank on the ``meta`` device: its model, its passes and its communications."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Final

import torch

from megatron.kernels.counted import counted_kernels
from megatron.layers.recompute import Recomputation
from megatron.layers.site import Site
from megatron.layers.slices import SequenceSlice
from megatron.model.ownership import OwnedParameter
from megatron.model.placement import Placement
from megatron.model.stage import RankModel
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.make import takes_muon
from megatron.parallel.context import ContextAxes, ContextParallel, context_parallel
from megatron.parallel.deep_ep import VisitedExperts
from megatron.parallel.experts import ExpertParallel
from megatron.parallel.grid import Tiling
from megatron.parallel.groups import Groups, connect_grid
from megatron.parallel.tensor import ALONE, SharedTokens, SplitTokens, TensorParallel
from megatron.planning.count.assumed_routes import (
    AssumedBuffer,
    AssumedExchange,
    AssumedGathering,
)
from megatron.planning.count.divided import LAYERS, CountedBorders
from megatron.planning.count.listed_rooms import ListedRooms
from megatron.planning.count.moved import CountedActivations
from megatron.planning.count.ordered import waits_before_readers
from megatron.planning.count.recorder import META, ListedGroup, ListedLane, Recorder, bytes_of
from megatron.planning.count.slots import CountedSlot
from megatron.planning.count.subject import Subject
from megatron.runtime.communicator import Communicator, links_of
from megatron.runtime.embedding_copies import ranks_with_copies
from megatron.runtime.pass_graphs import StageGraphs
from megatron.runtime.stage_passes import StagePasses
from megatron.runtime.store import ActivationStore
from megatron.runtime.units import UnitTensors
from megatron.schedules.lower import Program, Run, Start
from megatron.schedules.needs import Comm, CommKind
from megatron.schedules.passes import OfSlice, Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.costs.count import (
    NO_PASS,
    NO_WORK,
    CountedAxis,
    Matrix,
    Parameters,
    PassCount,
    RankCount,
    Segment,
    Work,
    in_order,
    last_words,
)

_OF_USES: Final[Mapping[str, CountedAxis]] = {
    "context": "context",
    "context_heads": "context_heads",
    "context_ring": "context_ring",
    "experts": "experts",
    "expert_tensor": "expert_tensor",
}
"""Uses of groups that a single axis has."""


@dataclass(frozen=True)
class Part:
    """Some layers of a rank, with or without the rank's embeddings, final norm and output layer."""

    placement: Placement
    recomputation: Recomputation


class CountedRank:
    """One rank of a run; its tensors have no values.

    Its plan has one microbatch, perhaps in slices, and its model has only the layers of ``part``.
    Of the slices, only those with the numbers ``counted`` run, which begin with the first one and
    end with the last one; ``None``: all run. With ``between``, other layers of the stage are before
    and after the layers of ``part``.
    """

    def __init__(
        self,
        subject: Subject,
        plan: Plan,
        rank: int,
        part: Part,
        counted: Sequence[int] | None = None,
        *,
        between: bool = False,
    ) -> None:
        self._subject, self._plan, self._rank = subject, plan, rank
        self._between = between
        self._counted = range(plan.slices) if counted is None else counted
        self._recorder = recorder = Recorder()
        self._lane = ListedLane(recorder)
        self._groups = _groups(subject, plan, rank, recorder)
        kernels = counted_kernels(subject.dtype, subject.gpu)
        site = Site(
            META,
            subject.dtype,
            tensor=self._tensor(),
            context=self._context(),
            data=self._groups.data,
            given_experts=self._spread_experts(),
            recomputation=part.recomputation,
            wide_stream=subject.wide_stream,
            eight_bits=subject.eight_bits,
            given_kernels=kernels,
            grouped_package=kernels if subject.host_knows_slots else None,
            rooms=lambda: ListedRooms(recorder),
        )
        self._model = model = RankModel(
            subject.model,
            part.placement,
            site,
            vocab_recompute=subject.vocab_recompute,
            borders=CountedBorders(recorder, between),
        )
        owned = list(model.owned_parameters())
        self._parameters = _elements(owned)
        if owned:
            self._gradients = Bucket(owned, model.kernels, gradient_dtype=subject.gradient_dtype)
        if subject.gathers_eight_bits:
            for weight in model.gathered_weights().values():
                weight.give(*weight.without_values(META))
        self._store = ActivationStore()
        host = CountedActivations(model.shared_tensors(), recorder) if subject.offloads else None
        self._slices = SequenceSlice.of_lengths(subject.slices) if subject.slices else ()
        self._graphs = None
        if subject.captures and not between:
            self._graphs = StageGraphs(model, partial(CountedSlot, recorder))
        self._passes = StagePasses(
            model,
            plan,
            rank,
            self._store,
            seed=0,
            slices=self._slices,
            host=host,
            graphs=self._graphs,
        )
        tokens = subject.model.seq_length // (model.context.size * model.tensor.sequence_parts)
        shape_buh = subject.samples, tokens, subject.model.hidden_size
        self._tensors = UnitTensors.of(shape_buh, subject.dtype, self._slices, model)
        self._starts_bs = subject.document_starts()

    def _tensor(self) -> TensorParallel:
        """Return the tensor-parallel ranks of this rank; their lane lists its work."""
        axis = self._groups.tensor
        if axis.size == 1:
            return ALONE
        split = self._subject.tensor.sequence_parallel
        kind = SplitTokens if split else SharedTokens
        return kind(axis, self._lane, self._recorder.pause)

    def _context(self) -> ContextParallel:
        """Return how this rank shares sequences; its lane lists what travels along a ring."""
        groups = self._groups
        axes = ContextAxes(groups.context, groups.context_heads, groups.context_ring)
        return context_parallel(axes, self._subject.context.exchange, lambda size: self._lane)

    def _spread_experts(self) -> ExpertParallel | None:
        """Return how tokens travel to experts that are spread."""
        groups, ranks = self._groups, self._subject.experts
        if not groups.grid.spreads_experts:
            return None
        recorder, imbalance = self._recorder, self._subject.expert_imbalance
        if ranks.visits:
            buffer = AssumedBuffer(recorder, groups.experts.size, imbalance)
            return VisitedExperts(groups.experts, groups.expert_gradients, buffer)
        exchanges = ranks.moe_token_dispatcher_type == "alltoall" and groups.experts.size > 1
        kind = AssumedExchange if exchanges else AssumedGathering
        axes = groups.experts, groups.expert_tensor, groups.expert_gradients
        return kind(*axes, recorder, imbalance)

    def _begin(self) -> None:
        """Begin an iteration of one microbatch."""
        model, batch = self._model, self._subject.microbatch(self._starts_bs)
        if model.eight_bits is not None and model.eight_bits.delayed is not None:
            model.eight_bits.end(lambda _: None)  # so that scales have a history
        self._passes.begin([batch], 0, training=True, predicts_ahead=True)

    def segment(self) -> Segment:
        """Count the layers of chunk 0, between other layers of the stage."""
        assert self._between, "other layers are before and after"
        with self._recorder:
            self._begin()
            rounds = self._subject.eight_bits is not None
            first = self._layers() if rounds else []  # this round makes the weights in 8 bits
            self._passes.forget_losses()
            units = self._layers()
            held = self._dropped() + bytes_of(self._passes.lasting())
        once = NO_WORK
        if rounds:
            once = _more([unit["F"] for unit in first], [unit["F"] for unit in units])
        if not self._slices:
            return Segment(units[0], self._parameters, held, once)
        return Segment({}, self._parameters, held, once, tuple(map(Segment, units)))

    def _layers(self) -> list[dict[PassKind, Work]]:
        """Return the passes of counted slices; the backward begins with the last one."""
        forwards = [self._forward_of_layers(unit) for unit in self._counted]
        backwards = [self._backward_of_layers(unit) for unit in reversed(self._counted)]
        return [
            {"F": forward, **backward}
            for forward, backward in zip(forwards, reversed(backwards), strict=True)
        ]

    def _forward_of_layers(self, unit: int) -> Work:
        store, stage = self._store, self._rank
        store.put("input", unit, self._stream(unit), stage)
        with self._recorder.recording() as parts:
            self._passes.forward(Pass("F", 0, 0, unit))
            self._recorder.lasts(self._passes.lasting())
        store.take("output", unit, stage)
        return in_order(*parts[LAYERS:])  # an unkept input is freed after them

    def _backward_of_layers(self, unit: int) -> dict[PassKind, Work]:
        recorder, store, stage = self._recorder, self._store, self._rank
        kinds: dict[PassKind, Work] = {}
        if self._plan.recomputes:
            with recorder.recording() as parts:
                self._passes.recompute(Pass("R", 0, 0, unit))
            kinds["R"] = in_order(*parts)
        store.put("output_gradient", unit, self._stream(unit), stage)
        with recorder.recording() as parts:
            self._passes.backward(Pass("B", 0, 0, unit))
        kinds["B"] = parts[LAYERS]
        store.take("input_gradient", unit, stage)
        if self._plan.split_backward:
            with recorder.recording() as parts:
                self._passes.weight_gradients(Pass("W", 0, 0, unit))
            kinds["W"] = in_order(*parts)
        return kinds

    def _dropped(self) -> int:
        """Drop the weights in 8 bits, as every new iteration does, and return their bytes."""
        before = self._recorder.held
        self._model.begin(training=True)
        return before - self._recorder.held

    def _stream(self, unit: int) -> torch.Tensor:
        """Return a unit's activations, or their gradient, as they pass from layer to layer."""
        shape = self._tensors.stage(unit)
        return torch.empty(shape, dtype=self._tensors.stream_dtype, device=META)

    def count(self, program: Program) -> RankCount:
        """Count all that the rank does in a program of one microbatch."""
        communicator = Communicator(
            self._groups, self._plan, self._passes, self._lane, self._tensors
        )
        with self._recorder as recorder:
            self._begin()
            held = recorder.held
            rounds = self._subject.eight_bits is not None
            first = self._row(program, communicator) if rounds else None  # makes weights in 8 bits
            self._passes.forget_losses()
            if rounds and self._graphs is not None:
                self._graphs.close()  # so that the next round captures its passes
                held = recorder.held  # with the weights in 8 bits, which stay where graphs read
            found = self._row(program, communicator)
            held += self._dropped() + bytes_of(self._passes.lasting())
        once = NO_PASS
        if first is not None:
            once = PassCount.of(_more(_forwards(first), _forwards(found)))
        count = RankCount.of_slices(found) if self._slices else found[0]
        return replace(count, parameters=self._parameters, held=held, once=once)

    def _row(self, program: Program, communicator: Communicator) -> list[RankCount]:
        """Count the passes and communications of the rank's row, for every counted slice."""
        units = {number: _Unit() for number in self._counted}
        under_way = {}
        for step in waits_before_readers(program.rows[self._rank]):
            item: OfSlice = step.item if isinstance(step, Run) else step.comm
            if item.slice not in units:
                continue
            unit = units[item.slice]
            with self._recorder.recording() as parts:
                if isinstance(step, Run):
                    self._passes.table[step.item.kind](step.item)
                    self._recorder.lasts(self._passes.lasting())
                elif isinstance(step, Start):
                    under_way[step.comm] = communicator.start(step.comm)
                else:
                    communicator.finish(step.comm, under_way.pop(step.comm))
            own = PassCount.of(*parts)
            if isinstance(step, Run):
                unit.passes[step.item.kind, step.item.chunk] = own
            elif isinstance(step, Start):
                unit.begun[_key(step.comm)] = own
            else:
                unit.ended[_key(step.comm)] = own
        return [RankCount(own.passes, own.begun, own.ended) for own in units.values()]


@dataclass
class _Unit:
    """Counts of a slice or of a whole microbatch; attributes as in ``RankCount``."""

    passes: dict[tuple[PassKind, int], PassCount] = field(default_factory=dict)
    begun: dict[tuple[CommKind, int], PassCount] = field(default_factory=dict)
    ended: dict[tuple[CommKind, int], PassCount] = field(default_factory=dict)


def _forwards(units: Sequence[RankCount]) -> list[Work]:
    """Return the work of all F passes."""
    passes = (own for unit in units for (kind, _), own in unit.passes.items() if kind == "F")
    return [work for own in passes for work, _ in own.parts]


def _more(first: Sequence[Work], again: Sequence[Work]) -> Work:
    """Return the steps that ``first`` has and ``again`` lacks: work that is done only once.

    The second round adds no losses or loads of layers to those of the first one
    (``forget_losses``). So it does nothing that the first round does not.
    """
    steps, usual = (Counter(chain.from_iterable(w.steps for w in own)) for own in (first, again))
    assert usual <= steps, "done again, a pass does something else"
    return Work(tuple((steps - usual).elements()))


def _elements(owned: Sequence[OwnedParameter]) -> Parameters:
    """Return the names and the numbers of elements of the parameters, padding included."""
    usual = [own for own in owned if own.axis is None]
    experts = sum(own.parameter.numel() for own in owned if own.axis is not None)
    matrices = sum(own.parameter.numel() for own in usual if takes_muon(own))
    others = sum(own.parameter.numel() for own in usual) - matrices
    sizes = tuple((own.name, own.parameter.numel()) for own in owned)
    shapes = tuple(_matrix(own) for own in owned if takes_muon(own))
    return Parameters(matrices, others, experts, sizes, shapes)


def _matrix(owned: OwnedParameter) -> Matrix:
    """Return the facts of a matrix; matrices of experts that are spread over ranks are whole."""
    rows, columns = owned.parameter.shape
    whole = owned.global_shape if owned.axis is None else (rows, columns)
    pieces = len(owned.pieces) if owned.axis is None else 1
    shape = whole[0], whole[1]
    return Matrix(last_words(owned.name), (rows, columns), shape, pieces, owned.matrices)


def _key(comm: Comm) -> tuple[CommKind, int]:
    return comm.kind, comm.stage


def _groups(subject: Subject, plan: Plan, rank: int, recorder: Recorder) -> Groups:
    """Return the groups of the first of the ranks that share pipeline rank ``rank``."""
    grid = subject.grid(plan.ranks)
    own = next(r for r in range(grid.world_size) if grid.coordinates(r).pipeline == rank)
    rows = set(grid.groups("tensor"))

    def connect(use: str, tiling: Tiling) -> ListedGroup:
        axis: CountedAxis = _OF_USES.get(use, "column")
        if use not in _OF_USES and rows.issuperset(tiling):
            axis = "tensor"
        ranks = next((ranks for ranks in tiling if own in ranks), tiling[0])
        return ListedGroup(recorder, axis, ranks.index(own) if own in ranks else 0, len(ranks))

    ends = ranks_with_copies(plan, tied=subject.model.vocabulary.tie_embeddings)
    return connect_grid(grid, own, META, ends, connect, links_of(plan))
