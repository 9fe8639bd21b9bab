"""The values of the page of runs are those of the records."""

import json
from collections.abc import Sequence
from math import inf, isnan
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.commands.watching.page_data import POINTS, Axis, View, page_data
from megatron.commands.watching.record import number, record_of
from megatron.commands.watching.records_file import RecordsFile
from megatron.commands.watching.run import MOST_GENERATIONS, Run
from megatron.commands.watching.table import KEPT, MOST_COLUMNS, Table, thinned
from tools.watch_records import (
    EVENTS,
    evaluation,
    generation,
    interval,
    plainly_read,
    record,
    start,
    write,
)


def file_of(path: Path) -> RecordsFile:
    found = RecordsFile(path, path.name)
    found.read_all()
    return found


def data_of(path: Path, view: View | None = None) -> dict[str, Any]:
    return page_data(list(file_of(path).runs.values()), view or View())


def curve(data: dict[str, Any], run: int, chart: str, label: str = "") -> dict[int, float]:
    [found] = [own for own in data["runs"][run]["curves"][chart] if own["label"] == label]
    return dict(zip(found["iteration"], found["y"], strict=True))


@given(st.lists(EVENTS, max_size=40))
def test_curves_are_those_of_another_way_to_read(records: Sequence[dict[str, Any]]) -> None:
    runs = {key: Run("", key) for key in dict.fromkeys(own["run"] for own in records)}
    for own in records:
        runs[own["run"]].take(own)
    data = page_data(list(runs.values()), View())
    for chart_label, event in (("training", "iterations"), ("validation", "evaluation")):
        expected = plainly_read(records, event, "lm_loss")
        for index, key in enumerate(runs):
            curves = data["runs"][index]["curves"].get("loss", [])
            shown = {
                own["label"]: dict(zip(own["iteration"], own["y"], strict=True)) for own in curves
            }
            assert shown.get(chart_label, {}) == expected[key]


def test_every_figure_of_a_record_is_on_the_page(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "loss_scale": 1024.0, "params_norm": 7.0, "num_zeros": 5, "mtp_losses": [3.0, 4.0],
        "layer_losses": {"z_loss": 0.5}, "expert_imbalance": 1.5, "skipped": 2, "nans": 1,
        "global_batch_size": 32, "seconds_in_saves": 3.0,
        "layers": [{"layer": 2, "expert_loads": [1, 3]}],
    }  # fmt: skip
    path = write(tmp_path / "r.jsonl", start(), interval(5), interval(10, **more), evaluation(10))
    data = data_of(path)
    last = {
        (chart, own["label"]): own["y"][-1]
        for chart, curves in data["runs"][0]["curves"].items()
        for own in curves
    }
    assert last == {
        ("loss", "training"): 9.0,
        ("loss", "validation"): 10.0,
        ("further", "token 2"): 3.0,
        ("further", "token 3"): 4.0,
        ("rate", ""): 1e-3,
        ("norm", ""): 1.5,
        ("seconds", ""): 2.0,
        ("speed", ""): 512.0,
        ("mfu", ""): 0.5,
        ("idle", "mean of the ranks"): 0.375,
        ("idle", "idlest and busiest rank"): 0.25,
        ("reasons", "stages"): 0.3125,
        ("reasons", "vocabulary"): 0.0625,
        ("slowest", ""): 1.25,
        ("memory", "fullest rank"): 3 << 30,
        ("memory", "emptiest rank"): 1 << 30,
        ("skipped", "skipped"): 2,
        ("skipped", "loss not finite"): 1,
        ("batch", ""): 32,
        ("weights", ""): 7.0,
        ("zeros", ""): 5,
        ("router", "z_loss"): 0.5,
        ("balance", ""): 1.5,
    }
    [own] = data["runs"]
    assert own["newest"]["loss_scale"] == 1024.0  # one value is no curve worth a chart
    assert own["layers"] == [{"layer": 2, "experts": 2, "loads": [0.5, 1.5]}]
    assert [bar["peak_memory"] for bar in own["ranks"]] == [1 << 30, 3 << 30]
    assert own["ranks"][1]["reasons"] == {"stages": 0.5, "vocabulary": 0.0}
    assert [bar["slowness"] for bar in own["ranks"]] == [1.25, None]
    assert own["busiest"] == {"rank": 0, "share": 1.0}
    assert own["totals"] == {"skipped": 2, "nans": 1}
    assert own["facts"]["layout"] == {"pipeline": 2}
    assert own["facts"]["train_iters"] == 100


def test_the_layout_of_a_record_of_an_earlier_version(tmp_path: Path) -> None:
    sizes = {"pipeline_size": 4, "tensor_size": 2, "context_size": 1, "replicas": {"size": 3}}
    path = write(tmp_path / "r.jsonl", start(config={"parallel": sizes}), interval(5))
    [own] = data_of(path)["runs"]
    assert own["facts"]["layout"] == {"pipeline": 4, "tensor": 2, "replicas": 3}


def test_the_plan_of_a_record_of_an_earlier_version(tmp_path: Path) -> None:
    names = {"pipeline_schedule": "zb-v", "vocab_parallel": "vocab-1"}
    path = write(tmp_path / "r.jsonl", start(config={"parallel": names}), interval(5))
    [own] = data_of(path)["runs"]
    assert {name: own["facts"][name] for name in names} == names


def test_all_axes_have_the_same_points(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", start(), interval(5), interval(10), evaluation(10))
    for axis in get_args(Axis):
        [training, validation] = data_of(path, View(axis=axis))["runs"][0]["curves"]["loss"]
        assert training["iteration"] == [5, 10]
        assert training["tokens"] == [5 * 1024, 10 * 1024]
        assert training["hours"] == pytest.approx([50 / 3600, 100 / 3600], abs=1e-6)
        assert validation["tokens"] == [10 * 1024]


def test_a_restart_is_marked_and_what_it_repeats_counts(tmp_path: Path) -> None:
    first = [start(), interval(5), evaluation(5), interval(10), evaluation(10), interval(15)]
    again = [start(5), interval(10, lm_loss=2.0), record("end", 10)]
    [run] = data_of(write(tmp_path / "r.jsonl", *first, *again))["runs"]
    assert run["restarts"] == [{"iteration": 5, "reached": 15, "hours": pytest.approx(50 / 3600)}]
    assert (run["starts"], run["iteration"], run["has_ended"]) == (2, 10, True)
    assert run["curves"]["loss"][0]["y"] == [9.5, 2.0]
    assert run["curves"]["loss"][1]["iteration"] == [5]


def test_texts_are_shown_newest_first_and_once(tmp_path: Path) -> None:
    first = [start(), generation(5), generation(10), generation(15)]
    again = [start(10), generation(15, texts=[{"prompt": "a", "text": "b"}]), generation(20)]
    [run] = data_of(write(tmp_path / "r.jsonl", *first, *again))["runs"]
    assert [own["iteration"] for own in run["written"]] == [20, 15, 10, 5]
    assert run["written"][1]["texts"] == [{"prompt": "a", "text": "b"}]
    assert run["written"][3]["texts"] == [
        {"prompt": "Once upon", "text": " a time 5"},
        {"prompt": "", "text": "3 mice\n"},
    ]


def test_only_so_many_texts_are_kept(tmp_path: Path) -> None:
    long = [{"prompt": "p" * 10**4, "text": "t" * 10**4}] * 100
    made = [generation(at, texts=long) for at in range(1, MOST_GENERATIONS + 10)]
    [run] = data_of(write(tmp_path / "r.jsonl", start(), *made))["runs"]
    assert len(run["written"]) == MOST_GENERATIONS
    assert run["written"][0]["iteration"] == MOST_GENERATIONS + 9
    assert len(json.dumps(run["written"])) < 4e6


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400),
    st.integers(1, 20),
    st.floats(0, 0.8),
    st.floats(0.1, 1),
)
def test_thinning_keeps_first_last_least_and_greatest(
    values: list[float], columns: int, left: float, width: float
) -> None:
    x, y = np.arange(len(values), dtype=np.float64), np.array(values)
    low, high = left * len(values), (left + width) * len(values)
    kept = thinned(x, y, low, high, columns)
    assert len(kept) <= KEPT * columns
    assert (np.diff(kept) > 0).all()
    seen = np.flatnonzero((x >= low) & (x <= high))
    if len(seen):
        around = range(max(0, seen[0] - 1), min(len(values), seen[-1] + 2))
        assert set(kept) <= set(around)
        assert {around[0], around[-1]} <= set(kept)
        assert y[kept].min() == y[around].min()
        assert y[kept].max() == y[around].max()


def test_a_million_records_are_thinned_to_the_bound() -> None:
    run, count = Run("", ""), 1_000_000
    losses = np.random.default_rng(1).normal(size=count)
    for iteration, loss in enumerate(losses.tolist(), 1):
        run.intervals.put(iteration, {"lm_loss": loss})
    [shown] = page_data([run], View())["runs"][0]["curves"]["loss"]
    assert len(shown["y"]) <= POINTS
    assert shown["count"] == count
    assert (min(shown["y"]), max(shown["y"])) == (losses.min(), losses.max())
    assert (shown["iteration"][0], shown["iteration"][-1]) == (1, count)
    assert all(losses[at - 1] == y for at, y in zip(shown["iteration"], shown["y"], strict=True))
    [near] = page_data([run], View(low=500_000, high=500_100))["runs"][0]["curves"]["loss"]
    assert near["iteration"] == list(range(499_999, 500_102))


def test_values_without_a_number_leave_gaps(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    huge = "9" * 400
    values = ["NaN", "null", "1e999", "true", '"5"', huge, "{}", "-Infinity", "2.5"]
    text = [json.dumps(interval(at, lm_loss="?")).replace('"?"', v) for at, v in enumerate(values)]
    path.write_text("".join(f"{own}\n" for own in [json.dumps(start()), *text]))
    assert curve(data_of(path), 0, "loss", "training") == {8: 2.5}
    assert json.dumps(data_of(path), allow_nan=False)
    assert isnan(number(10**400))
    assert isnan(number(inf))


def test_strange_types_everywhere_are_survived(tmp_path: Path) -> None:
    strange: list[Any] = [None, 3, "x", [], {}, [None, 3, [], {"rank": []}], {"a": {"b": []}}, True]
    records = [start(), interval(1)]
    for value in strange:
        for made in (start(), interval(2), evaluation(2), generation(2)):
            names = [own for own in made if own not in ("event", "iteration")]
            records += [{**made, name: value} for name in names]
            records.append({**made, "config": {"model": value, "parallel": value}, "layers": value})
            records.append({**made, "layers": [{"layer": value, "expert_loads": value}]})
            records.append({**made, "mtp_losses": value, "layer_losses": value})
            records.append({**made, "slowest": {"rank": 3, "slowness": 2.0, "tensor": value}})
            records.append({**made, "slowest": {"rank": value, "slowness": value}})
            records.append({**made, "ranks": [{"idle": value, "idle_by_reason": value}]})
    data = data_of(write(tmp_path / "r.jsonl", *records))
    assert json.dumps(data, allow_nan=False)


def slow(iteration: int, rank: int, slowness: float, **values: Any) -> dict[str, Any]:
    place = {"pipeline": rank // 2, "tensor": rank % 2, "context": 0, "data": 0}
    return interval(
        iteration, slowest={"rank": rank, "slowness": slowness, **place, "passes": "B"}, **values
    )


def test_the_ranks_that_are_slowest_most_often_are_named_first(tmp_path: Path) -> None:
    rows = [(3, 1.5), (1, 1.01), (3, 1.25), (0, 1.02), (3, 2.0), (1, 1.03)]
    records = [slow(at, rank, slowness) for at, (rank, slowness) in enumerate(rows, 1)]
    [run] = data_of(write(tmp_path / "r.jsonl", start(), *records, interval(7, slowest=None)))[
        "runs"
    ]
    assert [own["y"] for own in run["curves"]["slowest"]] == [[1.5, 1.01, 1.25, 1.02, 2.0, 1.03]]
    assert [(own["rank"], own["share"]) for own in run["slowest"]] == [
        (3, 3 / 6),
        (1, 2 / 6),
        (0, 1 / 6),
    ]
    assert run["slowest"][0] == {
        "rank": 3,
        "share": 0.5,
        "slowness": 1.5,
        "place": {"pipeline": 1, "tensor": 1, "context": 0, "data": 0},
        "passes": "B",
    }


def test_records_of_an_earlier_version_name_no_slowest_rank(tmp_path: Path) -> None:
    earlier = {key: own for key, own in interval(5).items() if key != "slowest"}
    data = data_of(write(tmp_path / "r.jsonl", start(), earlier))
    assert data["runs"][0]["slowest"] == []
    assert "slowest" not in {chart["name"] for chart in data["charts"]}


def test_many_ranks_share_bars(tmp_path: Path) -> None:
    ranks = [{"rank": at, "peak_memory": at, "idle": at / 2000} for at in range(1000)]
    [run] = data_of(write(tmp_path / "r.jsonl", start(), interval(1, ranks=ranks)))["runs"]
    assert [(own["first"], own["last"]) for own in run["ranks"][:2]] == [(0, 1), (2, 3)]
    assert run["ranks"][-1]["peak_memory"] == 999
    assert run["ranks"][1]["least_idle"] == 2 / 2000
    assert run["newest"]["busiest rank"] == 0


def test_a_table_keeps_the_later_of_two_rows() -> None:
    table = Table()
    for iteration, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 4.0)):
        table.put(iteration, {"x": value})
    table.put(5, {"y": 1.0})
    assert list(table.iterations) == [1, 2, 5]
    assert table.numbers("x")[:2].tolist() == [1.0, 4.0]
    assert isnan(table.newest("x"))
    assert np.isnan(table.numbers("y")[:2]).all()


def test_a_table_has_a_bounded_number_of_columns() -> None:
    table = Table()
    for iteration in range(MOST_COLUMNS + 5):
        table.put(iteration, {f"name {iteration}": 1.0})
    assert table.names == [f"name {at}" for at in range(MOST_COLUMNS)]
    assert len(table.numbers("name 0")) == MOST_COLUMNS + 5


def test_a_line_of_a_record_is_read_as_json_reads_it() -> None:
    made = interval(7)
    assert record_of(json.dumps(made).encode()) == made
