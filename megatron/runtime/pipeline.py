"""One rank of the pipeline, ready to run: model, plan, programs, store and executor."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch

from megatron.layers.slices import SequenceSlice
from megatron.model.stage import RankModel
from megatron.parallel.groups import Groups
from megatron.parallel.lanes import make_lane
from megatron.runtime.batch import DeviceMicrobatch
from megatron.runtime.communicator import Communicator
from megatron.runtime.device_progress import DeviceProgress
from megatron.runtime.executor import Executor, Gate
from megatron.runtime.layer_losses import Sums
from megatron.runtime.observer import Observer
from megatron.runtime.offload import HostBuffers, HostCopies
from megatron.runtime.pass_graphs import StageGraphs
from megatron.runtime.placeholder_passes import PlaceholderPasses
from megatron.runtime.position import Position
from megatron.runtime.replayed import NewSlot
from megatron.runtime.replica_work import ReplicaWork
from megatron.runtime.replication import Replication
from megatron.runtime.stage_passes import StagePasses
from megatron.runtime.store import ActivationStore
from megatron.runtime.timeline import Recorder
from megatron.runtime.token_rows import TokenRows, slices_of_row
from megatron.runtime.units import UnitTensors
from megatron.schedules.costs import Costs
from megatron.schedules.lower import Program, lower
from megatron.schedules.offload_at_once import with_copies_at_once
from megatron.schedules.plan import Plan, evaluation_plan, plan_of_one
from megatron.simulator.simulate import Timeline


@dataclass(frozen=True)
class Installed:
    """A plan with its programs, ready to run on this rank."""

    costs: Costs
    training: Program
    evaluation: Program
    passes: StagePasses
    executor: Executor
    host: HostCopies | None
    graphs: StageGraphs | None


class PipelineRank:
    """Trains and evaluates on this rank, in step with the others.

    Args:
        model: this rank's part of the model, on its device.
        plan: the checked training plan, the same on every rank.
        groups: the axes and their process groups.
        activation_shape: [b, u, h], the shape of a microbatch's tensors between stages.
        dtype: of activations.
        seed: of the run, for dropout.
        costs: assumed durations; they decide where communication is issued.
        replication: the work shared with other ranks.
        slices: the slices of every microbatch; empty: microbatches are whole.
        new_slot: makes the memory of graphs of passes (``StageGraphs``); ``None``: every pass
            launches its kernels without a graph.

    Attributes:
        position: where this rank is.
    """

    def __init__(
        self,
        model: RankModel,
        plan: Plan,
        groups: Groups,
        activation_shape: tuple[int, int, int],
        dtype: torch.dtype,
        seed: int,
        costs: Costs,
        replication: Replication,
        new_slot: NewSlot | None,
        slices: Sequence[SequenceSlice],
    ) -> None:
        axes = (groups.gradients, groups.expert_gradients, groups.partial_gradients, groups.ends)
        sharing = max(axis.size for axis in axes)
        self.model = model
        self.store = ActivationStore()
        on_gpu = groups.device.type == "cuda"
        self.position = Position(DeviceProgress(groups.device) if on_gpu else None)
        self._groups = groups
        self._tensors = UnitTensors.of(activation_shape, dtype, slices, model)
        self._seed = seed
        self._lane = make_lane(groups.device, groups.vocabulary.size, "vocabulary")
        self._replication = replication
        self._new_slot = new_slot
        self._graphs = WeakSet[StageGraphs]()
        self._slices = slices
        self._gradient_lane = make_lane(groups.device, sharing, "gradients")
        # A copy has two sides: the rank and its host.
        self._host_lane = make_lane(groups.device, 1 + bool(plan.offloaded), "host")
        self._host_buffers = HostBuffers(groups.device)
        self._installed = self._install(plan, costs)

    @property
    def train_program(self) -> Program:
        """The program of a training iteration."""
        return self._installed.training

    @property
    def graph_slots(self) -> int:
        """Slots of captured passes (``StageGraphs``); 0: no pass was captured."""
        return sum(graphs.slots for graphs in self._graphs)

    @property
    def costs(self) -> Costs:
        """The durations for which the programs were made."""
        return self._installed.costs

    def replace_plan(self, plan: Plan, costs: Costs) -> Installed:
        """Run another plan from the next iteration on; every rank calls it between iterations.

        Args:
            plan: a checked plan with the same places of the stages and the same treatment of the
                vocabulary, so that no parameter moves.
            costs: durations; they decide where communication is issued.

        Returns:
            The replaced plan, for ``put_back``.
        """
        old = self.train_program.plan
        assert plan.stages == old.stages, "no stage may move"
        sharded = plan.treatment.is_sharded
        assert sharded == old.treatment.is_sharded, "the vocabulary stays where it is"
        replaced, self._installed = self._installed, self._install(plan, costs)
        return replaced

    def put_back(self, installed: Installed) -> Installed:
        """Run a replaced plan again, and return the plan that it displaces.

        Every rank calls this method between iterations.
        """
        replaced, self._installed = self._installed, installed
        return replaced

    def let_go(self, installed: Installed) -> None:
        """Free the memory that a replaced plan has for its graphs; it must not be put back.

        Its passes refer to each other, so Python would free it only at its next collection.
        """
        if installed.graphs is not None:
            installed.graphs.close()

    def warm_up(self, microbatch: DeviceMicrobatch, *, trains: bool = True) -> None:
        """Train on a microbatch and evaluate it, so that the first iteration starts at full speed.

        Every rank calls this method before the first iteration. Each link and group sends tensors
        of the sizes of a real iteration: NCCL connects the ranks of a communicator only when they
        first use an algorithm, and the size decides which algorithm. Each kernel runs on the
        stream and the thread that will use it, so it is compiled and loaded, and the libraries
        have their handles and workspaces there. The method trains twice, because first gradients
        overwrite the buffers that later gradients are added to.

        Activations that wait on the host in an iteration do so here too, in memory that is freed
        afterwards, so that the warm-up takes no more of the device than an iteration.

        The caller must clear the gradients afterwards. No parameter changes.

        With ``trains`` false the run will only evaluate. The loss of the microbatch is not used.
        """
        plan = self.train_program.plan
        running = self._install(plan_of_one(plan), self.costs, is_first=True)
        for _ in range(2 if trains else 0):
            running.passes.begin([microbatch], 0, training=True, predicts_ahead=True)
            running.executor.run(running.training)
        if trains and self._installed.host and running.host:
            running.host.release()
            if self._has_equal_microbatches:
                self._installed.host.reserve(running.host.rooms)
        running.passes.begin([microbatch], 0, training=False, predicts_ahead=False)
        with torch.no_grad():
            running.executor.run(running.evaluation)
        if trains and self._replication.optimizer is not None:
            work = self._replica_work(plan)
            for bucket in range(len(self._replication.buckets)):  # equal weights: no change
                work.gather_again(bucket).wait()

    @property
    def _has_equal_microbatches(self) -> bool:
        """Whether the activations of all microbatches have the same sizes.

        Those of experts have not: their sizes depend on the tokens.
        """
        return not self.model.config.experts.num_experts

    def _install(
        self,
        plan: Plan,
        costs: Costs,
        *,
        is_first: bool = False,
    ) -> Installed:
        """Make a plan ready to run.

        Args:
            plan: the plan.
            costs: as in ``replace_plan``.
            is_first: the plan is for the warm-up only. It takes no optimizer step, and captures no
                graphs, because their kernels may not be loaded yet. It moves the activations that
                the installed plan moves.
        """
        training, buffers = self.training_program(plan, costs, with_steps=not is_first), None
        if is_first:
            training = with_copies_at_once(training, self._installed.training)
            buffers = HostBuffers(self._groups.device, pins=False)
        host = self._host_copies(training, buffers or self._host_buffers)
        graphs = None if is_first else self._make_graphs()
        passes = self._stage_passes(plan, self._slices, graphs, host)
        executor = Executor(
            passes,
            Communicator(self._groups, plan, passes, self._lane, self._tensors),
            self._placeholder_passes(plan),
            self._replica_work(plan),
            self.position,
            self._groups.turns,
            host,
            self._groups.waits,
        )
        evaluation = lower(evaluation_plan(plan), costs)
        return Installed(costs, training, evaluation, passes, executor, host, graphs)

    def _stage_passes(
        self,
        plan: Plan,
        slices: Sequence[SequenceSlice],
        graphs: StageGraphs | None = None,
        host: HostCopies | None = None,
    ) -> StagePasses:
        rank, replica = self._groups.pipeline.rank, self._groups.replica
        return StagePasses(
            self.model,
            plan,
            rank,
            self.store,
            self._seed,
            replica,
            graphs,
            slices,
            host,
            self._groups.turns,
        )

    def _placeholder_passes(self, plan: Plan) -> PlaceholderPasses:
        rank, device = self._groups.pipeline.rank, self._groups.device
        depths = self.model.config.further.mtp_num_layers
        return PlaceholderPasses(plan, rank, self.store, self._tensors, device, depths)

    def _make_graphs(self) -> StageGraphs | None:
        """Return graphs for the passes of a plan; ``None``: passes launch their kernels alone."""
        if self._new_slot is None:
            return None
        graphs = StageGraphs(self.model, self._new_slot)
        self._graphs.add(graphs)
        return graphs

    def _host_copies(self, program: Program, buffers: HostBuffers) -> HostCopies | None:
        """Return the copies of this rank in a program; ``None``: all activations stay here."""
        rank = self._groups.pipeline.rank
        if not program.copies(rank):
            return None
        return HostCopies(
            program,
            rank,
            self.model.shared_tensors(),
            self._host_lane,
            buffers,
            self._groups.device,
        )

    def training_program(self, plan: Plan, costs: Costs, *, with_steps: bool = True) -> Program:
        """Return the program of a training iteration of ``plan``; every rank calls this method.

        The program includes the reductions of all pipeline ranks with their replicas, and with
        other ranks that have summands of gradients.

        The plan is as in ``replace_plan``. If optimizer steps are deferred, the program takes the
        step of the previous iteration, unless ``with_steps`` is false.
        """
        return self._replication.in_program(
            lower(plan, costs), self.model, self._groups, with_steps=with_steps
        )

    def _replica_work(self, plan: Plan) -> ReplicaWork:
        return self._replication.work(plan, self.model, self._groups, self._gradient_lane)

    def train(
        self,
        batch: Sequence[DeviceMicrobatch],
        iteration: int,
        recorder: Observer | None = None,
        gate: Gate | None = None,
    ) -> torch.Tensor | None:
        """Run the forward and backward of an iteration; gradients add up in ``main_grad``.

        Args:
            batch: the microbatches, as many as in the plan.
            iteration: iteration of the run, for dropout.
            recorder: records this iteration.
            gate: decides, before the first pass that changes gradients, whether to go on. It must
                give the same answer on every rank.

        Returns:
            This rank's part of the loss and of the losses of the D depths of multi-token
            prediction, [1 + D] on the device; the sums over ranks are the losses. ``None`` if the
            gate returned ``False``; in that case no gradient has changed.
        """
        running = self._installed
        running.passes.begin(batch, iteration, training=True, predicts_ahead=True)
        if not running.executor.run(running.training, recorder, gate):
            return None
        return running.passes.loss(self._groups.device)

    def of_layers(self) -> Sums:
        """Return the losses of this rank's layers in the last iteration, and loads of experts."""
        return self._installed.passes.of_layers()

    def evaluate(
        self, batch: Sequence[DeviceMicrobatch], *, predicts_ahead: bool = False
    ) -> torch.Tensor:
        """Run only the forward; return this rank's part of the loss as ``train`` does.

        With ``predicts_ahead`` a model with multi-token prediction also predicts tokens after the
        next one.
        """
        running = self._installed
        running.passes.begin(batch, 0, training=False, predicts_ahead=predicts_ahead)
        with torch.no_grad():
            running.executor.run(running.evaluation)
        return running.passes.loss(self._groups.device)

    def token_rows(self, samples: int, length: int) -> TokenRows:
        """Return a way to run rows of tokens forward, in the stages of the installed plan.

        Args:
            samples: rows at a time, b.
            length: tokens of a row, as ``row_length`` gives it.
        """
        plan, model, groups = plan_of_one(self.train_program.plan), self.model, self._groups
        is_whole = length == model.config.seq_length
        slices = self._slices if is_whole else slices_of_row(length, plan.slices)
        tokens = length // (model.context.size * model.tensor.sequence_parts)
        shape = samples, tokens, model.config.hidden_size
        tensors = UnitTensors.of(shape, self._tensors.dtype, slices, model)
        passes = self._stage_passes(plan, slices)
        communicator = Communicator(groups, plan, passes, self._lane, tensors)
        executor = Executor(passes, communicator, position=self.position, turns=groups.turns)
        program = lower(evaluation_plan(plan), self.costs)
        return TokenRows(passes, executor, program, groups, slices, samples, length)

    def first_not_finite(self, batch: Sequence[DeviceMicrobatch]) -> tuple[int, int, str] | None:
        """Repeat the forward to find where infinity or NaN appears first.

        Returns:
            (microbatch, rank of the job, name of the value) of the first infinity or NaN in the
            data flow; the same on every rank. ``None`` if all values are finite.
        """
        with self._installed.passes.watching() as sightings:
            self.evaluate(batch, predicts_ahead=True)
        everywhere = [
            (unit, stage, rank, what)
            for rank, own in enumerate(self._groups.world.all_gather_object(sightings))
            for unit, stage, what in own
        ]
        if not everywhere:
            return None
        # Data flows through the stages in ascending order, so the least stage of the least unit
        # found the value first.
        unit, _, rank, what = min(everywhere)
        return unit // self.train_program.plan.slices, rank, what

    def timeline(self, recorder: Recorder) -> Timeline:
        """Collect the records of all ranks of this pipeline; every rank calls it."""
        axis = self._groups.pipeline
        gathered = axis.all_gather_object(recorder.spans())
        return Timeline.of_lanes(axis.size, [span for own in gathered for span in own])

    def close(self) -> None:
        """Close the graphs of passes and the lanes."""
        for graphs in self._graphs:
            graphs.close()
        self._lane.close()
        self._gradient_lane.close()
        self._host_lane.close()
