"""One rank of the pipeline, ready to run: model, plan, programs, store and executor."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.model.stage import RankModel
from megatron.parallel.groups import PipelineGroups
from megatron.runtime.batch import DeviceMicrobatch
from megatron.runtime.communicator import Communicator
from megatron.runtime.executor import Executor
from megatron.runtime.stage_passes import StagePasses
from megatron.runtime.store import ActivationStore
from megatron.runtime.timeline import Recorder
from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.lower import Program, lower
from megatron.schedules.plan import Plan, evaluation_plan
from megatron.simulator.simulate import Span, Timeline


class PipelineRank:
    """Trains and evaluates on this rank, in step with the others.

    Args:
        model: what this rank owns, on its device.
        plan: the checked training plan, the same on every rank.
        groups: the process groups.
        activation_shape: [b, s, h] of what travels between stages.
        dtype: of activations.
        seed: of the run, for dropout.
        costs: assumed durations; decide where communication is issued.
    """

    def __init__(
        self,
        model: RankModel,
        plan: Plan,
        groups: PipelineGroups,
        activation_shape: tuple[int, int, int],
        dtype: torch.dtype,
        seed: int,
        costs: Costs = UNIT_COSTS,
    ) -> None:
        self.model = model
        self.store = ActivationStore()
        self._groups = groups
        self._train_program = lower(plan, costs)
        self._evaluation_program = lower(evaluation_plan(plan), costs)
        self._passes = StagePasses(model, plan, groups.rank, self.store, seed)
        self._communicator = Communicator(groups, plan, self._passes, activation_shape, dtype)
        self._executor = Executor(self._passes, self._communicator)

    @property
    def train_program(self) -> Program:
        """The program of a training iteration."""
        return self._train_program

    def train(
        self,
        batch: Sequence[DeviceMicrobatch],
        iteration: int,
        recorder: Recorder | None = None,
    ) -> torch.Tensor:
        """Run the forward and backward of an iteration; gradients add up in ``main_grad``.

        Args:
            batch: as many microbatches as the plan has.
            iteration: iteration of the run, for dropout.
            recorder: records this iteration.

        Returns:
            This rank's part of the loss, a scalar on the device; the sum over ranks is the loss.
        """
        self._passes.begin(batch, iteration, training=True)
        self._executor.run(self._train_program, recorder)
        if self.model.config.tie_embeddings:
            self._add_up_tied_gradients()
        return self._loss()

    def evaluate(self, batch: Sequence[DeviceMicrobatch]) -> torch.Tensor:
        """Run the forward only; returns this rank's part of the loss as ``train`` does."""
        self._passes.begin(batch, 0, training=False)
        with torch.no_grad():
            self._executor.run(self._evaluation_program)
        return self._loss()

    def first_not_finite(self, batch: Sequence[DeviceMicrobatch]) -> tuple[int, int, str] | None:
        """Repeat the forward and look where infinity or NaN appears first.

        Returns:
            (microbatch, rank, what) of the earliest in the order of the data flow, the same on
            every rank; ``None`` if this forward is finite everywhere.
        """
        with self._passes.watching() as sightings:
            self.evaluate(batch)
        gathered = self._groups.all_gather_object(sightings)
        everywhere = [sighting for own in gathered for sighting in own]
        if not everywhere:
            return None
        microbatch, _, rank, what = min(everywhere)
        return microbatch, rank, what

    def timeline(self, recorder: Recorder) -> Timeline:
        """Collect what every rank has recorded; every rank calls it."""
        gathered: list[list[Span]] = self._groups.all_gather_object(recorder.spans())
        return Timeline(self._groups.size, tuple(span for own in gathered for span in own))

    def close(self) -> None:
        """Give the communication lane back."""
        self._communicator.close()

    def _loss(self) -> torch.Tensor:
        losses = [self._passes.losses[i] for i in sorted(self._passes.losses)]
        if losses:
            return torch.stack(losses).sum()
        return torch.zeros((), device=self._groups.device)

    def _add_up_tied_gradients(self) -> None:
        """Sum the gradients of the two copies of a tied matrix on the first and the last rank."""
        if self._groups.ends is None:
            return
        part = self.model.output_layer if self.model.holds_tied_copy else self.model.input_layer
        both_here = self.model.input_layer is not None and self.model.output_layer is not None
        if part is not None and not both_here:
            dist.all_reduce(part.weight.main_grad, group=self._groups.ends)
