"""Collectives bring what they promise to the rank that needs it, alike on one rank and on many."""

import pytest
import torch
from correctness.rank_runs import make_pipeline_groups
from harness.rank_pool import RankPool

from megatron.parallel import collectives, p2p


def use_collectives(rank: int, world_size: int, *, root: int) -> dict[str, torch.Tensor]:
    groups = make_pipeline_groups()
    axis = groups.vocabulary
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


def exchange(rank: int, world_size: int) -> list[float]:
    """Send three tensors forward and three backward, all under way at once."""
    groups = make_pipeline_groups()
    other = 1 - rank
    sending = [
        p2p.send(torch.full((4,), float(10 * rank + i)), other, axis, tag)
        for i in range(3)
        for tag, axis in enumerate((groups.forward, groups.backward))
    ]
    receiving = [
        p2p.receive(torch.empty(4), other, axis, tag)
        for tag, axis in enumerate((groups.forward, groups.backward))
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
