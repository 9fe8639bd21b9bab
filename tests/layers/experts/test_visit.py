"""Tokens visit the ranks of their experts once each, and the sums of their rows come home."""

from dataclasses import dataclass

import pytest
import torch
from harness.rank_pool import RankPool
from layers.experts.test_route import CHOICES, EXPERTS, KERNELS, WIDTH, groups_of, tokens_of
from parallel.deep_ep_stand_in import Buffer, WideBuffer, installed
from torch import Tensor

from megatron.layers.experts.route import Route
from megatron.layers.experts.router import Choice
from megatron.layers.experts.visit import at_the_experts
from megatron.parallel.deep_ep import VisitedExperts, make_buffer
from megatron.parallel.grid import Grid

GRIDS = [Grid(data_size=4, expert_size=4), Grid(data_size=2, context_size=2, expert_size=2)]


@dataclass
class Visit:
    """What came home to a rank's tokens, with the gradients of tokens and of weights.

    ``rows`` are the rows that have visited the rank, and ``of_experts`` its slots.
    """

    sums: Tensor
    of_tokens: Tensor
    of_weights: Tensor
    rows: int
    of_experts: list[int]


def visit_all(rank: int, world_size: int, *, grid: Grid) -> dict[str, Visit]:
    groups = groups_of(rank, grid)
    with installed(WideBuffer) as calls:
        buffer = make_buffer(groups.experts, WIDTH, multiprocessors=24)
        assert Buffer.num_sms == 24
        ranks = VisitedExperts(groups.experts, groups.expert_gradients, buffer)
        return {choices: visit(rank, ranks, choices, calls) for choices in CHOICES}


def visit(
    rank: int, ranks: VisitedExperts, choices: str, calls: list[tuple[str, int, bool]]
) -> Visit:
    """Expert e, counted from 1, returns e times its token; the weights multiply."""
    calls.clear()
    x_buh, experts_buk, weights = inputs_of(rank, choices)
    kept_buk = experts_buk >= 0 if "dropped" in choices else None
    found: list[int] = []

    def run(x_1rh: Tensor, weights_1rk: Tensor, route: Route) -> Tensor:
        ends = route.ends.tolist()
        found.extend(b - a for a, b in zip([0, *ends], ends, strict=False))
        own = ranks.own_experts(EXPERTS)
        numbers_z = torch.tensor(own).repeat_interleave(torch.tensor(found)) + 1
        token_z = route.choices // weights_1rk.shape[2]
        of_slots = weights_1rk.flatten()[route.choices] * numbers_z
        rows = x_1rh[0, token_z]
        assert torch.equal(rows, route.dispatch(x_1rh.detach()))
        sums = torch.zeros_like(x_1rh[0]).index_add(0, token_z, rows * of_slots.unsqueeze(-1))
        return sums.unsqueeze(0)

    choice = Choice(experts_buk.clamp(min=0), weights, kept_buk)
    y_buh = at_the_experts(run, x_buh, choice, EXPERTS, ranks, KERNELS, host_knows=True)
    y_buh.square().sum().backward()
    assert x_buh.grad is not None
    assert weights.grad is not None
    kinds = [("dispatch", True), ("combine", False), ("dispatch again", False), ("combine", True)]
    assert [(kind, weighs) for kind, _, weighs in calls] == kinds
    [rows] = {count for _, count, _ in calls}
    return Visit(y_buh.detach(), x_buh.grad, weights.grad, rows, found)


def inputs_of(rank: int, choices: str) -> tuple[Tensor, Tensor, Tensor]:
    x_buh, experts_buk, weights = tokens_of(rank, choices)
    return x_buh.float().requires_grad_(), experts_buk, weights.float().requires_grad_()


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"e{grid.expert_size}")
def test_a_token_visits_a_rank_once_and_its_sums_come_home(grid: Grid, ranks: RankPool) -> None:
    by_rank: list[dict[str, Visit]] = ranks.run(visit_all, 4, grid=grid)
    each = EXPERTS // grid.expert_size
    for choices in CHOICES:
        for rank, visits in enumerate(by_rank):
            found = visits[choices]
            x_buh, experts_buk, weights = inputs_of(rank, choices)
            of_choices = weights * (experts_buk + 1)
            y_buh = x_buh * of_choices.sum(-1, keepdim=True)
            y_buh.square().sum().backward()
            torch.testing.assert_close(found.sums, y_buh.detach())
            torch.testing.assert_close(found.of_tokens, x_buh.grad)
            kept = experts_buk >= 0
            assert weights.grad is not None
            torch.testing.assert_close(found.of_weights * kept, weights.grad * kept)
            assert not (found.of_weights * ~kept).any()
            first = rank // grid.expert_size * grid.expert_size
            others = [
                tokens_of(other, choices)[1] for other in range(first, first + grid.expert_size)
            ]
            own = range((rank - first) * each, (rank - first + 1) * each)
            here = [(chosen >= own.start) & (chosen < own.stop) for chosen in others]
            assert found.rows == sum(int(is_here.any(-1).sum()) for is_here in here)
            assert found.of_experts == [
                sum(int((chosen == expert).sum()) for chosen in others) for expert in own
            ]
