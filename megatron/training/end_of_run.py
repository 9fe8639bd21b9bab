"""Gathers what the last screen of a run tells, from the iterations that the run has timed."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Final

from megatron.parallel.environment import ranks_share_cores
from megatron.planning.other_treatment import Prediction, predict_other
from megatron.planning.run_plan import described
from megatron.run.run_config import RunConfig
from megatron.schedules.catalogue import without_bubble
from megatron.schedules.settings import DEFAULT_SCHEDULE
from megatron.simulator.compare import idle, total
from megatron.simulator.costs.from_timelines import costs_from_timelines
from megatron.simulator.simulate import Timeline
from megatron.training.metrics.last_screen import LastScreen
from megatron.training.outputs import TRACE
from megatron.training.setup import TrainState

FEWEST: Final = 5
"""Iterations, after the warm-up, of the shortest run that has a last screen."""


def last_screen(
    config: RunConfig,
    state: TrainState,
    seconds: Sequence[tuple[int, float]],
    timelines: Mapping[int, Timeline],
) -> LastScreen | None:
    """Return the values of the last screen; ``None``: the run is too short to tell its speed.

    Args:
        config: the run.
        state: the rank that prints the screen.
        seconds: number, from 1, and seconds of the last iterations after the warm-up.
        timelines: recorded iterations of the plan that runs now, by number from 0.
    """
    if len(seconds) < FEWEST:
        return None
    found, reason = _predicted(config, state, list(timelines.values()))
    return LastScreen(
        treatment=config.parallel.vocab_parallel,
        schedule=described(config.parallel.pipeline_schedule, state.run_plan),
        pipeline_size=config.parallel.pipeline.size,
        seconds=median(own for _, own in seconds),
        timed=(seconds[0][0], seconds[-1][0]),
        recorded=[number + 1 for number in timelines],
        idle=fmean(map(idle, timelines.values())) if timelines else None,
        passes=median(map(total, timelines.values())) if timelines else 0.0,
        predicted=found,
        unpredicted=reason,
        files=tuple(_files(config)),
        further=tuple(_further(config, found)),
    )


def _predicted(
    config: RunConfig, state: TrainState, timelines: Sequence[Timeline]
) -> tuple[Prediction | None, str]:
    """Return the job with the other treatment, or the reason why it is not predicted."""
    if not timelines:
        return None, "the passes have not been timed (--profile-schedule-start)"
    if state.groups.device.type == "cpu" and ranks_share_cores():
        return None, (
            "there are more ranks than cores on this machine, so the time of a pass depends on the "
            "ranks that happen to run beside it; start at most as many ranks as cores"
        )
    costs = costs_from_timelines(state.plan, timelines)
    try:
        return predict_other(config, state.run_plan, state.plan, costs), ""
    except ValueError as error:
        return None, str(error)


def _files(config: RunConfig) -> Iterator[str]:
    """Yield lines on the files of a run."""
    log, records = config.log, config.log.records
    save = config.checkpoint.save
    yield f"checkpoints in {save}" if save else "no checkpoint; --save FOLDER keeps the model"
    data = config.data.blend
    if data:
        yield f"data in {', '.join(str(prefix) for _, prefix in data[:3])}"
    named: tuple[tuple[str, Path | None], ...] = (
        ("records", records.log_jsonl),
        ("curves", records.tensorboard_dir),
        ("timeline", log.record_timeline),
        ("measured costs", log.save_measured_costs),
        ("traces", log.profile_dir if log.profile else None),
    )
    yield from (f"{name} in {path}" for name, path in named if path is not None)


def _further(config: RunConfig, found: Prediction | None) -> Iterator[str]:
    """Yield lines on flags to add to the command of the run."""
    parallel = config.parallel
    if found is not None:
        yield (
            f"--vocab-parallel {found.treatment}, in place of the flag that asked for "
            f"{parallel.vocab_parallel}, runs the predicted job"
        )
    if parallel.pipeline.size > 1 and parallel.pipeline_schedule == DEFAULT_SCHEDULE:
        halves = config.model.num_layers % (2 * parallel.pipeline.size) == 0
        other = without_bubble(in_chunks=halves)
        yield f"--pipeline-schedule {other} does the same work in another order"
    if config.log.record_timeline is None:
        trace = Path("run.json").with_suffix(TRACE)
        yield (
            "--record-timeline run.json records each pass of the last iteration; ui.perfetto.dev "
            f"shows {trace}"
        )
