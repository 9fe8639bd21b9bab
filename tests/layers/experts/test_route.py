"""Tokens reach the slots of their experts on other ranks, and what comes back is summed at home.

Each row is told apart by its values, so that the test knows where every slot came from.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from correctness.rank_runs import CPU
from harness.rank_pool import RankPool
from torch import Tensor

from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.experts.route import route_of
from megatron.parallel import collectives
from megatron.parallel.experts import ExpertParallel, spread_experts
from megatron.parallel.grid import Grid
from megatron.parallel.groups import ConnectedAxis, Groups, connect_grid
from megatron.parallel.settings import Dispatcher

KERNELS = ReferenceKernels()
EXPERTS, WIDTH, BATCH, LENGTH = 8, 3, 2, 4
DISPATCHERS: tuple[Dispatcher, ...] = ("allgather", "alltoall")
CHOICES = ("random", "one expert", "first rank only", "some dropped", "all dropped")


def groups_of(rank: int, grid: Grid) -> Groups:
    def connect(use: str, tiling: Any) -> Any:
        own = [dist.new_group(list(ranks)) for ranks in tiling]
        return next((g for g, ranks in zip(own, tiling, strict=True) if rank in ranks), None)

    return connect_grid(grid, rank, CPU, (0, 0), connect)


def tokens_of(rank: int, choices: str) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of a rank, the experts that they choose, and the weights of their choices.

    A dropped choice is of the expert with the number -1, and its weight is 0.
    """
    generator = torch.Generator().manual_seed(rank)
    x_buh = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    open_to = {"one expert": 1, "first rank only": 2}.get(choices, EXPERTS)
    topk = 1 if open_to == 1 else 2
    scores = torch.rand(BATCH, LENGTH, open_to, generator=generator)
    first = EXPERTS - 1 if choices == "one expert" else 0
    experts_buk = scores.topk(topk).indices + first
    weights = torch.randn(BATCH, LENGTH, topk, generator=generator, dtype=torch.float64)
    if "dropped" in choices:
        is_kept = torch.rand(experts_buk.shape, generator=generator) < 0.6
        is_kept &= choices == "some dropped"
        experts_buk, weights = experts_buk.where(is_kept, -1), weights * is_kept
    return x_buh, experts_buk, weights


@dataclass
class Visit:
    """What came to a rank: slots of its experts, their weights, and what came home to its tokens.

    ``sent`` are the bytes that it has sent in every exchange, by place (``Sent``).
    """

    experts: range
    slots: list[Tensor]
    weights: list[Tensor]
    combined: Tensor
    of_weights: Tensor
    sent: list[list[int]]


Visits = dict[tuple[Dispatcher, str], Visit]


def visit_all(rank: int, world_size: int, *, grid: Grid) -> Visits:
    """Dispatch and combine a rank's tokens, for every choice and both dispatchers.

    Where no expert is on another rank, dropped choices keep their slots and are left out here.
    """
    groups = groups_of(rank, grid)
    axes = groups.experts, groups.expert_tensor, groups.expert_gradients
    return {
        (dispatcher, choices): visit(rank, spread_experts(*axes, dispatcher), choices)
        for dispatcher in DISPATCHERS
        for choices in CHOICES
        if grid.expert_size > 1 or "dropped" not in choices
    }


class Sent:
    """Watches a rank: the bytes that it sends to every place of an axis, exchange by exchange.

    An axis of one rank has no exchange. A rank's part for itself counts as if it were sent.
    """

    def __init__(self) -> None:
        self.to_places: list[list[int]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every way in which rows of experts travel."""
        with ExitStack() as stack:
            for name in ("all_gather", "all_to_all", "gather_parts", "reduce_scatter"):
                own = partial(self._watched, name, getattr(collectives, name))
                stack.enter_context(patch.object(collectives, name, own))
            yield

    def _watched(self, name: str, run: Any, rows: Tensor, axis: ConnectedAxis, *sizes: Any) -> Any:
        whole, size = rows.numel() * rows.element_size(), axis.size
        if name == "all_gather":
            parts = [whole] * size
        elif sizes:
            total = sum(sizes[0])
            parts = [whole // total * count if total else 0 for count in sizes[0]]
        else:
            parts = [whole // size] * size
        if name == "gather_parts":
            parts = [parts[axis.rank]] * size
        if size > 1:
            self.to_places.append(parts)
        return run(rows, axis, *sizes)


def visit(rank: int, ranks: ExpertParallel, choices: str) -> Visit:
    """Dispatch tokens; combine the squares of the slots, times the numbers of their experts."""
    sent = Sent()
    with sent.watching():
        x_buh, experts_buk, weights = tokens_of(rank, choices)
        kept_buk = experts_buk >= 0 if "dropped" in choices else None
        route = route_of(experts_buk.clamp(min=0), EXPERTS, ranks, KERNELS, kept_buk)
        slots, brought = route.dispatch(x_buh), route.bring_weights(weights)
        of_slots = brought[route.choices]
        own, ends = ranks.own_experts(EXPERTS), route.ends.tolist()
        bounds = list(zip([0, *ends], ends, strict=False))
        numbers = torch.cat(
            [torch.full((b - a, 1), float(e + 1)) for e, (a, b) in zip(own, bounds, strict=True)]
        )
        combined = route.combine(slots**2 * numbers / ranks.tensor_size)
        returned = torch.zeros_like(brought)
        returned[route.choices] = of_slots / ranks.tensor_size
        of_weights = route.return_weights(returned)
    return Visit(
        own,
        [slots[a:b] for a, b in bounds],
        [of_slots[a:b] for a, b in bounds],
        combined,
        of_weights,
        sent.to_places,
    )


def rows_in_any_order(rows: Tensor) -> list[list[float]]:
    return sorted(rows.reshape(len(rows), WIDTH if rows.dim() > 1 else 1).tolist())


GRIDS = [
    Grid(data_size=4, expert_size=2),
    Grid(data_size=4, expert_size=4),
    Grid(data_size=4, expert_size=2, given_expert_tensor_size=2),
    Grid(data_size=4, expert_size=1, given_expert_tensor_size=4),
    Grid(data_size=2, context_size=2, expert_size=4),
]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"e{grid.expert_size}-{grid.expert_block}")
def test_every_choice_has_a_slot_on_each_rank_of_its_expert(grid: Grid, ranks: RankPool) -> None:
    by_rank: list[Visits] = ranks.run(visit_all, 4, grid=grid)
    for at in range(0, 4, grid.expert_block):
        block = range(at, at + grid.expert_block)
        for dispatcher, choices in by_rank[0]:
            tokens = [tokens_of(rank, choices) for rank in block]
            for rank in block:
                check(by_rank[rank][dispatcher, choices], tokens, tokens_of(rank, choices))


def check(
    own: Visit, tokens: list[tuple[Tensor, Tensor, Tensor]], at_home: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Check what came to a rank from the ranks with ``tokens``, and what came home to its own."""
    for place, expert in enumerate(own.experts):
        rows = torch.cat([x_buh[(chosen == expert).any(-1)] for x_buh, chosen, _ in tokens])
        numbers = torch.cat([weights[chosen == expert] for _, chosen, weights in tokens])
        assert rows_in_any_order(own.slots[place]) == rows_in_any_order(rows)
        assert rows_in_any_order(own.weights[place]) == rows_in_any_order(numbers)
    x_buh, experts_buk, weights = at_home
    wanted = x_buh**2 * (experts_buk + 1).sum(-1, keepdim=True)
    torch.testing.assert_close(own.combined, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.of_weights, weights, rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class Said:
    """What routing says about the bytes that a rank of four sends, from the ranks' choices.

    Ranks are numbered as etp x e, of which the number in etp changes fastest.

    Attributes:
        rank: of which.
        e: ranks over which experts are spread.
        etp: ranks that share an expert.
        chosen: the experts that the tokens of each rank choose; -1: dropped.
    """

    rank: int
    e: int
    etp: int
    chosen: list[Tensor]

    def rows(self, of_rank: int, to_place: int) -> int:
        """Choices of a rank whose experts are at a place of the axis of experts."""
        own = EXPERTS // self.e
        experts = self.chosen[of_rank]
        return int(((experts >= to_place * own) & (experts < (to_place + 1) * own)).sum())

    def exchanged(self, width: int) -> list[list[int]]:
        """With ``alltoall``, rows of ``width`` bytes, to every place of each axis."""
        there = [width * self.rows(self.rank, place) for place in range(self.e)]
        return [there, [self._arrived(width)[self.rank % self.etp]] * self.etp][: self._axes]

    def brought_home(self, width: int) -> list[list[int]]:
        """The way back of ``exchanged``."""
        own, tensor_rank = self.rank // self.etp, self.rank % self.etp
        back = [width * self.rows(place * self.etp + tensor_rank, own) for place in range(self.e)]
        return [self._arrived(width), back][-self._axes :]

    def gathered(self, width: int) -> list[list[int]]:
        """With ``allgather``, ``width`` bytes of every rank, to every place of each axis."""
        return [[width] * self.e, [self.e * width] * self.etp][: self._axes]

    @property
    def _axes(self) -> int:
        return 1 + (self.etp > 1)

    def _arrived(self, width: int) -> list[int]:
        """Bytes for this rank's experts that come over each of the ranks that share them."""
        own = self.rank // self.etp
        return [
            width * sum(self.rows(place * self.etp + shared, own) for place in range(self.e))
            for shared in range(self.etp)
        ]


@pytest.mark.parametrize(("e", "etp"), [(4, 1), (2, 2)])
def test_an_exchange_sends_what_routing_says(e: int, etp: int, ranks: RankPool) -> None:
    """First choices are gathered or numbers of rows are told; then tokens and weights travel."""
    grid = Grid(data_size=4, expert_size=e, given_expert_tensor_size=etp)
    by_rank: list[Visits] = ranks.run(visit_all, 4, grid=grid)
    row, number = WIDTH * 8, 8
    for choices in CHOICES:
        chosen = [tokens_of(rank, choices)[1] for rank in range(4)]
        tokens, of_token = BATCH * LENGTH, chosen[0].shape[-1]
        for rank, visits in enumerate(by_rank):
            said = Said(rank, e, etp, chosen)
            told = [[number * EXPERTS // e] * e, [number * EXPERTS] * etp][: 1 + (etp > 1)]
            assert visits["alltoall", choices].sent == [
                *told,
                *said.exchanged(row),
                *said.exchanged(number),
                *said.brought_home(row),
                *said.brought_home(number),
            ]
            weights, rows = said.gathered(tokens * of_token * number), said.gathered(tokens * row)
            assert visits["allgather", choices].sent == [
                *weights,  # the choices, which are as large
                *rows,
                *weights,
                *reversed(rows),
                *reversed(weights),
            ]
