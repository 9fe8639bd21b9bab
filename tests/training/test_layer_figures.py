"""Figures of layers are put together from the sums of all ranks, and over iterations."""

import pytest
import torch

from megatron.optimizer.global_state import GlobalState
from megatron.runtime.layer_losses import Sums
from megatron.training.layer_figures import Imbalance, LayerFigures, LayerReport, mean_of

FIGURES = LayerFigures(places=((0, "a"), (2, "a"), (2, "b")), layers=(0, 2), depths=1)


def values(layer: int, losses: dict[str, float], load: list[int]) -> list[float]:
    """One rank's part of the further sums."""
    sums = Sums(
        {(layer, name): torch.tensor(loss) for name, loss in losses.items()},
        {layer: torch.tensor(load)},
    )
    losses_of_rank = FIGURES.joined(torch.tensor([5.0, 4.0]), sums)[1:]
    balance = FIGURES.imbalances(sums.loads, torch.device("cpu"))
    assert balance is not None
    return [*losses_of_rank.tolist(), *balance.tolist()]


def test_every_rank_adds_the_figures_of_its_layers() -> None:
    first, last = values(0, {"a": 1.0}, [3, 1]), values(2, {"a": 2.0, "b": 8.0}, [0, 6])
    total = GlobalState.of([10.0, 1.0, 8, 4, *first]) + GlobalState.of([0, 0, 0, 0, *last])
    depths, report = FIGURES.read(total)
    assert depths == (16.0,), "of both ranks, and half of the tokens count"
    assert report.losses == {(0, "a"): 2.0, (2, "a"): 4.0, (2, "b"): 16.0}
    assert report.mean_losses == {"a": 3.0, "b": 16.0}
    assert report.imbalances == (Imbalance(0, 0, 1.5), Imbalance(2, 1, 2.0))
    assert report.largest == Imbalance(2, 1, 2.0)


def test_the_load_of_every_expert_is_recorded_where_asked_for() -> None:
    figures = LayerFigures(layers=(1, 4), experts=3)
    ranks = [{4: torch.tensor([2**40 + 1, 0, 5])}, {1: torch.tensor([1, 2, 3])}, {}]
    parts = [figures.imbalances(loads, torch.device("cpu")) for loads in ranks]
    total = torch.stack([part for part in parts if part is not None]).sum(0).tolist()
    _, report = figures.read(GlobalState.of([1.0, 1.0, 8, 8, *total]))
    assert [own.loads for own in report.imbalances] == [(1, 2, 3), (2**40 + 1, 0, 5)]
    assert report.imbalances[0] == Imbalance(1, 2, 1.5, (1, 2, 3))
    twice = mean_of([report, LayerReport(imbalances=(Imbalance(1, 0, 3.0, (9, 0, 0)),) * 2)])
    assert twice.imbalances[0] == Imbalance(1, 0, 3.0, (10, 2, 3)), "loads of iterations add up"


def test_a_model_without_such_layers_adds_nothing() -> None:
    loss = torch.tensor([5.0])
    assert LayerFigures().joined(loss, Sums()) is loss
    assert LayerFigures().imbalances({}, loss.device) is None
    assert LayerFigures().read(GlobalState(1.0, 1.0)) == ((), LayerReport())
    assert LayerReport().largest is None


def test_an_interval_has_mean_losses_and_the_largest_imbalance_of_every_layer() -> None:
    reports = [
        LayerReport({(0, "a"): 1.0}, (Imbalance(0, 3, 1.5), Imbalance(1, 2, 1.25))),
        LayerReport({(0, "a"): 4.0}, (Imbalance(0, 1, 1.0), Imbalance(1, 0, 1.75))),
    ]
    together = mean_of(reports)
    assert together.losses == {(0, "a"): pytest.approx(2.5)}
    assert together.imbalances == (Imbalance(0, 3, 1.5), Imbalance(1, 0, 1.75))
    assert mean_of([]) == LayerReport()
