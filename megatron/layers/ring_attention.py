"""Causal attention for ranks that share every sequence and pass keys and values on along a ring.

In step 0 the queries of a rank attend to the rank's own keys, in step i to the keys of the rank i
places before. While a step computes, the keys and values of the next step travel. A rank has an
early and a late chunk of the sequence (``parallel.context``). In steps of lower ranks all queries
see the other's early chunk and none of its late one. In steps of higher ranks only late queries see
anything, and they see both chunks. So all steps but the first have the same work, and no step but
the first needs a mask. The parts of the softmax are put together by their logarithms of sums
(arXiv 2310.01889).

Windows and documents hide keys, and then ``ring_pieces`` says which squares of queries and keys are
left. Keys and values skip the steps in which no rank needs them: they travel several places at once
to the next step that has work.

The backward goes around once more. Gradients of keys and values travel with them, in the type of
statistics, so that the sum over all ranks is rounded once. The last hop brings the gradients home.

Shapes: b batch, u tokens of a rank, a query heads, g key/value heads, d channels of a head; 2: keys
and values.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from megatron.kernels.autograd import apply, once_differentiable
from megatron.kernels.face import Kernels
from megatron.kernels.heads import alone
from megatron.kernels.reference.partial_attention import Attended, AttentionPart
from megatron.kernels.sinks import sinks_gradient, with_sinks
from megatron.kernels.softmax import statistics_dtype
from megatron.layers.attention_call import AttentionCall, Heads
from megatron.layers.ring_pieces import Piece, RingSight
from megatron.parallel.context import ContextParallel
from megatron.parallel.lanes import Done, Pending

_COMPUTED: Final = frozenset({"softcap", "window", "slopes_a", "documents", "sinks_a"})
"""The properties of ``AttentionOptions`` that are computed here, part by part."""

_FEW: Final = 4
"""Pieces of a step whose gradients may wait for the sum of gradients to come along the ring."""


def ring_attention(
    context: ContextParallel, heads: Heads, call: AttentionCall
) -> tuple[Tensor, ...]:
    """Return attention as ``context_attention`` does."""
    options = call.options
    assert "dropout" not in options.asked, "config refuses dropout"
    lacking = options.asked - _COMPUTED
    assert not lacking, f"a ring does not compute {', '.join(sorted(lacking))}"
    assert call.sliced is None, "config refuses slices"
    q_buad, k_bugd, v_bugd = heads
    own_2bgud = torch.stack((k_bugd.transpose(1, 2), v_bugd.transpose(1, 2)))
    scores, documents, sinks_a = options.scores, options.documents, options.sinks_a
    sight = RingSight.of(context.rank, context.size, q_buad.shape[1], scores, documents)
    given = alone(q_buad).transpose(1, 2), own_2bgud, sinks_a, call.kernels, context, sight
    return (apply(_RingAttention, *given).transpose(1, 2),)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_baud: Tensor,
        own_2bgud: Tensor,
        sinks_a: Tensor | None,
        kernels: Kernels,
        context: ContextParallel,
        sight: RingSight,
    ) -> Tensor:
        whole = None
        for step, seen_2bgud in _rounds(context, sight, own_2bgud):
            for piece in sight.pieces(step):
                attended = kernels.attend_to_part(_part(piece, q_baud, seen_2bgud, sight))
                whole = _with(kernels, whole, attended, piece, sight)
            del seen_2bgud  # the next keys may take its memory
        assert whole is not None, "every query sees its own key"
        out_baud, log_bau = whole
        if sinks_a is not None:
            out_baud, log_bau = with_sinks(out_baud, log_bau, sinks_a)
        # Rounded once, with all parts and the sinks in it.
        narrow_baud = out_baud.to(q_baud.dtype)
        ctx.save_for_backward(q_baud, own_2bgud, narrow_baud, log_bau, sinks_a)
        ctx.kernels, ctx.context, ctx.sight = kernels, context, sight
        return narrow_baud

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_baud: Tensor) -> tuple[Tensor | None, ...]:
        q_baud, own_2bgud, out_baud, log_bau, sinks_a = ctx.saved_tensors
        kernels, context, sight = ctx.kernels, ctx.context, ctx.sight
        whole, wide = Attended(out_baud, log_bau), statistics_dtype(q_baud.dtype)
        q_grad_baud = torch.zeros_like(q_baud, dtype=wide)
        coming_sum: Pending[Tensor] = Done(torch.zeros_like(own_2bgud, dtype=wide))
        rounds = _rounds(context, sight, own_2bgud)
        for (step, seen_2bgud), places in zip(rounds, _moves(sight), strict=True):
            made, pieces = [], sight.pieces(step)
            # Gradients of many pieces would take more memory than the sum that is on its way.
            sum_2bgud = coming_sum.wait() if len(pieces) > _FEW else None
            for piece in pieces:
                own, own_grad = _of_queries(whole, piece), grad_baud[:, :, piece.queries]
                more, *both = kernels.gradients_of_part(
                    _part(piece, q_baud, seen_2bgud, sight), own, own_grad
                )
                # ``+=`` on an index would also copy the sum onto itself.
                q_grad_baud[:, :, piece.queries].add_(more)
                if sum_2bgud is None:
                    made.append((piece.keys, torch.stack(both)))
                else:
                    sum_2bgud[..., piece.keys, :].add_(torch.stack(both))
            del seen_2bgud
            # Only now: the sum has travelled while these gradients were formed.
            if sum_2bgud is None:
                sum_2bgud = coming_sum.wait()
            for keys, more_2bgkd in made:
                sum_2bgud[..., keys, :].add_(more_2bgkd)
            coming_sum = context.pass_on(sum_2bgud, places) if places else Done(sum_2bgud)
        kv_grad_2bgud = coming_sum.wait().to(own_2bgud.dtype)
        sinks_grad_a = None
        if sinks_a is not None:
            sinks_grad_a = sinks_gradient(grad_baud, out_baud, log_bau, sinks_a)
        return q_grad_baud.to(q_baud.dtype), kv_grad_2bgud, sinks_grad_a, None, None, None


def _moves(sight: RingSight) -> list[int]:
    """Return for every step how many places keys travel to the next one, at last how many home."""
    *_, last = sight.steps
    between = [after - before for before, after in pairwise(sight.steps)]
    return [*between, (sight.size - last) % sight.size]


def _rounds(
    context: ContextParallel, sight: RingSight, own_2bgud: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield each step with its keys and values; those of the next step travel meanwhile."""
    *moves, _ = _moves(sight)
    coming: Pending[Tensor] = Done(own_2bgud)
    for step, places in zip(sight.steps, (*moves, 0), strict=True):
        seen_2bgud = coming.wait()
        if places:
            coming = context.pass_on(seen_2bgud, places)
        yield step, seen_2bgud


def _part(piece: Piece, q_baud: Tensor, seen_2bgud: Tensor, sight: RingSight) -> AttentionPart:
    k_bgkd, v_bgkd = seen_2bgud[..., piece.keys, :].unbind()
    scale = sight.scores.scale_of(q_baud.shape[-1])
    own_bakd = q_baud[:, :, piece.queries]
    return AttentionPart(own_bakd, k_bgkd, v_bgkd, piece.is_causal, scale, piece.view)


def _of_queries(whole: Attended, piece: Piece) -> Attended:
    return Attended(*(of_all[:, :, piece.queries] for of_all in whole))


def _with(
    kernels: Kernels, whole: Attended | None, attended: Attended, piece: Piece, sight: RingSight
) -> Attended:
    """Return the parts of the softmax so far, ``None`` if there are none, and one more."""
    out_bakd, log_bak = attended
    if whole is None:
        wide_bakd = out_bakd.to(log_bak.dtype)
        if piece.queries == slice(0, sight.tokens):
            return Attended(wide_bakd, log_bak)
        shape = (*log_bak.shape[:2], sight.tokens)
        log_bau = log_bak.new_full(shape, -torch.inf)
        whole = Attended(wide_bakd.new_zeros(*shape, out_bakd.shape[3]), log_bau)
    kernels.join_parts_(_of_queries(whole, piece), attended)
    return whole
