"""Times are those of the iterations, whenever their losses become known, and nothing is lost."""

import dataclasses
import math
import re

import pytest
import torch
from correctness.rank_runs import CPU, ListLoader
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.layers.main_grad import main_grad_of
from megatron.parallel.groups import single_rank
from megatron.run.run_config import RunConfig
from megatron.runtime.observer import NamedRanges
from megatron.runtime.timeline import Recorder
from megatron.training.iteration import run_iteration
from megatron.training.metrics import meter as meter_module
from megatron.training.metrics.log import Lines, Log
from megatron.training.metrics.meter import Meter
from megatron.training.metrics.records import Interval, Record, Started, Step, now
from megatron.training.metrics.stragglers import Stragglers
from megatron.training.post_validated_step import make_train_step
from megatron.training.setup import TrainState, build_train_state
from megatron.training.step import Finished, SynchronousTrainStep

JOB = Job(GPTOptions(num_layers=2, vocab_size=8, tie_embeddings=False), microbatches=2)


class Clock:
    """Stands in for the ``time`` module; moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(meter_module, "time", made)
    return made


def config(log_interval: int, post_validation: bool) -> RunConfig:
    made = JOB.config(Layout(1, "none"))
    return dataclasses.replace(
        made,
        log=dataclasses.replace(made.log, log_interval=log_interval),
        optimizer=dataclasses.replace(made.optimizer, post_validation=post_validation),
    )


@pytest.fixture(scope="module")
def state() -> TrainState:
    return build_train_state(config(1, post_validation=True), single_rank(CPU))


def finished(number: int, step_redone: bool = False) -> Finished:
    return Finished(number, float(number), 1.0, 2 * number + 2, step_redone)


def started(config: RunConfig, consumed_samples: int = 0) -> Started:
    flops = 10**12 * config.train.global_batch_size
    return Started(now(), 0, consumed_samples, 4, 1, 1, flops, 1.0, config)


def make_meter(state: TrainState, log_interval: int) -> tuple[Meter, list[str]]:
    said: list[str] = []

    log = Log(said.append, [Lines(said.append)])
    return Meter(started(config(log_interval, True)), state.groups, log), said


def milliseconds(said: list[str]) -> list[float]:
    return [float(found) for found in re.findall(r"\(ms\): ([\d.]+)", "\n".join(said))]


@pytest.mark.parametrize("late", [False, True])
def test_times_do_not_depend_on_when_losses_are_known(
    late: bool, state: TrainState, clock: Clock
) -> None:
    """Iterations of 1, 2, 3 and 4 s, with a pause of 10 s after each."""
    meter, said = make_meter(state, 2)
    for number in range(4):
        clock.now += 1.0 + number
        meter.ended(number)
        if late and number > 0:
            meter.report(finished(number - 1))
        if not late:
            meter.report(finished(number))
        with meter.paused():
            clock.now += 10.0
    meter.report(finished(3) if late else None)
    assert milliseconds(said) == [1500.0, 3500.0]


def test_line_tells_the_iteration_that_is_final(state: TrainState, clock: Clock) -> None:
    meter, said = make_meter(state, 2)
    for number in range(3):
        clock.now += 1.0
        meter.ended(number)
        meter.report(finished(number - 1) if number else None)
    [line] = [line for line in said if "iteration " in line and "lm loss" in line]
    assert "iteration        2/" in line
    assert "consumed samples:            4 " in line
    assert "lm loss: 5.000000E-01" in line


@pytest.mark.parametrize(("iterations", "lines"), [(2, 1), (3, 2), (1, 1), (0, 0)])
def test_the_end_of_a_run_tells_the_iterations_that_fill_no_interval(
    iterations: int, lines: int, state: TrainState, clock: Clock
) -> None:
    """The last line is of the last iteration, with the loss and the time of what is left."""
    meter, said = make_meter(state, 2)
    for number in range(iterations):
        clock.now += 1.0 + number
        meter.ended(number)
        meter.report(finished(number))
    for _ in range(2):
        meter.report_rest()
    told = [line for line in said if "lm loss" in line]
    assert len(told) == lines
    if iterations % 2:
        assert f"iteration        {iterations}/" in told[-1]
        assert f"lm loss: {iterations - 1.0:.6E}" in told[-1]
        assert milliseconds(said)[-1] == 1000.0 * iterations


def test_speed_and_batch_size_follow_batches_that_grow(state: TrainState, clock: Clock) -> None:
    meter, said = make_meter(state, 2)
    for number, consumed in enumerate((2, 6)):  # of 2 and of 4 samples, 1 s each
        clock.now += 1.0
        meter.ended(number)
        meter.report(Finished(number, 1.0, 1.0, consumed))
    assert "global batch size:     4 |" in said[0]
    assert "(TFLOP/s/GPU): 3.000 |" in said[0]


def test_wrong_guesses_are_counted(state: TrainState, clock: Clock) -> None:
    meter, said = make_meter(state, 10)
    for number in range(5):
        meter.ended(number)
        meter.report(finished(number, step_redone=number in (1, 3)))
    meter.report_post_validation()
    assert said == ["optimizer post-validation: 2 of 5 steps redone"]


def test_a_single_rank_does_not_guess(state: TrainState) -> None:
    made = config(1, post_validation=True)
    step = make_train_step(made.optimizer, state)
    assert isinstance(step, SynchronousTrainStep)
    loader = ListLoader(JOB.batches())
    for number in range(2):
        result = run_iteration(step, made.optimizer, loader, state.groups, number)
        assert result is not None
        assert (result.number, result.consumed_samples) == (number, 2 * number + 2)
    assert step.settle() is None  # type: ignore[func-returns-value]  # what is checked
    grads = [main_grad_of(entry.parameter) for entry in state.parameters]
    assert not torch.cat([grad.flatten() for grad in grads]).any()


def test_idle_time_comes_from_one_recorder_of_an_iteration(state: TrainState) -> None:
    """Its own, or that of somebody else; and only where a record is due."""
    meter = Meter(started(config(2, True), 2), state.groups, Log(print), Stragglers(state))
    theirs, names = Recorder(0, CPU), NamedRanges(CPU)
    assert isinstance(meter.observer(1, None), Recorder)
    assert meter.observer(1, theirs) is theirs
    assert meter.observer(1, names) is names
    assert meter.observer(0, None) is None
    assert meter.observer(0, names) is names
    plain, _ = make_meter(state, 2)
    assert plain.observer(1, None) is None, "nobody asks for figures of ranks"


def test_an_iteration_without_a_step_is_in_no_curve(state: TrainState, clock: Clock) -> None:
    """Its loss is none, or not finite."""
    taken: list[Record] = []

    class Kept(Lines):
        def write(self, record: Record) -> None:
            taken.append(record)

    log = Log(lambda text: None, [Kept(lambda text: None)])
    meter = Meter(started(config(2, False)), state.groups, log)
    for made in (finished(0), dataclasses.replace(finished(1), loss=math.nan, is_skipped=True)):
        clock.now += 1.0
        meter.ended(made.number)
        meter.report(made)
    step, interval = taken
    assert isinstance(step, Step)
    assert step.iteration == 1
    assert isinstance(interval, Interval)
    assert (interval.lm_loss, interval.skipped, interval.nans) == (0.0, 1, 1)
