"""Curves have Megatron's names, and a point whenever one is due."""

from dataclasses import replace

import pytest
from training.metrics.made_records import ended, evaluation, interval, started, step

from megatron.run.records import RecordSettings
from megatron.training.metrics.curves import Bars, Curves, Point
from megatron.training.metrics.records import LayerFigures, RankFigures, Record

STEP = ["learning-rate", "batch-size", "lm loss", "grad-norm"]


def names(config: RecordSettings, record: Record) -> list[str]:
    return [point.curve for point in Curves(config, 2).points(record)]


def test_every_iteration_is_drawn_over_iterations_and_samples() -> None:
    points = list(Curves(RecordSettings(), 2).points(step(4)))
    assert points == [
        Point("learning-rate", 1e-3, True),
        Point("batch-size", 8, True),
        Point("lm loss", 9.6, True),
        Point("grad-norm", 1.5, True),
    ]


@pytest.mark.parametrize("record", [started(), interval(2), ended(2)])
def test_nothing_else_is_drawn_unless_asked_for(record: Record) -> None:
    assert not names(RecordSettings(), record)


def test_the_interval_of_the_curves() -> None:
    config = RecordSettings(tensorboard_log_interval=3)
    drawn = [n for n in range(1, 10) if names(config, step(n))]
    assert drawn == [3, 6, 9]


def test_what_only_some_runs_know_is_drawn_where_it_is_known() -> None:
    config = RecordSettings(log_world_size_to_tensorboard=True)
    assert set(names(config, step(1))) == {*STEP, "world-size"}
    more = step(1, num_zeros=3, params_norm=2.0)
    assert set(names(RecordSettings(), more)) == {*STEP, "num-zeros", "params-norm"}


def test_a_loss_scale_is_drawn_unless_it_is_not_wanted() -> None:
    scaled = step(1, loss_scale=1024.0)
    assert Point("loss-scale", 1024.0, True) in list(Curves(RecordSettings(), 2).points(scaled))
    assert names(RecordSettings(no_log_loss_scale_to_tensorboard=True), scaled) == STEP


def test_layers_with_experts_are_drawn_together_and_one_by_one() -> None:
    together = step(
        1,
        layer_losses={"load_balancing_loss": 1.5},
        expert_imbalance=2.0,
        busiest_layer=1,
        busiest_expert=3,
    )
    of_experts = [Point("load_balancing_loss", 1.5), Point("expert-imbalance", 2.0)]
    points = list(Curves(RecordSettings(), 2).points(together))
    assert [point for point in points if point.curve not in STEP] == of_experts
    layer = LayerFigures(1, {"load_balancing_loss": 1.25}, 2.0, 3)
    both = list(Curves(RecordSettings(), 2).points(replace(together, layers=(layer,))))
    assert [point for point in both if point not in points] == [
        Point("moe/load_balancing_loss_layer_1", 1.25),
        Point("moe/expert-imbalance_layer_1", 2.0),
    ]


def test_a_layer_has_one_chart_of_the_loads_of_all_experts() -> None:
    layers = LayerFigures(0, {"z_loss": 1.0}), LayerFigures(1, {}, 1.5, 2, (1, 0, 3))
    curves = Curves(RecordSettings(tensorboard_log_interval=2), 2)
    assert list(curves.bars(step(2, layers=layers))) == [Bars("moe/expert-load_layer_1", (1, 0, 3))]
    assert not list(curves.bars(step(3, layers=layers)))
    assert not list(curves.bars(interval(2, layers=layers)))


@pytest.mark.parametrize("dataset", ["validation", "test"])
def test_evaluations(dataset: str) -> None:
    record = evaluation(4, dataset=dataset)
    assert names(RecordSettings(), record) == [f"lm loss {dataset}"]
    with_ppl = RecordSettings(log_validation_ppl_to_tensorboard=True)
    assert names(with_ppl, record) == [f"lm loss {dataset}", f"lm loss {dataset} ppl"]


def test_times_and_idle_shares() -> None:
    curves = Curves(RecordSettings(log_timers_to_tensorboard=True), 2)
    assert curves.wants_ranks
    found = {point.curve: point.value for point in curves.points(interval(2))}
    assert found["iteration-time"] == 2.0
    assert found["throughput"] == 0.25
    assert found["idle"] == 0.25
    assert found["idle-max"] == 0.375
    without = {point.curve for point in curves.points(interval(2, ranks=()))}
    assert without == found.keys() - {"idle", "idle-max"}


def test_memory_is_that_of_the_rank_that_holds_the_most() -> None:
    curves = Curves(RecordSettings(log_memory_to_tensorboard=True), 2)
    assert curves.wants_ranks
    assert list(curves.points(interval(2))) == [Point("mem-max-resident-bytes", 3000)]
    gpus = (RankFigures(0, 5, 9), RankFigures(1, 7, 8))
    assert list(curves.points(interval(2, ranks=gpus))) == [
        Point("mem-max-allocated-bytes", 7),
        Point("mem-max-reserved-bytes", 9),
    ]
