"""What enters a shared layer and what leaves it: in order, complete, and adjoint to each other."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch
from harness.rank_pool import RankPool
from parallel.tensor_axis import shared_by_all, without_groups
from torch import Tensor

from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.lanes import InlineLane, Pending, ThreadLane
from megatron.parallel.tensor import ALONE, SharedTokens, SplitTokens, tensor_parallel
from megatron.parallel.turns import Turns

B, S, H = 3, 8, 5
CPU = torch.device("cpu")
T = TypeVar("T")


@dataclass(frozen=True)
class Moved:
    """What one rank put in and got.

    Attributes:
        x_buh: what it had at first.
        gathered_bsh: all tokens.
        partial_bsh: its summand.
        reduced_buh: the sum, for its tokens.
        later: both once more, by way of the lane.
    """

    x_buh: Tensor
    gathered_bsh: Tensor
    partial_bsh: Tensor
    reduced_buh: Tensor
    later: tuple[Tensor, Tensor]


def move(rank: int, world_size: int, *, split_tokens: bool, dtype: torch.dtype) -> Moved:
    """Use every method; where tokens are split, x is a strided part of what all ranks drew."""
    generator = torch.Generator().manual_seed(0)
    all_bsh = torch.randn(B, S, H, generator=generator, dtype=torch.float64).to(dtype)
    partial_bsh = torch.randn(B, S, H, generator=generator.manual_seed(1 + rank)).to(dtype)
    with shared_by_all(split_tokens=split_tokens) as tensor:
        assert (tensor.rank, tensor.size) == (rank, world_size)
        assert tensor.sequence_parts == (world_size if split_tokens else 1)
        x_buh = tensor.own_tokens(all_bsh)
        before = x_buh.clone()
        gathered = tensor.gather(x_buh)
        reduced = tensor.reduce(partial_bsh.clone())
        later = tensor.start_gather(x_buh).wait(), tensor.start_reduction(partial_bsh.clone())
        moved = Moved(before, gathered, partial_bsh, reduced, (later[0], later[1].wait()))
        assert torch.equal(x_buh, before)
        assert not any(t.requires_grad for t in (gathered, reduced))
    return moved


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("split_tokens", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_tokens_keep_their_order_and_sums_are_complete(
    world_size: int, split_tokens: bool, dtype: torch.dtype, ranks: RankPool
) -> None:
    results = ranks.run(move, world_size, split_tokens=split_tokens, dtype=dtype)
    all_bsh = torch.cat([r.x_buh for r in results], 1) if split_tokens else results[0].x_buh
    assert all_bsh.shape == (B, S, H)
    total_bsh = sum(r.partial_bsh.double() for r in results)
    assert isinstance(total_bsh, Tensor)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    for rank, result in enumerate(results):
        u = S // world_size
        own = slice(rank * u, (rank + 1) * u) if split_tokens else slice(None)
        assert result.reduced_buh.dtype == result.gathered_bsh.dtype == dtype
        assert torch.equal(result.x_buh, all_bsh[:, own])
        assert torch.equal(result.gathered_bsh, all_bsh)
        torch.testing.assert_close(
            result.reduced_buh.double(), total_bsh[:, own], rtol=tolerance, atol=tolerance
        )
        assert torch.equal(result.later[0], result.gathered_bsh)
        assert torch.equal(result.later[1], result.reduced_buh)
        if not split_tokens:  # or replicated parameters would drift apart
            assert torch.equal(result.reduced_buh, results[0].reduced_buh)


@pytest.mark.parametrize("split_tokens", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_reduction_is_the_adjoint_of_gathering(
    world_size: int, split_tokens: bool, ranks: RankPool
) -> None:
    """<gather x, y> = <x, reduce y>; what every rank has alike is one vector, and counts once."""
    results = ranks.run(move, world_size, split_tokens=split_tokens, dtype=torch.float64)
    gathered = sum(float((r.gathered_bsh * r.partial_bsh).sum()) for r in results)
    holders = results if split_tokens else results[:1]
    reduced = sum(float((r.x_buh * r.reduced_buh).sum()) for r in holders)
    assert gathered == pytest.approx(reduced, rel=1e-12)
    assert abs(reduced) > 1


def test_a_rank_alone_moves_nothing() -> None:
    x = torch.randn(B, S, H)
    for same in (
        ALONE.gather(x),
        ALONE.start_gather(x).wait(),
        ALONE.reduce(x),
        ALONE.start_reduction(x).wait(),
        ALONE.own_tokens(x),
    ):
        assert same is x


def test_the_strategy_follows_from_the_axis() -> None:
    alone, several = ConnectedAxis("tensor", 0, (3,)), ConnectedAxis("tensor", 1, (2, 3))
    for sequence_parallel in (False, True):
        assert tensor_parallel(alone, CPU, sequence_parallel=sequence_parallel) is ALONE
    assert isinstance(tensor_parallel(several, CPU, sequence_parallel=False), SharedTokens)
    assert isinstance(tensor_parallel(several, CPU, sequence_parallel=True), SplitTokens)


def test_what_is_reduced_keeps_no_memory_of_other_tokens() -> None:
    """Also of a single sample, whose parts need no copy to be sent."""
    for batch in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megatron.parallel.collectives.reduce_scatter", lambda tensor, axis: None)
            split = without_groups(1, 4, split_tokens=True)
            own_buh = split.reduce(torch.randn(batch, S, H))
        assert own_buh.untyped_storage().nbytes() == own_buh.numel() * own_buh.element_size()


@pytest.mark.parametrize("strategy", [SharedTokens, SplitTokens])
def test_the_caller_goes_on_beside_started_work(
    strategy: type[SharedTokens] | type[SplitTokens],
) -> None:
    """The lane is held up until the caller, who has started a reduction, lets it go on."""
    lane, go_on = ThreadLane("tensor"), threading.Event()
    lane.submit(go_on.wait)
    tensor = strategy(ConnectedAxis("tensor", 0, (0,)), lane)
    pending = tensor.start_reduction(torch.ones(1, 2, 3))
    go_on.set()
    assert torch.equal(pending.wait(), torch.ones(1, 2, 3))
    lane.close()


@pytest.mark.parametrize("strategy", [SharedTokens, SplitTokens])
def test_in_a_pair_no_reduction_begins_on_the_lane(
    strategy: type[SharedTokens] | type[SplitTokens],
) -> None:
    """The pass begins it itself, and the other one works meanwhile; alone, the lane hides it."""
    turns, used = Turns(), list[str]()

    class Noted(InlineLane):
        def submit(self, work: Callable[[], T]) -> Pending[T]:
            used.append("lane")
            return super().submit(work)

    tensor = strategy(ConnectedAxis("tensor", 0, (0,), turns=turns), Noted())

    def reduced() -> None:
        tensor.start_reduction(torch.ones(1, 2, 3)).wait()

    turns.run(reduced, lambda: None)
    assert not used
    turns.run(lambda: None, reduced)
    assert not used, "two threads would begin collectives, although the other pass is over"
    reduced()
    assert used == ["lane"]


def test_in_a_pair_the_other_pass_goes_on_while_tensors_are_under_way() -> None:
    """A reduction has begun when the other pass has its turn; gatherings hand over to nobody."""
    turns, done = Turns(), list[str]()
    tensor = SplitTokens(ConnectedAxis("tensor", 0, (0,), turns=turns), InlineLane())
    x_buh = torch.ones(1, 2, 3)

    def first() -> None:
        coming = [tensor.start_gather(x_buh) for _ in range(2)]
        done.append("gathers")
        leaving = tensor.start_reduction(x_buh)
        done.append("works")
        assert all(torch.equal(own.wait(), x_buh) for own in (*coming, leaving))

    turns.run(first, lambda: done.append("other"))
    assert done == ["gathers", "other", "works"]
