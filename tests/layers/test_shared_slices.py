"""Attention of slices that ranks share is attention of whole samples, and each slice moves once."""

from dataclasses import dataclass, replace

import pytest
import torch
from harness.marks import full
from harness.rank_pool import RankPool
from kernels.formulas import explicit_documents, first_positions
from layers.test_context_attention import CPU, GROUPS, STARTS, B, D, S, context_of, operands
from torch import Tensor

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.choose import kernels_for
from megatron.kernels.documents import Documents
from megatron.kernels.scores import PLAIN, Scores
from megatron.layers.attention_call import AttentionCall
from megatron.layers.context_attention import context_attention
from megatron.layers.slices import SeenKeys, SequenceSlice, SlicedPass
from megatron.parallel import p2p
from megatron.parallel.context import ContextExchange, own_positions_in_slices
from megatron.parallel.groups import ConnectedAxis

ALL_SCORES = Scores(0.7, 1.5, 6, (0.5, 0.25, 0.125, 0.0625))


@dataclass
class Attended:
    """What a rank makes of its tokens.

    Attributes:
        positions: of its tokens.
        tensors: output, and gradients of queries, keys and values; [b, u, ...].
        sent: bytes that it has sent in all forwards, and in all backwards.
    """

    positions: Tensor
    tensors: tuple[Tensor, ...]
    sent: tuple[int, int]


def attend(
    rank: int,
    size: int,
    *,
    lengths: tuple[int, ...],
    exchange: ContextExchange,
    scores: Scores = PLAIN,
    apart: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Attended:
    """Attention slice by slice, and its backward in the opposite order."""
    context, parts, seen = context_of(size, exchange), SequenceSlice.of_lengths(lengths), SeenKeys()
    kept = own_positions_in_slices(lengths, rank, size)
    whole, sent, real = [t[:, kept] for t in operands(dtype)], [0, 0], p2p.send
    own = [[t[:, p.among(len(kept))].clone() for t in whole] for p in parts]

    def send(tensor: Tensor, destination: int, axis: ConnectedAxis, tag: int = 0) -> p2p.Transfer:
        sent[-1] += tensor.nbytes
        return real(tensor, destination, axis, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p, "send", send)
        documents = Documents.of(first_positions(STARTS, S), lambda t: t) if apart else None
        options = AttentionOptions(scores, documents=documents)
        call = AttentionCall(kernels_for(CPU, dtype), options, layer=3)
        outputs = []
        for part, mine in zip(parts, own, strict=True):
            q, k, v = (t.requires_grad_() for t in mine[:3])
            one = replace(call, sliced=SlicedPass(part, seen))
            outputs.append(torch.cat(context_attention(context, (q, k, v), one), 1))
        sent.append(0)
        for output, mine in reversed(list(zip(outputs, own, strict=True))):
            output.backward(mine[3])
    gradients = (torch.cat([mine[i].grad for mine in own], 1) for i in range(3))  # type: ignore[misc]
    made = torch.cat([output.detach() for output in outputs], 1)
    return Attended(kept, (made, *gradients), (sum(sent[:-1]), sent[-1]))


@pytest.mark.parametrize("apart", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("scores", [PLAIN, ALL_SCORES, Scores(window=3)])
@pytest.mark.parametrize(
    ("size", "exchange", "lengths"),
    [
        (2, "all_gather", (8, 4, 20)),
        (2, "a2a", (8, 4, 20)),  # there are 2 groups of heads to exchange
        full(4, "all_gather", (8, 24)),
    ],
)
def test_shared_slices_together_are_whole_samples(
    size: int,
    exchange: ContextExchange,
    lengths: tuple[int, ...],
    scores: Scores,
    apart: bool,
    ranks: RankPool,
) -> None:
    q, k, v, grad = operands()
    own = [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]
    output = explicit_documents(*own, starts=STARTS if apart else ([0], [0]), scores=scores)
    gradients = torch.autograd.grad(output, own, grad.transpose(1, 2))
    expected = [t.detach().transpose(1, 2) for t in (output, *gradients)]
    for part in ranks.run(
        attend, size, lengths=lengths, exchange=exchange, scores=scores, apart=apart
    ):
        for found, all_ in zip(part.tensors, expected, strict=True):
            torch.testing.assert_close(found, all_[:, part.positions], rtol=1e-10, atol=1e-12)


def test_slices_send_no_more_than_whole_samples(ranks: RankPool) -> None:
    """Keys and values of a rank go to the other once, and so do their gradients."""
    promised = 2 * 2 * B * S // 2 * GROUPS * D  # in bf16
    for lengths in (S,), (8,) * 4:
        for part in ranks.run(
            attend, 2, lengths=lengths, exchange="all_gather", dtype=torch.bfloat16
        ):
            assert part.sent == (promised, promised)
