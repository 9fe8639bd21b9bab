"""What the package wandb is asked for, by one that stands in for it and notes every call."""

import sys
from pathlib import Path
from typing import Any

import pytest
from training.metrics.made_records import (
    ended,
    evaluation,
    generated,
    interval,
    started,
    step,
)

from megatron.run.records import RecordSettings
from megatron.training.metrics.curves import Curves
from megatron.training.metrics.records import LayerFigures
from megatron.training.metrics.weights_and_biases import WeightsAndBiases
from megatron.training.rendezvous import UserError

FAKE = """
class Error(Exception):
    pass

class Histogram:
    def __init__(self, sequence=None, np_histogram=None, num_bins=64):
        self.counts, self.edges = np_histogram
        if len(self.counts) > 512 or len(self.edges) != len(self.counts) + 1:
            raise ValueError("not a histogram that this package takes")

class Table:
    def __init__(self, columns=None, data=None):
        self.columns, self.data = columns, data

class Run:
    def __init__(self):
        self.logged, self.exit_code, self.broken = [], None, False

    def log(self, data, step=None, commit=None):
        if self.broken:
            raise Error("gone")
        self.logged.append((step, data))

    def finish(self, exit_code=None):
        self.exit_code = exit_code

asked, runs, logged_in = [], [], True

def init(entity=None, project=None, dir=None, name=None, config=None):
    if not logged_in:
        raise Error("api_key not configured (no-tty)")
    asked.append(dict(entity=entity, project=project, dir=dir, name=name, config=config))
    runs.append(Run())
    return runs[-1]
"""


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package that stands in."""
    folder = tmp_path / "packages" / "wandb"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(FAKE)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb as found  # type: ignore[import-not-found,import-untyped,unused-ignore]  # made

    yield found
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


def sink(**changes: Any) -> WeightsAndBiases:
    config = RecordSettings(wandb_project="p", log_timers_to_tensorboard=True, **changes)
    return WeightsAndBiases(config, Curves(config, 2))


def test_a_run_with_its_configuration_and_curves(wandb: Any, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    made = sink(wandb_exp_name="n", wandb_entity="e", wandb_save_dir=folder)
    for record in (started(), step(1), step(2), interval(2), evaluation(2), ended(2)):
        made.write(record)
    made.close(failed=False)
    [asked] = wandb.asked
    assert (asked["project"], asked["name"], asked["entity"]) == ("p", "n", "e")
    assert (asked["dir"], folder.is_dir()) == (str(folder), True)
    assert asked["config"]["model"]["vocab_size"] == 61
    [run] = wandb.runs
    steps = [number for number, _ in run.logged]
    assert steps == sorted(steps) == [1, 2, 2, 2]
    assert run.logged[0][1] == {
        "learning-rate": 1e-3,
        "batch-size": 8,
        "lm loss": 9.9,
        "grad-norm": 1.5,
        "samples vs steps": 8,
    }
    assert run.logged[2][1]["iteration-time"] == 2.0
    assert run.logged[3][1] == {"lm loss validation": 2.0}
    assert run.exit_code == 0


@pytest.mark.parametrize(("experts", "bins"), [(3, 3), (512, 512), (1025, 342)])
def test_loads_of_experts_are_a_histogram_with_few_bins(
    wandb: Any, experts: int, bins: int
) -> None:
    made = sink()
    made.write(started())
    loads = tuple(range(1, experts + 1))
    made.write(step(1, layers=(LayerFigures(3, {}, 1.5, 2, loads),)))
    drawn = wandb.runs[0].logged[0][1]["moe/expert-load_layer_3"]
    assert len(drawn.counts) == bins
    assert sum(drawn.counts) == sum(loads)
    assert (drawn.edges[0], drawn.edges[-1]) == (0, experts)
    whole = zip(drawn.counts, drawn.edges, drawn.edges[1:], strict=False)
    assert all(count == sum(loads[begin:end]) for count, begin, end in whole)


def test_a_run_that_fails_says_so(wandb: Any) -> None:
    made = sink()
    made.write(started())
    made.close(failed=True)
    assert wandb.runs[0].exit_code == 1


def test_who_is_not_logged_in_is_told_what_to_do(wandb: Any) -> None:
    wandb.logged_in = False
    made = sink()
    with pytest.raises(UserError, match=r"^--wandb-project p: api_key .* wandb login"):
        made.write(started())
    made.close(failed=True)


def test_an_error_of_the_service_is_one_of_the_system(wandb: Any) -> None:
    made = sink()
    made.write(started())
    wandb.runs[0].broken = True
    with pytest.raises(OSError, match="gone"):
        made.write(step(1))


def test_texts_are_a_table(wandb: Any) -> None:
    config = RecordSettings(wandb_project="p")
    sink = WeightsAndBiases(config, Curves(config, 1))
    for record in (started(), generated(4)):
        sink.write(record)
    [(step_of_texts, points)] = wandb.runs[-1].logged
    assert step_of_texts == 4
    assert points["texts"].columns == ["prompt", "text"]
    assert points["texts"].data == [["Once\nupon", " a `time`"], ["", "mice\u200b"]]
