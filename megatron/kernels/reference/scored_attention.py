"""Causal attention with any ``Scores``, documents and sinks, in PyTorch on any device.

PyTorch's own kernels would need a mask, a matrix of all positions. Here each block of queries is
multiplied only by the keys that it sees, so windows and documents save work and memory. The
backward forms the probabilities of a block again. Scores and the softmax are in fp32 or better; the
operands of products are in the type of activations.

Shapes: b batch, a query heads, g key/value heads, r = a / g, s sequence, d channels of a head,
x = b g; q positions of a block, y = r q, k keys that a block sees.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.autograd import apply, once_differentiable
from megatron.kernels.softmax import statistics_dtype

BLOCK = 256
"""Positions of a block, at most. With a window, a block sees up to this many keys more than one
query does."""

FEWEST = 32
ON_A_CPU = 1 << 20
"""Scores of a block on a CPU, if a block of ``FEWEST`` positions has no more: 4 MiB in fp32. Long
samples have shorter blocks then. On a GPU short blocks would take more launches."""


def scored_attention(
    q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, options: AttentionOptions
) -> Tensor:
    """See ``Kernels.causal_attention``. The backward draws the same random numbers again."""
    sinks_a = options.sinks_a
    # Autograd has to see the sinks, and it alone keeps them for the backward.
    others = options if sinks_a is None else replace(options, sinks_a=None)
    return apply(_ScoredAttention, q_basd, k_bgsd, v_bgsd, sinks_a, others)


def _first_key(options: AttentionOptions, start: int) -> int:
    """Return the first key that is seen by a query at position ``start`` or later."""
    window, documents = options.scores.window, options.documents
    first = 0 if window is None else max(0, start - window)
    if documents is None:
        return first
    return max(first, int(documents.host_first_bs[:, start].min()))


class _ScoredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_basd: Tensor,
        k_bgsd: Tensor,
        v_bgsd: Tensor,
        sinks_a: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor:
        batch, heads, seq_length, size = q_basd.shape  # seq_length counts queries
        ctx.options, dropout = options, options.dropout
        ctx.generator = _generator_state(q_basd.device) if dropout else None
        ctx.save_for_backward(q_basd, k_bgsd, v_bgsd, sinks_a)
        out_basd = q_basd.new_empty(batch, seq_length, heads, size).transpose(1, 2)
        for block in _blocks(q_basd, k_bgsd, options):
            q_xyd, k_xkd = block.queries(q_basd), block.keys(k_bgsd)
            used_xyk = _drop(block.probabilities(q_xyd, k_xkd, sinks_a)[0], dropout)[0]
            block.write(used_xyk.to(v_bgsd.dtype) @ block.keys(v_bgsd), out_basd)
            del used_xyk  # the next block has such a matrix of its own
        return out_basd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_basd: Tensor) -> tuple[Tensor | None, ...]:
        q_basd, k_bgsd, v_bgsd, sinks_a = ctx.saved_tensors
        with _repeating(ctx.generator, q_basd.device):
            gradients = _gradients(grad_basd, q_basd, k_bgsd, v_bgsd, sinks_a, ctx.options)
        return (*gradients, None)


def _gradients(
    grad_basd: Tensor,
    q_basd: Tensor,
    k_bgsd: Tensor,
    v_bgsd: Tensor,
    sinks_a: Tensor | None,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of queries, keys, values and sinks."""
    batch, groups, seq_length, size = k_bgsd.shape
    dq_basd = q_basd.new_empty(batch, q_basd.shape[2], q_basd.shape[1], size).transpose(1, 2)
    wide = statistics_dtype(k_bgsd.dtype)
    dk_xsd, dv_xsd = k_bgsd.new_zeros(2, batch * groups, seq_length, size, dtype=wide)
    dsinks_a = None if sinks_a is None else torch.zeros_like(sinks_a, dtype=wide)
    for block in _blocks(q_basd, k_bgsd, options):
        q_xyd, grad_xyd = block.queries(q_basd), block.queries(grad_basd)
        k_xkd, v_xkd = block.keys(k_bgsd), block.keys(v_bgsd)
        dscore_xyk, used_xyk, dsunk_a = _scores_gradient(
            block, q_xyd, grad_xyd, (k_xkd, v_xkd), sinks_a
        )
        block.write(dscore_xyk @ k_xkd, dq_basd)
        # Blocks see the same keys: sums over blocks are statistics, which are rounded once at the
        # end.
        dk_xsd[:, block.first_key : block.end] += dscore_xyk.mT @ q_xyd
        dv_xsd[:, block.first_key : block.end] += used_xyk.mT @ grad_xyd
        del dscore_xyk, used_xyk  # the next block has such matrices of its own
        if dsinks_a is not None and dsunk_a is not None:
            dsinks_a += dsunk_a
    dk_bgsd, dv_bgsd = (
        t_xsd.to(k_bgsd.dtype).unflatten(0, (batch, groups)) for t_xsd in (dk_xsd, dv_xsd)
    )
    dsinks_a = None if sinks_a is None or dsinks_a is None else dsinks_a.to(sinks_a.dtype)
    return dq_basd, dk_bgsd, dv_bgsd, dsinks_a


def _scores_gradient(
    block: "_Block",
    q_xyd: Tensor,
    grad_xyd: Tensor,
    seen: tuple[Tensor, Tensor],
    sinks_a: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradient of a block's products of queries and keys, and the weights of values.

    Both are [x, y, k], in the type of queries. The third result is the gradient of the sinks.

    Args:
        block: some positions.
        q_xyd: their queries.
        grad_xyd: the gradient of their outputs.
        seen: the keys and the values that they see, [x, k, d].
        sinks_a: see ``AttentionOptions``.
    """
    k_xkd, v_xkd = seen
    prob_xyk, slope_xyk, sunk_xy1 = block.probabilities(q_xyd, k_xkd, sinks_a)
    used_xyk, factor_xyk = _drop(prob_xyk, block.options.dropout)
    dprob_xyk = (grad_xyd @ v_xkd.mT).to(prob_xyk.dtype)
    if factor_xyk is not None:
        dprob_xyk *= factor_xyk
    dsunk_a = None if sunk_xy1 is None else block.sinks_gradient(prob_xyk, dprob_xyk, sunk_xy1)
    # P (∇P - Σ P ∇P). It holds with sinks too: a sink has no value, so it adds nothing to the sum.
    dscore_xyk = torch.ops.aten._softmax_backward_data(dprob_xyk, prob_xyk, -1, prob_xyk.dtype)
    dscore_xyk *= block.options.scores.scale_of(q_xyd.shape[-1]) if slope_xyk is None else slope_xyk
    return dscore_xyk.to(q_xyd.dtype), used_xyk.to(q_xyd.dtype), dsunk_a


@dataclass(frozen=True)
class _Block:
    """Some positions, and the keys that their queries see.

    Attributes:
        start: first position.
        end: position after the last one, which is also the position after the last key.
        first_key: first key that a query of the block sees.
        first_query: position of the first query of all blocks.
        groups: key/value heads g.
        options: of the attention, without sinks.
    """

    start: int
    end: int
    first_key: int
    first_query: int
    groups: int
    options: AttentionOptions

    @property
    def own(self) -> slice:
        """The indices of the block's queries among all queries."""
        return slice(self.start - self.first_query, self.end - self.first_query)

    def queries(self, t_basd: Tensor) -> Tensor:
        """Return the block's part of a tensor of the queries' shape, as a dense [x, y, d]."""
        t_bgrqd: Tensor = t_basd[:, :, self.own].unflatten(1, (self.groups, -1))
        return t_bgrqd.flatten(0, 1).flatten(1, 2)

    def keys(self, t_bgsd: Tensor) -> Tensor:
        """Return the keys or values that the block sees, [x, k, d]."""
        return t_bgsd[:, :, self.first_key : self.end].flatten(0, 1)

    def write(self, t_xyd: Tensor, out_basd: Tensor) -> None:
        """Write the block's part, in the form of ``queries``, to its place in ``out_basd``."""
        heads = out_basd.shape[1]
        t_bgrqd = t_xyd.unflatten(1, (heads // self.groups, -1)).unflatten(0, (-1, self.groups))
        out_basd[:, :, self.own] = t_bgrqd.flatten(1, 2)

    def probabilities(
        self, q_xyd: Tensor, k_xkd: Tensor, sinks_a: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the softmax of the scores, and the derivatives of the scores by the products.

        Both are [x, y, k], in the type of statistics. Without a cap the derivatives are ``None``:
        each is the scale. The third result is the probability of the sink, [x, y, 1]; ``None``:
        there are no sinks.
        """
        scores = self.options.scores
        scale, cap = scores.scale_of(q_xyd.shape[-1]), scores.softcap
        score_xyk, slope_xyk = (q_xyd @ k_xkd.mT).to(statistics_dtype(q_xyd.dtype)), None
        score_xyk *= scale
        if cap:
            tanh_xyk = score_xyk.div_(cap).tanh_()
            score_xyk = tanh_xyk * cap
            slope_xyk = tanh_xyk.square_().neg_().add_(1).mul_(scale)
        score_xrqk = score_xyk.unflatten(1, (-1, self.end - self.start))
        if scores.slopes_a:
            score_xrqk = self._biased(score_xrqk)
        score_xrqk.masked_fill_(self._hidden(q_xyd.device), -torch.inf)
        if sinks_a is None:
            prob_xyk: Tensor = score_xrqk.softmax(-1).flatten(1, 2)
            return prob_xyk, slope_xyk, None
        sink_gr11 = sinks_a.to(score_xrqk.dtype).view(self.groups, -1, 1, 1)
        sink_xr11 = sink_gr11.repeat(len(score_xrqk) // self.groups, 1, 1, 1)
        prob_xrqk, sunk_xrq1 = _softmax_with_sink(score_xrqk, sink_xr11)
        return prob_xrqk.flatten(1, 2), slope_xyk, sunk_xrq1.flatten(1, 2)

    def sinks_gradient(self, prob_xyk: Tensor, dprob_xyk: Tensor, sunk_xy1: Tensor) -> Tensor:
        """Return the gradient [a] of the sinks of all query heads, from the block's queries alone.

        A sink has no value of its own. It takes its probability from the keys, each of which loses
        in proportion to the key's own probability.
        """
        mean_xy1 = (prob_xyk * dprob_xyk).sum(-1, keepdim=True)
        lost_xy = (sunk_xy1 * mean_xy1).squeeze(-1)
        lost_xr = lost_xy.unflatten(1, (-1, self.end - self.start)).sum(-1)
        lost_gr: Tensor = lost_xr.unflatten(0, (-1, self.groups)).sum(0)
        return -lost_gr.flatten()

    def _positions(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the positions of the queries, [q, 1], and of the keys that the block sees, [k]."""
        keys_k = torch.arange(self.first_key, self.end, device=device, dtype=dtype)
        return keys_k[self.start - self.first_key :, None], keys_k

    def _hidden(self, device: torch.device) -> Tensor:
        """Return which keys a query does not see, to fit [x, r, q, k].

        Positions are compared, not subtracted: a matrix of distances has eight bytes where a score
        has four.
        """
        own_q1, keys_k = self._positions(device, torch.int64)
        hidden_qk = keys_k > own_q1
        if self.options.scores.window is not None:
            hidden_qk |= keys_k < own_q1 - self.options.scores.window
        if self.options.documents is None:
            return hidden_qk
        first_bq1 = self.options.documents.first_bs[:, self.start : self.end, None]
        hidden_bqk = hidden_qk | (keys_k < first_bq1)
        return hidden_bqk.repeat_interleave(self.groups, 0).unsqueeze(1)

    def _biased(self, score_xrqk: Tensor) -> Tensor:
        """Return scores of ALiBi; up to 2^24 positions, distances in fp32 are exact."""
        slopes_a = slopes_on(self.options.scores.slopes_a, score_xrqk.device, score_xrqk.dtype)
        slopes_gr11 = slopes_a.view(self.groups, -1, 1, 1)
        score_bgrqk = score_xrqk.unflatten(0, (-1, self.groups))
        own_q1, keys_k = self._positions(score_xrqk.device, score_xrqk.dtype)
        distance_qk = own_q1 - keys_k
        biased_bgrqk = torch.addcmul(score_bgrqk, slopes_gr11, distance_qk, value=-1)
        return biased_bgrqk.flatten(0, 1)


def _softmax_with_sink(score_xrqk: Tensor, sink_xr11: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the keys, and of the sink [x, r, q, 1]; together they are 1."""
    most_xrq1 = torch.maximum(score_xrqk.amax(-1, keepdim=True), sink_xr11)
    exp_xrqk, sunk_xrq1 = (score_xrqk - most_xrq1).exp_(), (sink_xr11 - most_xrq1).exp_()
    total_xrq1 = exp_xrqk.sum(-1, keepdim=True).add_(sunk_xrq1)
    return exp_xrqk.div_(total_xrq1), sunk_xrq1.div_(total_xrq1)


def _blocks(q_basd: Tensor, k_bgsd: Tensor, options: AttentionOptions) -> Iterator[_Block]:
    """Yield the blocks of all positions that have queries, in order."""
    groups, seq_length = k_bgsd.shape[1:3]
    start = first_query = seq_length - q_basd.shape[2]
    while start < seq_length:
        first_key, length = _first_key(options, start), BLOCK
        if q_basd.device.type == "cpu":
            of_query = q_basd.shape[0] * q_basd.shape[1] * (start + BLOCK - first_key)
            length = max(FEWEST, min(BLOCK, ON_A_CPU // of_query // FEWEST * FEWEST))
        end = min(start + length, seq_length)
        yield _Block(start, end, first_key, first_query, groups, options)
        start = end


def slopes_on(slopes_a: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return slopes of ALiBi on a device; the host does not wait until a GPU has them."""
    host_a = torch.tensor(slopes_a, dtype=dtype)
    if device.type == "cuda":
        host_a = host_a.pin_memory()
    return host_a.to(device, non_blocking=True)


def _drop(prob_xyk: Tensor, dropout: float) -> tuple[Tensor, Tensor | None]:
    """Return probabilities after dropout, and the factor of each; ``None`` without dropout."""
    if not dropout:
        return prob_xyk, None
    used_xyk, kept_xyk = torch.ops.aten.native_dropout(prob_xyk, dropout, True)
    return used_xyk, kept_xyk / (1 - dropout)


def _generator_state(device: torch.device) -> Tensor:
    """Return the state of PyTorch's default generator of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _repeating(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Let the block draw the numbers after ``state`` again, then restore the generator."""
    if state is None:
        yield
        return
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if on_cuda else []):
        if on_cuda:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        yield
