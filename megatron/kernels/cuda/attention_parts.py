"""Attention in parts of the keys on a GPU: by cuDNN where it is the fastest, joined by one program.

On Hopper and newer GPUs cuDNN's attention is about twice as fast as version 2 of flash attention,
which PyTorch takes wherever there are fewer queries than keys. cuDNN, as PyTorch calls it, has no
mask for such queries: it knows *all keys* and *a causal square*. So attention of the last positions
is two calls, to the keys before the queries and to the queries' own keys. Both are put together by
their logarithms of sums (``reference/partial_attention.py``). Ring attention has such parts anyway.
A sink changes output and logarithm after the last part (``kernels/sinks.py``).

PyTorch caches the graphs that it builds of cuDNN by the sizes and strides of queries, keys and
values, and not by those of outputs and their gradients. So all of these are given to a backward in
the one layout that a forward gives its output: tokens before heads, without gaps.

Shapes: b batch, a query heads, g key/value heads, s positions of queries, z positions of keys, d
channels of a head.
"""

from typing import Any, Final

import torch
from torch import Tensor

from megatron.kernels.autograd import apply, once_differentiable
from megatron.kernels.cuda.library import Programs, operator
from megatron.kernels.cuda.operators import BLOCK, LAUNCH
from megatron.kernels.cuda.sizes import next_power_of_2, quotient
from megatron.kernels.reference.partial_attention import Attended, AttentionPart, Gradients
from megatron.kernels.sinks import sinks_gradient, with_sinks

programs = Programs("attention")

_LEAST_CUDNN: Final = 91501
"""The first cuDNN whose attention PyTorch 2.13 prefers to flash attention on Hopper and newer."""

_CAPABILITIES: Final = range(9, 11)
"""The major compute capabilities of GPUs on which PyTorch prefers cuDNN's attention: Hopper, and
Blackwell for data centres."""

_WIDEST_HEAD: Final = 128
"""The most channels of a head that cuDNN's attention takes on all of these GPUs."""

_CHANNELS_AT_ONCE: Final = 8
_FEWEST_KEYS: Final = 2
"""cuDNN's attention takes no single key."""

_aten = torch.ops.aten


def takes_cudnn(device: torch.device) -> bool:
    """Return whether PyTorch computes plain attention there by cuDNN, the faster way.

    If gradients must be summed in one order, PyTorch leaves cuDNN's attention alone. On GPUs of AMD
    the version is that of another library.
    """
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if not is_nvidia or torch.are_deterministic_algorithms_enabled():
        return False
    has_cudnn = (torch.backends.cudnn.version() or 0) >= _LEAST_CUDNN
    return has_cudnn and torch.cuda.get_device_capability(device)[0] in _CAPABILITIES


def knows_part(part: AttentionPart) -> bool:
    """Return whether cuDNN's attention takes such a part, wherever it is."""
    channels, dtype = part.q_basd.shape[3], part.q_basd.dtype
    fits = channels <= _WIDEST_HEAD and channels % _CHANNELS_AT_ONCE == 0
    is_plain = part.view is None and dtype in (torch.bfloat16, torch.float16)
    return is_plain and fits and part.k_bgzd.shape[2] >= _FEWEST_KEYS


def knows_seen(q_basd: Tensor, k_bgzd: Tensor) -> bool:
    """Return whether ``seen_attention`` computes attention of these queries to these keys."""
    return all(map(knows_part, _parts(q_basd, k_bgzd, k_bgzd, 1.0)))


def attend(part: AttentionPart) -> Attended:
    """Return attention to a part by cuDNN; see ``Kernels.attend_to_part``."""
    q_basd, k_bgzd, v_bgzd, is_causal, scale, _ = part
    out_basd, log_bas1, *_ = _aten._scaled_dot_product_cudnn_attention(
        _tokens_first(q_basd), k_bgzd, v_bgzd, None, True, 0.0, is_causal, False, scale=scale
    )
    return Attended(out_basd, log_bas1.flatten(2))


def gradients(part: AttentionPart, whole: Attended, grad_basd: Tensor) -> Gradients:
    """Return a part's summands of the gradients by cuDNN; see ``Kernels.gradients_of_part``."""
    q_basd, k_bgzd, v_bgzd, is_causal, scale, _ = part
    unused = torch.empty((), dtype=torch.int64, device=q_basd.device)  # seed of no dropout
    made: Gradients = _aten._scaled_dot_product_cudnn_attention_backward(
        _tokens_first(grad_basd),
        _tokens_first(q_basd),
        k_bgzd,
        v_bgzd,
        _tokens_first(whole.out_basd),
        whole.log_bas.contiguous().unsqueeze(-1),
        unused,
        unused,
        None,
        None,
        None,
        q_basd.shape[2],
        k_bgzd.shape[2],
        0.0,
        is_causal,
        scale=scale,
    )
    return made


def _tokens_first(t_basd: Tensor) -> Tensor:
    """Return a tensor whose tokens lie before its heads, without gaps; most lie so already."""
    return t_basd.transpose(1, 2).contiguous().transpose(1, 2)


@operator(
    "join_parts_(Tensor(a!) out_basd, Tensor(b!) log_bas, Tensor part_basd, Tensor part_log_bas) "
    "-> ()"
)
def join_parts_(out_basd: Tensor, log_bas: Tensor, part_basd: Tensor, part_log_bas: Tensor) -> None:
    """See ``programs.attention``."""
    b, a, s, d = out_basd.shape
    assert out_basd.stride(3) == part_basd.stride(3) == 1
    assert log_bas.stride(2) == part_log_bas.stride(2) == 1
    tile = joining_tile(d)
    programs.join_parts[(quotient(s, tile["QUERIES"]), b * a)](
        out_basd,
        log_bas,
        part_basd,
        part_log_bas,
        s,
        a,
        d,
        *out_basd.stride()[:3],
        *log_bas.stride()[:2],
        *part_basd.stride()[:3],
        *part_log_bas.stride()[:2],
        **tile,
        **LAUNCH,
    )


def joining_tile(channels: int) -> dict[str, int]:
    """Return the queries and channels that a program works on."""
    width = next_power_of_2(channels)
    return {"QUERIES": max(1, 2 * BLOCK // width), "CHANNELS": width}


def seen_attention(
    q_basd: Tensor, k_bgzd: Tensor, v_bgzd: Tensor, sinks_a: Tensor | None, scale: float
) -> Tensor:
    """Return causal attention whose scores are scaled products, in one part or two, by cuDNN.

    Args:
        q_basd: queries of the last s of z positions; ``knows_seen`` says which are possible.
        k_bgzd: keys.
        v_bgzd: values.
        sinks_a: see ``Kernels.causal_attention``.
        scale: factor of the products.
    """
    return apply(_SeenAttention, q_basd, k_bgzd, v_bgzd, sinks_a, scale)


def _parts(
    q_basd: Tensor, k_bgzd: Tensor, v_bgzd: Tensor, scale: float
) -> tuple[AttentionPart, ...]:
    """Return the causal square of queries and their own keys, then the keys before it, if any."""
    before = k_bgzd.shape[2] - q_basd.shape[2]
    square = AttentionPart(q_basd, k_bgzd[:, :, before:], v_bgzd[:, :, before:], True, scale)
    if not before:
        return (square,)
    return square, AttentionPart(q_basd, k_bgzd[:, :, :before], v_bgzd[:, :, :before], False, scale)


class _SeenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_basd: Tensor,
        k_bgzd: Tensor,
        v_bgzd: Tensor,
        sinks_a: Tensor | None,
        scale: float,
    ) -> Tensor:
        square, *before = _parts(q_basd, k_bgzd, v_bgzd, scale)
        out_basd, log_bas = attend(square)
        for part in before:
            join_parts_(out_basd, log_bas, *attend(part))
        if sinks_a is not None:
            out_basd, log_bas = with_sinks(out_basd, log_bas, sinks_a)
        ctx.save_for_backward(q_basd, k_bgzd, v_bgzd, out_basd, log_bas, sinks_a)
        ctx.scale = scale
        return out_basd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_basd: Tensor) -> tuple[Tensor | None, ...]:
        q_basd, k_bgzd, v_bgzd, out_basd, log_bas, sinks_a = ctx.saved_tensors
        # Each part reads output and logarithm of all keys, the sinks among them.
        whole = Attended(out_basd, log_bas)
        square, *before = _parts(q_basd, k_bgzd, v_bgzd, ctx.scale)
        q_grad, *own = gradients(square, whole, grad_basd)
        for part in before:
            more, *earlier = gradients(part, whole, grad_basd)
            q_grad.add_(more)
            own = [_behind(*both) for both in zip(earlier, own, strict=True)]
        sinks_grad_a = None
        if sinks_a is not None:
            sinks_grad_a = sinks_gradient(grad_basd, out_basd, log_bas, sinks_a)
        return q_grad, *own, sinks_grad_a, None


def _behind(earlier_bgzd: Tensor, own_bgsd: Tensor) -> Tensor:
    """Return gradients of a slice's own keys behind those of earlier ones, tokens before heads."""
    both = earlier_bgzd.transpose(1, 2), own_bgsd.transpose(1, 2)
    return torch.cat(both, 1).transpose(1, 2)
