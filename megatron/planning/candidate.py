"""A schedule that a run could take, with all else that ``auto`` chooses.

Candidates are compared by their seconds on the GPU of the run. Without a GPU, or on an unknown GPU,
they are compared by FLOPs.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Final

from megatron.planning.count.run import count_ranks
from megatron.planning.estimate import (
    Estimate,
    least_seconds,
    planned_microbatches,
    steady_interval,
)
from megatron.planning.forecast_run import RunForecast, forecast_run
from megatron.planning.known import Known
from megatron.planning.limit_of_rank import memory_limit_of
from megatron.planning.memory_limit import beyond_limit, lowered
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_memory import Fullest, fullest, shared_states
from megatron.run.run_config import RunConfig
from megatron.schedules.counted import counted
from megatron.schedules.held import in_flight
from megatron.schedules.make_plan import least_time_of, one_microbatch_of, plan_for
from megatron.schedules.plan import Plan, plan_of_one
from megatron.schedules.request import Request
from megatron.schedules.search.watch import PLANNED, Watch
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.simulate import Timeline, simulate
from megatron.simulator.units import MEMORY, TIME

_NO_BYTES: Final = Fullest(0, 0.0, 0.0)

BOUND: Final = 0.2
"""Seconds of work to count a candidate and to bound its time and memory, about."""

_MANY_FORWARDS: Final = 1500
"""A plain estimate searches no plan of few microbatches that has more forwards than this."""


@dataclass(frozen=True)
class Candidate:
    """A schedule that ``auto`` compares; its plan is made when it is first needed.

    Attributes:
        config: the run with its treatment of the vocabulary and its choices in other dimensions.
        request: request for its plan.
        layers: transformer layers of every stage.
        limit: the most microbatches that a rank may hold.
        watch: limits the time of the search for the plan, and shows how far it is.
        gpu: the GPU by whose seconds and bytes plans are compared; ``None``: plans are compared by
            their costs, and every plan fits.
    """

    config: RunConfig = field(repr=False, compare=False)
    request: Request
    layers: tuple[int, ...]
    limit: float = inf
    watch: Watch = field(default_factory=Watch, compare=False)
    gpu: Gpu | None = field(default=None, compare=False)
    _estimates: list[Known] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def schedule(self) -> str:
        """Name of the schedule."""
        return self.request.schedule

    @property
    def treatment(self) -> str:
        """Treatment of the vocabulary."""
        return self.config.parallel.vocab_parallel

    @property
    def others(self) -> str:
        """All that ``auto`` would choose except schedule and treatment, in words; may be empty."""
        return ", ".join(own for own in self.config.taken if "--vocab-parallel" not in own)

    @property
    def named(self) -> str:
        """All that ``auto`` would choose."""
        others = f", {self.others}" if self.others else ""
        return f"{self.schedule} with {self.treatment}{others}"

    @property
    def is_planned(self) -> bool:
        """Whether the plan is made."""
        return "run_plan" in vars(self)

    @cached_property
    def run_plan(self) -> RunPlan:
        """The plan with its layers and costs.

        If ranks hold more than the run's limit by memory, the plan is searched once more with
        fewer microbatches in flight on these ranks, until none does or none can hold less.
        """
        request: Request | None = self.request
        self.watch.next_plan()
        while request is not None:
            plan = plan_for(request, self.watch)
            self.watch.did(PLANNED * sum(map(len, plan.rows)))
            found = self._with(plan, request)
            request = lowered(self.config, request, found)
        return found

    def _with(self, plan: Plan, request: Request | None = None) -> RunPlan:
        return RunPlan.of(self.config, request or self.request, self.layers, plan)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline of an iteration, in the unit of the costs."""
        return simulate(self.run_plan.program, self.request.costs)

    @cached_property
    def forecast(self) -> RunForecast | None:
        """Forecast of the plan on the GPU; ``None`` without a GPU."""
        return None if self.gpu is None else forecast_run(self.config, self.run_plan, self.gpu)

    @property
    def time(self) -> float:
        """Time of an iteration: seconds on the GPU; without a GPU, in the unit of the costs."""
        found = self.forecast
        return self.timeline.end if found is None else found.outcome.seconds

    @cached_property
    def least_time(self) -> float:
        """Lower bound of ``time``, known without the plan.

        A schedule from a file has only the plan in the file, so that plan is predicted.
        """
        if self.request.file is not None:
            return self.time
        if self.gpu is None:
            return least_time_of(self.request)
        one = self._with(one_microbatch_of(self.request))
        return least_seconds(self.config, one, self.gpu)

    @property
    def time_in_pairs(self) -> float:
        """About ``least_time``, but no less than F takes in pairs with B, in a run with pairs."""
        if self.request.file is not None or self.gpu is None or not self.request.joined:
            return self.least_time
        one = self._with(one_microbatch_of(self.request))
        return least_seconds(self.config, one, self.gpu, paired=True)

    @cached_property
    def can_fit(self) -> bool:
        """Whether a plan could fit the GPU, known without the plan."""
        if self.gpu is None:
            return True
        limit, least = memory_limit_of(self.config), self.least_memory
        room = inf if limit is None else limit.bytes
        return least.fits(self.gpu) and least.peak <= room

    @cached_property
    def least_memory(self) -> Fullest:
        """Least memory of the fullest rank under any plan, known before any plan is searched.

        Before the last stage can begin the backward of the first microbatch, every rank has run its
        forwards of that microbatch and, where the vocabulary is split, its S. So there is a moment
        at which a rank holds parameters, gradients and optimizer state, all tensors that one
        microbatch leaves on the rank, and the microbatch's part of the input embedding (by
        ``lower``, a program keeps the last embedding). A plan of a single microbatch holds no more,
        with one exception: the gradient of the embeddings, if that gradient arrives while T runs.

        A schedule from a file has only the plan in the file, so that plan is counted.
        """
        return fullest(self.config, self._one)

    @cached_property
    def _one(self) -> RunPlan:
        """The plan of one microbatch, or the plan of the file."""
        request = self.request
        found = one_microbatch_of(request) if request.file is None else plan_for(request)
        return self._with(found)

    @cached_property
    def shared_states(self) -> float:
        """Bytes of optimizer states on the first rank that its replicas share with it."""
        one = self._one
        first, *_ = count_ranks(self.config, plan_of_one(one.plan), one.layers)
        return shared_states(self.config, first.parameters)

    @cached_property
    def in_flight(self) -> float:
        """The most microbatches that a rank holds."""
        return max(in_flight(self.run_plan.plan))

    @cached_property
    def beyond_limit(self) -> str | None:
        """The reason why the plan exceeds the run's limit by memory; ``None``: it does not."""
        return beyond_limit(self.config, self.run_plan)

    def check_memory_limit(self) -> None:
        """Refuse a plan that exceeds the run's limit by memory.

        Raises:
            ValueError: names the flag, the bytes and the way out.
        """
        if self.beyond_limit is not None:
            raise ValueError(self.beyond_limit)

    @property
    def is_within_limit(self) -> bool:
        """Whether ``in_flight`` is within the limit, or the bytes within the limit by memory."""
        return self.in_flight <= self.limit and self.beyond_limit is None

    @property
    def fits(self) -> bool:
        """Whether the plan is within the limit, and fits the GPU."""
        found = self.forecast
        return self.is_within_limit and (found is None or found.fits)

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank; without a GPU, the most microbatches that a rank holds."""
        found = self.forecast
        return self.in_flight if found is None else found.fullest.peak

    @property
    def known(self) -> Known:
        """What the closest look so far has found; before any look, what is known without a plan.

        Without a GPU nothing is known of bytes.
        """
        if self.is_planned:
            return self._planned
        return self._estimates[-1] if self._estimates else self._bounded

    @cached_property
    def _planned(self) -> Known:
        found = self.forecast
        held = _NO_BYTES if found is None else found.fullest
        return Known("plan", self.time, held, self.fits, self.request.microbatches)

    @cached_property
    def _bounded(self) -> Known:
        held = _NO_BYTES if self.gpu is None else self.least_memory
        return Known("bound", self.least_time, held, self.can_fit)

    def look(self, watch: Watch) -> None:
        """Look more closely: by a plan of few microbatches, and then by the run's own plan.

        A plan of few microbatches is left out if it would save no time: if there are no more
        microbatches, or without a GPU.

        Args:
            watch: ends the search for a plan of few microbatches.
        """
        few = planned_microbatches(self.request) < self.request.microbatches
        if self.is_planned or self._estimates or not few or self.gpu is None:
            self.tell()
            return
        found = self.estimate(watch.part(watch.left), quick=True)
        fits = found.fits and found.in_flight <= self.limit
        seconds = max(found.seconds, self.least_time)
        self._estimates.append(Known("estimate", seconds, found.fullest, fits, found.planned))
        self.watch.note(
            f"{self.named}: by {counted(found.planned, 'microbatch')} {TIME.write(found.seconds)} "
            f"and {MEMORY.write(found.fullest.peak)} are expected{'' if fits else ': too much'}"
        )

    @cached_property
    def is_long(self) -> bool:
        """Whether a plain estimate leaves the passes in the order of their block."""
        chunks = self.request.chunks or self.request.traits.chunks
        forwards = planned_microbatches(self.request) * self.request.ranks * chunks
        return self.request.shortened and forwards > _MANY_FORWARDS

    def estimate(
        self, watch: Watch, gpu: Gpu | None = None, *, quick: bool = False, plain: bool = False
    ) -> Estimate:
        """Return the time and memory of the run by a plan of few microbatches.

        Args:
            watch: ends the search for that plan.
            gpu: the GPU of every rank; ``None``: the GPU by which candidates are compared.
            quick: whether the search spends only a tenth of its effort.
            plain: whether a plan of many passes stays in the order of its block, without a search.
        """
        return self.estimate_by(self.of_few(watch, gpu, quick=quick, plain=plain))

    def of_few(
        self, watch: Watch, gpu: Gpu | None = None, *, quick: bool = False, plain: bool = False
    ) -> "Candidate":
        """Return the candidate with as few microbatches as an estimate needs; see ``estimate``."""
        gpu = gpu or self.gpu
        assert gpu is not None, "without a GPU candidates are compared by their plans"
        train, planned = self.config.train, planned_microbatches(self.request)
        samples = planned * train.micro_batch_size * train.replicas
        searched = self.request.shortened and not (plain and self.is_long)
        return replace(
            self,
            config=replace(
                self.config, train=replace(train, global_batch_size=samples, rampup=None)
            ),
            request=replace(self.request, microbatches=planned, quick=quick, shortened=searched),
            watch=watch,
            gpu=gpu,
        )

    def estimate_by(self, few: "Candidate") -> Estimate:
        """Return the time and memory of the run by its candidate of few microbatches."""
        found, train = few.forecast, self.config.train
        assert found is not None, "the candidate of few microbatches has a GPU"
        planned, whole = few.request.microbatches, train.num_microbatches
        seconds = found.outcome.seconds
        if planned < whole:
            seconds += (whole - planned) * steady_interval(found.timeline, few.run_plan.plan)
        return Estimate(
            seconds,
            train.global_batch_size / seconds,
            found.outcome.mfu * whole / planned * found.outcome.seconds / seconds,
            found.fullest,
            found.fits and few.beyond_limit is None,
            planned,
            whole,
            few.in_flight,
            few.watch.was_cut,
        )

    def tell(self) -> None:
        """Show the reader of the watch the plan's time and memory; make the plan if need be."""
        found, least = self.forecast, self.time / self.least_time
        time = f"{self.time:.6g} FLOPs of a rank" if found is None else TIME.write(self.time)
        memory = "" if found is None else f", {MEMORY.write(self.peak)}"
        held = counted(self.in_flight, "microbatch in flight")
        fault = "" if self.fits else ": too much"
        self.watch.planned(
            self.named,
            f"time {time}, {least:.3f} times the least that it can take{memory}, {held}{fault}",
        )
