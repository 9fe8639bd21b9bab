"""Every sink gets every record, and one that fails is told once and does not end the run."""

import pytest
from training.metrics.made_records import interval, step

from megatron.training.metrics.log import Lines, Log
from megatron.training.metrics.log_line import iteration_line
from megatron.training.metrics.records import LayerFigures, Record, Sink


class Kept(Sink):
    """A sink that fails when told to, and keeps what it takes."""

    name = "--kept here"

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed: list[bool] = []
        self.full = False

    def write(self, record: Record) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.records.append(record)

    def close(self, failed: bool) -> None:
        self.closed.append(failed)


def test_a_failing_sink_is_told_once_and_gets_the_next_records() -> None:
    said: list[str] = []
    one, other = Kept(), Kept()
    log = Log(said.append, [one, other])
    log.write(step(1))
    one.full = True
    log.write(step(2))
    log.write(step(3))
    one.full = False
    log.write(step(4))
    assert one.records == [step(1), step(4)]
    assert other.records == [step(n) for n in (1, 2, 3, 4)]
    [line] = said
    assert line.startswith("--kept here: ")
    assert "No space left on device" in line


def test_loads_of_experts_are_printed_below_the_training_line_if_wanted() -> None:
    layers = LayerFigures(0, {"z_loss": 1.0}), LayerFigures(3, {}, 1.5, 2, (1, 0, 3))
    record = interval(2, layers=layers)
    said: list[str] = []
    Lines(said.append, with_loads=True).write(record)
    assert said == [iteration_line(record), " expert loads of layer 3 | 1 0 3 |"]
    Lines(said.append).write(record)
    assert said[2:] == [iteration_line(record)]


def test_megatrons_lines_are_printed_for_intervals_only() -> None:
    said: list[str] = []
    log = Log(said.append, [Lines(said.append)])
    for record in (step(1), step(2), interval(2)):
        log.write(record)
    assert said == [iteration_line(interval(2))]


def test_sinks_are_closed_once_and_learn_of_an_error() -> None:
    good, bad = Kept(), Kept()
    log = Log(print, [good])
    with log:
        pass
    log.close()
    log.close()
    assert good.closed == [False]
    with pytest.raises(KeyboardInterrupt), Log(print, [bad]):
        raise KeyboardInterrupt
    assert bad.closed == [True]


def test_ranks_are_asked_for_if_a_sink_has_a_use_for_them() -> None:
    one, other = Kept(), Kept()
    assert not Log(print, [one, other]).wants_ranks
    other.wants_ranks = True
    assert Log(print, [one, other]).wants_ranks
