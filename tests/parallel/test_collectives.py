"""Collectives bring what they promise to the rank that needs it, alike on one rank and on many."""

from typing import Any

import pytest
import torch
from correctness.rank_runs import make_pipeline_groups
from harness.rank_pool import RankPool

from megatron.parallel import collectives, p2p


def use_collectives(rank: int, world_size: int, *, root: int) -> dict[str, torch.Tensor]:
    groups = make_pipeline_groups()
    axis = groups.column
    own = torch.arange(6, dtype=torch.bfloat16).view(2, 3) * (rank + 1)
    total = torch.tensor([float(rank)])
    groups.pipeline.all_reduce(total)
    return {
        "broadcast": collectives.broadcast(own.clone(), root, axis),
        "reduce": collectives.reduce(own.clone(), root, axis),
        "all_gather": collectives.all_gather(own, axis),
        "all_reduce": total,
        "maximum": collectives.all_reduce(own.clone(), collectives.MAXIMUM, axis),
        "sum": collectives.all_reduce(own.clone(), collectives.SUM, axis),
        "objects": torch.tensor(groups.world.all_gather_object(rank)),
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_what_every_rank_gets(world_size: int, ranks: RankPool) -> None:
    own = [torch.arange(6).view(2, 3) * (rank + 1) for rank in range(world_size)]
    total = torch.stack(own).sum(0)
    for root in {0, world_size - 1}:
        results = ranks.run(use_collectives, world_size, root=root)
        assert torch.equal(results[root]["reduce"], total.bfloat16())
        for result in results:
            assert torch.equal(result["broadcast"], own[root].bfloat16())
            assert torch.equal(result["all_gather"], torch.stack(own).bfloat16())
            assert torch.equal(result["maximum"], own[-1].bfloat16())
            assert torch.equal(result["sum"], total.bfloat16())
            assert result["all_reduce"].item() == sum(range(world_size))
            assert result["objects"].tolist() == list(range(world_size))


def send_to_all(rank: int, world_size: int, *, sizes: list[list[int]]) -> torch.Tensor:
    """Send ``sizes[rank][other]`` rows to every other rank; a row says from where to where."""
    axis = make_pipeline_groups().column
    rows = [[100.0 * rank + to, at] for to, count in enumerate(sizes[rank]) for at in range(count)]
    own = torch.tensor(rows).view(-1, 2)
    coming = [row[rank] for row in sizes]
    return collectives.all_to_all(own, axis, sizes[rank], coming)


@pytest.mark.parametrize(
    "sizes", [[[3]], [[1, 2], [0, 4]], [[0, 3, 1, 0], [0] * 4, [2, 2, 2, 2], [5, 0, 0, 1]]]
)
def test_rows_reach_the_ranks_that_they_are_for(sizes: list[list[int]], ranks: RankPool) -> None:
    for rank, received in enumerate(ranks.run(send_to_all, len(sizes), sizes=sizes)):
        wanted = [
            [100.0 * source + rank, at]
            for source, row in enumerate(sizes)
            for at in range(row[rank])
        ]
        assert received.tolist() == wanted


def exchange(rank: int, world_size: int) -> list[float]:
    """Send three tensors forward and three backward, all under way at once."""
    groups = make_pipeline_groups()
    other = 1 - rank
    sending = [
        p2p.send(torch.full((4,), float(10 * rank + i)), other, axis, tag)
        for i in range(3)
        for tag, axis in enumerate((groups.transfers, groups.transfers))
    ]
    receiving = [
        p2p.receive(torch.empty(4), other, axis, tag)
        for tag, axis in enumerate((groups.transfers, groups.transfers))
        for _ in range(3)
    ]
    received = [float(transfer.wait()[0]) for transfer in receiving]
    for transfer in sending:
        transfer.wait()
    return received


def test_transfers_arrive_in_order_and_directions_do_not_mix(ranks: RankPool) -> None:
    zero, one = ranks.run(exchange, 2)
    assert zero == [10, 11, 12, 10, 11, 12]
    assert one == [0, 1, 2, 0, 1, 2]


def exchange_parts(
    rank: int, world_size: int, *, sizes: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Reduce and scatter, gather, and both, of fp32 numbers of different sizes."""
    axis = make_pipeline_groups().column
    own = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(rank))
    own *= 10.0 ** torch.arange(own.numel()).remainder(7)
    scattered, gathered, reduced = own.clone(), own.clone(), own.clone()
    collectives.reduce_scatter(scattered, axis, sizes)
    collectives.gather_parts(gathered, axis, sizes)
    collectives.all_reduce_parts(reduced, axis, sizes)
    part = scattered.split(sizes)[rank]
    return {"own": own, "part": part, "gathered": gathered, "reduced": reduced}


@pytest.mark.parametrize(
    "sizes", [(5,), (5, 5), (5, 5, 5), (5, 5, 5, 5), (0, 7), (3, 0, 9), (4, 1, 0, 0), (0, 2, 2, 8)]
)
def test_parts_are_added_in_the_order_of_the_ranks(sizes: tuple[int, ...], ranks: RankPool) -> None:
    results = ranks.run(exchange_parts, len(sizes), sizes=sizes)
    total = results[0]["own"].clone()
    for result in results[1:]:
        total += result["own"]
    gathered = torch.cat([r["own"].split(sizes)[k] for k, r in enumerate(results)])
    for rank, result in enumerate(results):
        assert torch.equal(result["part"], total.split(sizes)[rank])
        assert torch.equal(result["gathered"], gathered)
        assert torch.equal(result["reduced"], total)


def count_bytes(rank: int, world_size: int, *, sizes: tuple[int, ...]) -> dict[str, int]:
    """Bytes that this rank sends for each collective of parts."""
    axis, sent = make_pipeline_groups().column, 0

    def counting(tensor: torch.Tensor, *arguments: Any) -> p2p.Transfer:
        nonlocal sent
        sent += tensor.numel() * tensor.element_size()
        return send(tensor, *arguments)

    send, counts = p2p.send, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p, "send", counting)
        for name in ("reduce_scatter", "gather_parts", "all_reduce_parts"):
            sent = 0
            getattr(collectives, name)(torch.zeros(sum(sizes)), axis, sizes)
            counts[name] = sent
    return counts


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_are_the_least_possible(world_size: int, ranks: RankPool) -> None:
    half = 4 * 12 * (world_size - 1)
    for counts in ranks.run(count_bytes, world_size, sizes=(12,) * world_size):
        assert counts == {
            "reduce_scatter": half,
            "gather_parts": half,
            "all_reduce_parts": 2 * half,
        }


def test_bytes_of_parts_of_other_sizes(ranks: RankPool) -> None:
    """A rank sends what others own in the one direction, and what it owns in the other."""
    sizes = (12, 0, 3)
    for own, counts in zip(sizes, ranks.run(count_bytes, 3, sizes=sizes), strict=True):
        assert counts["reduce_scatter"] == 4 * (sum(sizes) - own)
        assert counts["gather_parts"] == 4 * 2 * own
