"""Collectives bring what they promise to the rank that needs it, and do nothing alone."""

from datetime import timedelta

import pytest
import torch
from correctness.rank_runs import make_pipeline_groups
from harness.rank_pool import RankPool

from megatron.parallel import collectives, p2p
from megatron.parallel.groups import make_groups, single_rank

CPU = torch.device("cpu")


def use_collectives(rank: int, world_size: int, *, root: int) -> dict[str, torch.Tensor]:
    groups = make_pipeline_groups()
    group, size = groups.vocabulary, groups.size
    own = torch.arange(6, dtype=torch.bfloat16).view(2, 3) * (rank + 1)
    total = torch.tensor([float(rank)])
    groups.all_reduce(total)
    return {
        "broadcast": collectives.broadcast(own.clone(), root, group, size),
        "reduce": collectives.reduce(own.clone(), root, group, size),
        "all_gather": collectives.all_gather(own, group, size),
        "all_reduce": total,
        "maximum": collectives.all_reduce(own.clone(), collectives.MAXIMUM, group, size),
        "sum": collectives.all_reduce(own.clone(), collectives.SUM, group, size),
        "objects": torch.tensor(groups.all_gather_object(rank)),
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_what_every_rank_gets(world_size: int, ranks: RankPool) -> None:
    own = [torch.arange(6).view(2, 3) * (rank + 1) for rank in range(world_size)]
    for root in {0, world_size - 1}:
        results = ranks.run(use_collectives, world_size, root=root)
        assert torch.equal(results[root]["reduce"], sum(own).bfloat16())
        for result in results:
            assert torch.equal(result["broadcast"], own[root].bfloat16())
            assert torch.equal(result["all_gather"], torch.stack(own).bfloat16())
            assert torch.equal(result["maximum"], own[-1].bfloat16())
            assert torch.equal(result["sum"], sum(own).bfloat16())
            assert result["all_reduce"].item() == sum(range(world_size))
            assert result["objects"].tolist() == list(range(world_size))


def exchange(rank: int, world_size: int) -> list[float]:
    """Send three tensors forward and three backward, all under way at once."""
    groups = make_pipeline_groups()
    other = 1 - rank
    sending = [
        p2p.send(torch.full((4,), float(10 * rank + i)), other, group, tag)
        for i in range(3)
        for tag, group in enumerate((groups.forward, groups.backward))
    ]
    receiving = [
        p2p.receive(torch.empty(4), other, group, tag)
        for tag, group in enumerate((groups.forward, groups.backward))
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


def describe_groups(rank: int, world_size: int) -> tuple[int, int, bool]:
    groups = make_pipeline_groups()
    return groups.rank, groups.size, groups.ends is not None


def has_ends_without_copies(rank: int, world_size: int) -> bool:
    return make_groups(CPU, timedelta(seconds=60), ends=(0, 0)).ends is not None


def test_ends_without_copies_share_no_group(ranks: RankPool) -> None:
    assert ranks.run(has_ends_without_copies, 2) == [False, False]


def test_only_the_ends_of_the_pipeline_share_a_group(ranks: RankPool) -> None:
    assert ranks.run(describe_groups, 1) == [(0, 1, False)]
    assert ranks.run(describe_groups, 2) == [(0, 2, True), (1, 2, True)]
    assert ranks.run(describe_groups, 4) == [(r, 4, r in (0, 3)) for r in range(4)]


def test_a_single_rank_needs_no_process_group() -> None:
    groups = single_rank(CPU)
    value = torch.tensor([3.0])
    groups.all_reduce(value)
    groups.barrier()
    assert value.item() == 3
    assert groups.all_gather_object("x") == ["x"]
    assert torch.equal(collectives.all_gather(value, None, 1), torch.tensor([[3.0]]))
