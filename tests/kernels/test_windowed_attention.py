"""Attention in windows and with sinks by PyTorch's flash attention: its kernel for CPUs stands in.

It forms the probabilities of the backward from the log-sum-exp that it is given, as CUDA's does,
but has no windows and no documents: a mask and the formula take their place.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from kernels.formulas import explicit_documents, first_positions
from kernels.test_packed_attention import OnCuda
from torch import Tensor

from megatron.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from megatron.kernels.documents import Documents
from megatron.kernels.reference import windowed_attention as windowed
from megatron.kernels.reference.windowed_attention import (
    can_window,
    knows_window,
    windowed_attention,
)
from megatron.kernels.scores import PLAIN, Scores

SEQ = 7
STARTS = ([0, 1, 4], [0], [0, 6])
_aten = torch.ops.aten


def mask_of(queries: int, keys: int, left: int) -> Tensor:
    behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    seen = (behind >= 0) & ((behind <= left) if left >= 0 else True)
    return torch.zeros(queries, keys, dtype=torch.float64).masked_fill(~seen, -torch.inf)


def spans(bounds: Tensor | None, length: int) -> list[tuple[int, int]]:
    return [(0, length)] if bounds is None else list(pairwise(bounds.tolist()))


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    """PyTorch's signature: heads [b, s, a, d] and sums [b, a, s], or [n, a, d] and [a, n]."""
    assert (dropout_p, is_causal, window_size_right) == (0.0, True, 0)
    rows = [t if t.dim() == 4 else t[None] for t in (q, k, v)]
    copies = rows[0].shape[2] // rows[1].shape[2]
    outs, sums = [], []
    for begin, end in spans(cum_seq_q, q.shape[-3]):
        shift = k.shape[-3] - q.shape[-3]
        own = [t[:, begin : end + (shift if i else 0)].transpose(1, 2) for i, t in enumerate(rows)]
        own[1:] = [t.repeat_interleave(copies, 1) for t in own[1:]]
        mask = mask_of(own[0].shape[2], own[1].shape[2], window_size_left)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            *own, 0.0, False, attn_mask=mask, scale=scale
        )
        outs.append(out.transpose(1, 2))
        sums.append(lse.double())
    empty = torch.empty(0)
    out, lse = torch.cat(outs, 1).contiguous(), torch.cat(sums, -1)
    return out.view_as(q), lse if q.dim() == 4 else lse[0], empty, empty, empty


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    rows = [t if t.dim() == 4 else t[None] for t in (grad, q, k, v, out)]
    copies, shift = q.shape[-2] // k.shape[-2], k.shape[-3] - q.shape[-3]
    sums = lse if lse.dim() == 3 else lse[None]
    found: list[list[Tensor]] = [[], [], []]
    for begin, end in spans(cum_seq_q, q.shape[-3]):
        last = [end, end, end + shift, end + shift, end]
        own = [t[:, begin:e].transpose(1, 2) for t, e in zip(rows, last, strict=True)]
        own[2:4] = [t.repeat_interleave(copies, 1) for t in own[2:4]]
        mask = mask_of(own[1].shape[2], own[2].shape[2], window_size_left)
        part = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *own, sums[..., begin:end].contiguous(), 0.0, False, attn_mask=mask, scale=scale
        )
        for made, tensor in zip(found, part, strict=True):
            made.append(tensor.transpose(1, 2))
    dq, dk, dv = (torch.cat(made, 1) for made in found)
    dk, dv = (t.unflatten(2, (-1, copies)).sum(3) for t in (dk, dv))
    return dq.view_as(q), dk.view_as(k), dv.view_as(v)


@pytest.mark.parametrize(("queries", "apart"), [(SEQ, False), (3, False), (SEQ, True)])
@pytest.mark.parametrize("scores", [PLAIN, Scores(scale=0.3, window=2)], ids=str)
@pytest.mark.parametrize("sunk", [True, False], ids=["sinks", "no sinks"])
def test_output_and_gradients_are_those_of_the_formula(
    sunk: bool, scores: Scores, apart: bool, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink is one more column of scores."""
    kernel = SimpleNamespace(
        _flash_attention_forward=flash_forward, _flash_attention_backward=flash_backward
    )
    monkeypatch.setattr(windowed, "_aten", kernel)
    inputs = [torch.randn(3, heads, SEQ, 8).double().requires_grad_() for heads in (4, 2, 2)]
    sinks = torch.randn(4).double().requires_grad_() if sunk else None
    given = inputs if sinks is None else [*inputs, sinks]
    starts = STARTS if apart else ([0], [0], [0])
    documents = Documents.of(first_positions(STARTS, SEQ), lambda t: t) if apart else None
    q, k, v = inputs
    own = windowed_attention(
        q[:, :, -queries:], k, v, AttentionOptions(scores, 0.0, documents, sinks)
    )
    want = explicit_documents(q, k, v, starts=starts, scores=scores, sinks=sinks)[:, :, -queries:]
    torch.testing.assert_close(own, want)
    grad = torch.randn_like(want)
    for one, other in zip(
        torch.autograd.grad(own, given, grad),
        torch.autograd.grad(want, given, grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_what_the_kernel_does_not_compute() -> None:
    documents = Documents.of(first_positions(STARTS, SEQ), lambda t: t)
    heads = torch.zeros(3, 4, SEQ, 8, dtype=torch.bfloat16)
    assert knows_window(heads, heads, AttentionOptions(Scores(window=3), documents=documents))
    assert not knows_window(heads[:, :, 2:], heads, AttentionOptions(documents=documents))
    assert not knows_window(heads, heads, AttentionOptions(Scores(softcap=2.0)))
    assert not knows_window(heads, heads, AttentionOptions(dropout=0.1))
    assert not can_window(heads, heads, PLAIN_ATTENTION), "a CPU"


@pytest.mark.parametrize(("capability", "takes"), [((8, 0), True), ((7, 5), False)])
def test_only_gpus_with_flash_attention_take_it(
    capability: tuple[int, int], takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    heads: Tensor = OnCuda()  # type: ignore[assignment] # as much of a tensor as is asked
    assert can_window(heads, heads, PLAIN_ATTENTION) == takes
