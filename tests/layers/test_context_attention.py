"""Attention of ranks that share a sequence is that of one rank, and moves what is promised."""

from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness.rank_pool import RankPool
from kernels.formulas import explicit_documents, first_positions
from torch import Tensor

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.choose import kernels_for
from megatron.kernels.documents import Documents
from megatron.kernels.scores import PLAIN, Scores
from megatron.layers import ring_pieces
from megatron.layers.attention_call import AttentionCall
from megatron.layers.context_attention import context_attention
from megatron.parallel import collectives, p2p
from megatron.parallel.context import (
    ContextAxes,
    ContextExchange,
    ContextParallel,
    context_parallel,
    own_positions,
)
from megatron.parallel.grid import Grid
from megatron.parallel.groups import ConnectedAxis, make_groups
from megatron.parallel.lanes import make_lane

B, S, HEADS, GROUPS, D = 2, 32, 4, 2, 8
STARTS = ([0, 1, 7, 20], [0, 29])
CPU = torch.device("cpu")


@dataclass
class Attended:
    """What a rank makes of its tokens.

    Attributes:
        positions: of its tokens.
        tensors: output, and gradients of queries, keys and values; [b, u, ...].
        sent: bytes that it has sent in the forward, and in the backward.
    """

    positions: Tensor
    tensors: tuple[Tensor, ...]
    sent: tuple[int, int]


def operands(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, of all tokens."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((B, S, heads, D) for heads in (HEADS, GROUPS, GROUPS, HEADS))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def context_of(size: int, exchange: ContextExchange) -> ContextParallel:
    """How the ranks of the pool share sequences; in two levels, neighbours exchange heads."""
    heads = 2 if exchange == "a2a+p2p" else 1
    groups = make_groups(
        Grid(context_size=size, context_heads_size=heads), CPU, timedelta(seconds=60)
    )
    axes = ContextAxes(groups.context, groups.context_heads, groups.context_ring)
    return context_parallel(axes, exchange, lambda ring: make_lane(CPU, ring, "context"))


def attend(
    rank: int,
    size: int,
    *,
    scores: Scores,
    apart: bool,
    dtype: torch.dtype = torch.float64,
    exchange: ContextExchange = "all_gather",
) -> Attended:
    context = context_of(size, exchange)
    kept = own_positions(S, rank, size)
    own = [whole[:, kept].requires_grad_() for whole in operands(dtype)]
    first = first_positions(STARTS, S)
    sent, real = [0], p2p.send

    def send(tensor: Tensor, destination: int, axis: ConnectedAxis, tag: int = 0) -> p2p.Transfer:
        sent[-1] += tensor.nbytes
        return real(tensor, destination, axis, tag)

    exchange_rows = collectives.all_to_all

    def all_to_all(rows: Tensor, axis: ConnectedAxis) -> Tensor:
        sent[-1] += rows.nbytes // axis.size * (axis.size - 1)
        return exchange_rows(rows, axis)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p, "send", send)
        patch.setattr(collectives, "all_to_all", all_to_all)
        patch.setattr(ring_pieces, "BLOCK", 2)
        patch.setattr(ring_pieces, "SCORED_BLOCK", 4)
        documents = Documents.of(first, lambda t: t) if apart else None
        options = AttentionOptions(scores, documents=documents)
        call = AttentionCall(kernels_for(CPU, dtype), options)
        output = torch.cat(context_attention(context, (own[0], own[1], own[2]), call), 1)
        sent.append(0)
        gradients = torch.autograd.grad(output, own[:3], own[3])
    return Attended(kept, (output.detach(), *gradients), (sent[0], sent[1]))


@pytest.mark.parametrize("apart", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize(
    "scores", [PLAIN, Scores(0.7, 1.5, 6, (0.5, 0.25, 0.125, 0.0625))], ids=["plain", "all scores"]
)
@pytest.mark.parametrize(
    ("size", "exchange"),
    # there are 2 groups of heads to exchange
    [
        (2, "all_gather"),
        (4, "all_gather"),
        (2, "a2a"),
        (2, "p2p"),
        (4, "p2p"),
        (4, "a2a+p2p"),
    ],
)
def test_all_parts_together_are_what_one_rank_makes(
    size: int, exchange: ContextExchange, scores: Scores, apart: bool, ranks: RankPool
) -> None:
    compare(ranks, size, exchange, scores, apart=apart)


@pytest.mark.parametrize("scores", [Scores(0.7), Scores(window=3)], ids=["scaled", "window"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_ring_makes_what_one_rank_makes(size: int, scores: Scores, ranks: RankPool) -> None:
    compare(ranks, size, "p2p", scores, apart=False)


def compare(
    ranks: RankPool, size: int, exchange: ContextExchange, scores: Scores, *, apart: bool
) -> None:
    """Hold the ranks' outputs and gradients against attention written out, of all tokens."""
    q, k, v, grad = operands()
    own = [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]
    starts = STARTS if apart else ([0], [0])
    output = explicit_documents(*own, starts=starts, scores=scores)
    gradients = torch.autograd.grad(output, own, grad.transpose(1, 2))
    expected = [t.detach().transpose(1, 2) for t in (output, *gradients)]
    for part in ranks.run(attend, size, scores=scores, apart=apart, exchange=exchange):
        for found, whole in zip(part.tensors, expected, strict=True):
            torch.testing.assert_close(found, whole[:, part.positions], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_sends_its_keys_and_values_once_to_every_other_and_their_gradients_once(
    size: int, ranks: RankPool
) -> None:
    promised = (size - 1) * 2 * 2 * B * S // size * GROUPS * D
    for part in ranks.run(attend, size, scores=PLAIN, apart=False, dtype=torch.bfloat16):
        assert part.sent == (promised, promised)


HOP = 2 * 2 * B * S // 4 * GROUPS * D
"""Bytes in bf16 of the keys and values of a rank of 4; gradients travel in fp32, twice as many."""

RING_BYTES = {
    "everything": (PLAIN, False, 3 * HOP, 3 * HOP + 4 * 2 * HOP),
    "neighbouring chunks": (Scores(window=4), False, 2 * HOP, 2 * HOP + 3 * 2 * HOP),
    "documents": (Scores(window=1), True, 2 * HOP, 2 * HOP + 3 * 2 * HOP),
    "caps": (Scores(softcap=1.5), False, 3 * HOP, 3 * HOP + 4 * 2 * HOP),
}
"""Scores, whether documents are apart, and the bytes of forward and backward of a ring of 4."""


@pytest.mark.parametrize("case", RING_BYTES)
def test_a_ring_sends_keys_and_values_to_who_sees_them_and_their_gradients_home(
    case: str, ranks: RankPool
) -> None:
    scores, apart, *promised = RING_BYTES[case]
    for part in ranks.run(
        attend, 4, scores=scores, apart=apart, dtype=torch.bfloat16, exchange="p2p"
    ):
        assert part.sent == tuple(promised)


def test_neighbours_exchange_heads_and_pass_on_keys_of_their_own_heads(ranks: RankPool) -> None:
    """A ring of two sets of two ranks: a hop has half of the heads, and tokens of two ranks."""
    heads = 2 * 2 * B * S // 4 * (HEADS + GROUPS) * D // 2
    for part in ranks.run(
        attend, 4, scores=PLAIN, apart=False, dtype=torch.bfloat16, exchange="a2a+p2p"
    ):
        assert part.sent == (heads + HOP, heads + HOP + 2 * 2 * HOP)


def test_gradients_are_rounded_once_along_a_ring(ranks: RankPool) -> None:
    """256, and 0.6 from each of three more ranks: in bf16 no single one of these changes 256."""
    first, *_ = ranks.run(first_value_gradient, 4)
    assert first == 258.0


def first_value_gradient(rank: int, size: int) -> float:
    """Gradient of the first value, to which all ranks contribute, on the rank that has it."""
    context = context_of(size, "p2p")
    kept = own_positions(S, rank, size)
    q, k, v = (torch.zeros(1, len(kept), 1, 8, dtype=torch.bfloat16) for _ in range(3))
    v.requires_grad_()
    grad = torch.zeros_like(v)
    position = int(kept[0])  # with equal scores a query gives 1 / (position + 1) to each key
    grad[:, 0] = (position + 1) * (256.0 if rank == 0 else 0.6)
    call = AttentionCall(kernels_for(CPU, torch.bfloat16))
    output = torch.cat(context_attention(context, (q, k, v), call), 1)
    [found] = torch.autograd.grad(output, v, grad)
    return float(found[0, 0, 0, 0])


def test_heads_are_exchanged_for_tokens_once_each_way(ranks: RankPool) -> None:
    """A rank keeps half of its heads; queries and results have all heads, keys and values fewer."""
    promised = 2 * B * S // 2 * (HEADS + GROUPS) * D  # half of 2 (HEADS + GROUPS), in bf16
    for part in ranks.run(
        attend, 2, scores=PLAIN, apart=False, dtype=torch.bfloat16, exchange="a2a"
    ):
        assert part.sent == (promised, promised)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_position_is_on_one_rank_and_all_have_the_same_work(size: int) -> None:
    by_rank = [own_positions(2 * 8 * size, rank, size) for rank in range(size)]
    assert sorted(torch.cat(by_rank).tolist()) == list(range(16 * size))
    assert all(torch.equal(own, own.sort().values) for own in by_rank)
    assert len({int((own + 1).sum()) for own in by_rank}) == 1  # pairs of a query and a key


@pytest.mark.parametrize("size", [2, 4])
def test_own_tokens_are_those_of_the_own_positions(size: int) -> None:
    x_bsh = torch.randn(B, S, 3)
    for rank in range(size):
        context = ContextParallel(ConnectedAxis("context", rank, tuple(range(size))))
        own = own_positions(S, rank, size)
        assert torch.equal(context.own_tokens(x_bsh), x_bsh[:, own])


def test_a_gather_is_the_adjoint_of_a_reduction(ranks: RankPool) -> None:
    """<gather(x), y> summed over ranks equals <x, reduce(y)> summed over ranks."""
    both = ranks.run(products, 4)
    torch.testing.assert_close(sum(own for own, _ in both), sum(other for _, other in both))


def products(rank: int, size: int) -> tuple[Tensor, Tensor]:
    context = ContextParallel(ConnectedAxis("context", rank, tuple(range(size)), dist.group.WORLD))
    generator = torch.Generator().manual_seed(rank)
    x, y = (
        torch.randn(2, B, length, 3, generator=generator, dtype=torch.float64)
        for length in (S // size, S)
    )
    return (context.gather(x) * y).sum(), (x * context.reduce(y)).sum()


@pytest.mark.parametrize("size", [2, 4])
def test_exchanged_heads_come_back(size: int, ranks: RankPool) -> None:
    assert all(ranks.run(come_back, size))


def come_back(rank: int, size: int) -> bool:
    context = ContextParallel(ConnectedAxis("context", rank, tuple(range(size)), dist.group.WORLD))
    wide, narrow = torch.randn(B, S // size, 8, 5), torch.randn(B, S // size, 4, 3)
    back = context.to_tokens(context.to_heads((wide, narrow)))
    return all(map(torch.equal, back, (wide, narrow)))
