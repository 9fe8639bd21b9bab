"""Attention with query groups by a kernel that knows none: values, bits, and what is kept.

CUDA's memory-efficient kernel does not run on a CPU. Plain products stand in for it here, with its
arguments; so how the kernel is called is tested, and not the kernel.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.counted import counted_kernels
from megatron.kernels.reference.grouped_attention import grouped_attention, knows_repeated
from megatron.kernels.scores import Scores

B, HEADS, S, Z, D = 2, 4, 6, 10, 8
_aten = torch.ops.aten


def scores(q_bsad: Tensor, k_bzad: Tensor, mask: int, scale: float | None) -> Tensor:
    """Return the scores [b, a, s, z]; mask 1 begins at the first key, mask 2 ends at the last."""
    s, z = q_bsad.shape[1], k_bzad.shape[1]
    product_basz = torch.einsum("bsad,bzad->basz", q_bsad, k_bzad)
    seen_sz = torch.ones(s, z, dtype=torch.bool).tril(z - s if mask == 2 else 0)
    factor = q_bsad.shape[3] ** -0.5 if scale is None else scale
    return (factor * product_basz).masked_fill(~seen_sz, -torch.inf)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: None, a: None, b: None, c: None, d: None,
    dropout: float, mask: int, keeps_sums: bool = False, *, scale: float | None = None, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Stand in for the forward; tensors are [b, s, a, d]."""
    assert keeps_sums
    assert dropout == 0.0
    assert q.shape[2] == k.shape[2] == v.shape[2], "the kernel knows no groups"
    score_basz = scores(q, k, mask, scale)
    out_bsad = torch.einsum("basz,bzad->bsad", score_basz.softmax(-1), v)
    number = torch.zeros((), dtype=torch.int64)
    return out_bsad, score_basz.logsumexp(-1), number, number, q.shape[1], k.shape[1]


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, a: None, b: None,
    queries: int, keys: int, sums: Tensor, dropout: float, seed: Tensor, offset: Tensor, mask: int,
    of_bias: bool, *, scale: float | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Stand in for the backward, which forms the probabilities again from their sums."""
    assert (queries, keys) == (q.shape[1], k.shape[1])
    prob_basz = (scores(q, k, mask, scale) - sums.unsqueeze(-1)).exp()
    dv = torch.einsum("basz,bsad->bzad", prob_basz, grad)
    along_bas = (grad * out).sum(-1).transpose(1, 2)
    dprob_basz = torch.einsum("bsad,bzad->basz", grad, v) - along_bas.unsqueeze(-1)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    dscore_basz = factor * prob_basz * dprob_basz
    dq = torch.einsum("basz,bzad->bsad", dscore_basz, k)
    return dq, torch.einsum("basz,bsad->bzad", dscore_basz, q), dv, torch.zeros(())


@pytest.fixture(autouse=True)
def kernel() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_efficient_attention_forward", forward, "CPU")
    library.impl("_efficient_attention_backward", backward, "CPU")
    yield
    library._destroy()


def operands(groups: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(heads: int, length: int) -> Tensor:
        return torch.randn(B, heads, length, D, generator=generator).requires_grad_()

    return draw(HEADS, queries), draw(groups, Z), draw(groups, Z)


def attend_repeated(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Let autograd keep the repeated keys and values, as it does if they are made outside."""
    heads = [q, *(t.repeat_interleave(HEADS // t.shape[1], dim=1) for t in (k, v))]
    mask = 1 if q.shape[2] == k.shape[2] else 2
    turned = [t.transpose(1, 2) for t in heads]
    made = _aten._efficient_attention_forward(
        *turned, None, None, None, None, None, 0.0, mask, True, scale=scale
    )
    out: Tensor = made[0].transpose(1, 2)
    return out


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    k_bazd, v_bazd = (t.repeat_interleave(HEADS // t.shape[1], dim=1) for t in (k, v))
    seen = torch.ones(q.shape[2], Z, dtype=torch.bool).tril(Z - q.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(q, k_bazd, v_bazd, seen, scale=scale)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("queries", [S, Z])
@pytest.mark.parametrize("groups", [1, 2])
def test_values_and_gradients_are_those_of_repeated_keys(
    groups: int, queries: int, scale: float | None
) -> None:
    """They have the bits of keys that are repeated outside, and are near plain attention's."""
    given = operands(groups, queries)
    grad = torch.randn(B, HEADS, queries, D)
    assert knows_repeated(given[0], given[1])
    found, same, plain = (
        (out, *torch.autograd.grad(out, given, grad))
        for out in (
            grouped_attention(*given, 0.0, scale),
            attend_repeated(*given, scale),
            attend_plainly(*given, scale),
        )
    )
    for own, other, near in zip(found, same, plain, strict=True):
        assert torch.equal(own, other)
        torch.testing.assert_close(own, near, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 2])
def test_only_the_keys_of_groups_are_kept(groups: int) -> None:
    """Slices share the memory of their keys, so it must be that memory which is kept."""
    kept = list[Tensor]()

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    given = operands(groups, S)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        out = grouped_attention(*given, 0.0, None)
    addresses = {tensor.untyped_storage().data_ptr() for tensor in (*given, out)}
    others = [one for one in kept if one.untyped_storage().data_ptr() not in addresses]
    assert len(kept) == 7
    assert sum(one.numel() for one in others) == B * HEADS * S + 1 + 1  # sums, seed and offset


@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_count_keeps_the_keys_of_groups_too(scale: float | None) -> None:
    q, k, v = (t.detach().to("meta").requires_grad_() for t in operands(2, S))
    kept = list[Tensor]()

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        out = counted_kernels(torch.float32).causal_attention(
            q, k, v, options=AttentionOptions(Scores(scale=scale))
        )
    out.backward(torch.empty_like(out))
    assert max(tensor.numel() for tensor in kept) == q.numel()
    assert sum(tensor.shape == k.shape for tensor in kept) == 2
    assert k.grad is not None
    assert k.grad.shape == k.shape


@pytest.mark.parametrize(
    ("dtype", "heads", "channels"),
    [(torch.float32, 2, 8), (torch.bfloat16, 4, 8), (torch.float32, 4, 6)],
    ids=str,
)
def test_other_attention_is_not_for_it(dtype: torch.dtype, heads: int, channels: int) -> None:
    """No groups, a type that flash attention knows, or heads that are no 16 bytes wide."""
    q, k = (torch.empty(1, number, S, channels, dtype=dtype) for number in (heads, 2))
    assert not knows_repeated(q, k)
