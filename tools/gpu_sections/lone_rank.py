"""One rank of a large job trains alone, beside stand-ins for its peers (``stand_ins.py``)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

import torch

from megatron.parallel.links import Link
from megatron.parallel.settings import DeviceSettings
from megatron.planning.forecast_run import forecast_run
from megatron.planning.run_costs import cluster_of, crossing_of
from megatron.planning.run_plan import make_run_plan
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.runtime.batch import to_device
from megatron.runtime.communicator import links_of
from megatron.runtime.embedding_copies import ranks_with_copies
from megatron.schedules.costs import Costs, Time
from megatron.schedules.lower import Program, Run, Start
from megatron.schedules.needs import STAGE_KINDS, Comm, participants
from megatron.schedules.pair_steps import FindsSteps, PairSteps, Works
from megatron.schedules.passes import BEGINNERS, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.clocks import Clocks
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.simulate import Span
from megatron.training.setup import build_train_state
from megatron.training.warm_up import warm_up
from tools.benchmarking.case import microbatch_of
from tools.gpu_sections.peers import PacedRecorder, Peers
from tools.gpu_sections.stand_ins import stand_in_groups


@dataclass(frozen=True)
class Ran:
    """An iteration of a rank.

    Attributes:
        seconds: from its begin to the end of its last pass or wait.
        passes: mean seconds of a pass by kind, of passes that are in no pair.
        pairs: seconds of every pair, by the kinds of both passes.
        working: seconds in passes and pairs, including the waits within them.
        waiting: seconds of the stream of the passes between them, in waits for communications.
    """

    seconds: float
    passes: Mapping[PassKind, float]
    pairs: Mapping[tuple[PassKind, ...], Sequence[float]]
    working: float
    waiting: float

    @classmethod
    def of(cls, spans: Sequence[Span]) -> "Ran":
        """Return what the records of an iteration say."""
        alone: defaultdict[Any, list[float]] = defaultdict(list)
        pairs: defaultdict[Any, list[float]] = defaultdict(list)
        kind_of = {span.label: span.kind for span in spans if span.lane == "compute"}
        ends = [span.end for span in spans if span.lane != "comm"]
        for span in spans:
            if span.lane == "compute" and not span.beside:
                alone[span.kind].append(span.length)
            elif span.lane == "compute" and span.leads:
                # Half of a pair's time stands at each of its passes.
                pairs[_in_order(span.kind, kind_of[span.beside])].append(2 * span.length)
        return cls(
            max(ends, default=0.0),
            {kind: fmean(times) for kind, times in alone.items()},
            dict(pairs),
            sum(span.length for span in spans if span.lane == "compute"),
            sum(span.length for span in spans if span.lane == "wait"),
        )


class LoneRank:
    """A rank with its model and its pipeline.

    Args:
        flags: flags of the job, without a device; its plan is for ``gpu``.
        ranks: of the job.
        rank: which of them trains.
        device: on which it trains.
        gpu: the GPU of every rank.

    Attributes:
        config: the job.
        forecast: what a dry run predicts for it.
        peers: the other ranks.
        plan: the plan of the job.
        place: pipeline rank of this rank.
        state: model, pipeline and optimizer of the rank.
    """

    def __init__(self, flags: str, ranks: int, rank: int, device: torch.device, gpu: Gpu) -> None:
        planned = f"{flags} --device cpu --dry-run --dry-run-gpu {gpu.name}"
        self.config = _on(parse(planned.split(), ranks, speak=False), device)
        run_plan = make_run_plan(self.config)
        self.forecast = forecast_run(self.config, run_plan, gpu)
        self.plan = run_plan.plan
        parallel = self.config.parallel
        self.peers = Peers(device, cluster_of(parallel, gpu), frozenset(crossing_of(parallel)))
        grid = parallel.grid
        self.place = grid.axis("pipeline", rank).rank
        tied = self.config.model.vocabulary.tie_embeddings
        groups = stand_in_groups(
            grid,
            rank,
            ranks_with_copies(self.plan, tied=tied),
            links_of(self.plan),
            self.peers,
        )
        self.state = build_train_state(self.config, groups, run_plan)
        self.peers.messages = _messages(self.program, self.place)
        self._batch = to_device(_batch(self.config), device)
        warm_up(self.config, self.state)

    @property
    def program(self) -> Program:
        """The program of an iteration."""
        return self.state.pipeline.train_program

    def install(self, plan: Plan) -> None:
        """Run another plan from now on, with the same places of the stages."""
        self.state.pipeline.replace_plan(plan, self.state.pipeline.costs)
        self.peers.messages = _messages(self.program, self.place)

    def run(self, clocks: Clocks | None = None) -> Ran:
        """Run an iteration as ``record`` does, and return its times."""
        return Ran.of(self.record(clocks))

    def record(self, clocks: Clocks | None = None) -> list[Span]:
        """Run an iteration and return its record.

        Args:
            clocks: when the peers are ready; ``None``: nobody communicates.
        """
        peers, state = self.peers, self.state
        peers.are_there = clocks is not None
        peers.ready = {} if clocks is None else ready_times(clocks, self.place)
        recorder = PacedRecorder(self.place, peers)
        state.zero_gradients()
        recorder.begin()
        peers.begin()
        state.pipeline.train(self._batch, 0, recorder)
        return recorder.spans()

    def simulated(self, costs: Costs) -> "Simulated":
        """Return the iteration of the installed plan as the simulator has it."""
        return Simulated(Clocks(self.program, costs), costs, self.place)

    def close(self) -> None:
        """Let go of the lanes."""
        self.state.close()


@dataclass(frozen=True)
class Simulated:
    """A rank's iteration in the simulator.

    Attributes:
        clocks: of all ranks.
        costs: of their passes and communications.
        rank: pipeline rank.
    """

    clocks: Clocks
    costs: Costs
    rank: int

    @property
    def seconds(self) -> float:
        """Seconds to the end of the rank's last pass or wait."""
        return self.clocks.after[self.rank][-1]

    @property
    def waiting(self) -> float:
        """Seconds in which the rank runs no pass."""
        return self.seconds - self.clocks.work(self.rank)

    def work(self, alone: Mapping[PassKind, float]) -> float:
        """Return the seconds of all passes of the rank, if each took its time in ``alone``."""
        steps = self.clocks.program.rows[self.rank]
        items = (item for step in steps if isinstance(step, Run) for item in step.passes)
        return sum(alone.get(item.kind, 0.0) for item in items)

    def pairs(self) -> dict[tuple[PassKind, ...], tuple[float, float]]:
        """Return the mean seconds of pairs, joined and apart, by the kinds of both passes."""
        found: defaultdict[Any, list[tuple[float, float]]] = defaultdict(list)
        plan = self.clocks.program.plan
        for step in self.clocks.program.rows[self.rank]:
            if isinstance(step, Run) and step.joined is not None:
                pair = (step.item, step.joined)
                apart = sum(self.costs.of_pass(plan, self.rank, item) for item in pair)
                kinds = _in_order(*(item.kind for item in pair))
                found[kinds].append((self.costs.of_pair(plan, self.rank, pair), apart))
        return {
            kinds: (fmean(one for one, _ in own), fmean(other for _, other in own))
            for kinds, own in found.items()
        }


def _in_order(*kinds: Any) -> tuple[PassKind, ...]:
    """Return the kinds of the passes of a pair, the one that begins first."""
    return tuple(sorted(kinds, key=BEGINNERS.index))


def ready_times(clocks: Clocks, rank: int) -> dict[Comm, float]:
    """Return for each communication when the last rank but ``rank`` has issued it, in seconds."""
    found: dict[Comm, float] = {}
    rows = zip(clocks.program.rows, clocks.after, strict=True)
    for other, (row, after) in enumerate(rows):
        for step, now in zip(row, after, strict=True):
            if other != rank and isinstance(step, Start):
                found[step.comm] = max(found.get(step.comm, 0.0), now)
    return found


def measured_costs(costs: Costs, alone: Mapping[PassKind, float], rank: int) -> Costs:
    """Return costs by the times of passes of one rank, in which nobody communicates.

    A pass takes its measured work, and its waits as predicted. Passes of other ranks differ from
    predictions by the same factors.

    Args:
        costs: predicted.
        alone: mean seconds of passes, by kind.
        rank: the measured pipeline rank.
    """
    passes, waits, turns = dict(costs.passes), dict(costs.waits), dict(costs.turns)
    for kind, measured in alone.items():
        if kind not in passes:
            continue
        wait = mean_time(waits.get(kind, 0.0), rank)
        work = mean_time(passes[kind], rank) - wait
        factor = measured / work if work > 0 else 1.0
        passes[kind] = _sum(_times(passes[kind], factor), _times(waits.get(kind, 0.0), 1 - factor))
        if kind in turns:
            turns[kind] = [[_with_works(own, factor) for own in row] for row in turns[kind]]
    return replace(costs, passes=passes, waits=waits, turns=turns)


def _with_works(finder: FindsSteps, factor: float) -> FindsSteps:
    """Return a finder of steps in which work takes longer by a factor."""

    @cache
    def steps() -> PairSteps:
        return PairSteps(
            tuple(
                Works(factor * step.seconds) if isinstance(step, Works) else step
                for step in finder().steps
            )
        )

    return steps


def mean_time(time: Time, rank: int) -> float:
    """Return the time of a rank, in the mean of its chunks."""
    own = time if isinstance(time, (int, float)) else time[rank]
    return own if isinstance(own, (int, float)) else fmean(own)


def _times(time: Any, factor: float) -> Any:
    if isinstance(time, (int, float)):
        return factor * time
    return [_times(own, factor) for own in time]


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of two times; the second may be one number for all."""
    if isinstance(one, (int, float)):
        assert isinstance(other, (int, float)), "waits have no more parts than times"
        return one + other
    parts = [other] * len(one) if isinstance(other, (int, float)) else other
    return [_sum(*both) for both in zip(one, parts, strict=True)]


def _messages(program: Program, rank: int) -> dict[Link, list[Comm]]:
    """Return the messages between stages that a rank issues, by link, in order."""
    found: defaultdict[Link, list[Comm]] = defaultdict(list)
    for step in program.rows[rank]:
        if isinstance(step, Start) and step.comm.kind in STAGE_KINDS:
            link = Link(step.comm.kind, *participants(program.plan, step.comm))
            found[link].append(step.comm)
    return dict(found)


def _on(config: RunConfig, device: torch.device) -> RunConfig:
    on_gpu = device.type == "cuda"
    devices = DeviceSettings("cuda" if on_gpu else "cpu", "nccl" if on_gpu else "gloo")
    return replace(config, parallel=replace(config.parallel, devices=devices))


def _batch(config: RunConfig) -> list[Any]:
    b, s = config.train.micro_batch_size, config.model.seq_length
    drawn = (
        torch.randint(config.model.vocab_size, (b, s + 1))
        for _ in range(config.train.num_microbatches)
    )
    return list(map(microbatch_of, drawn))
