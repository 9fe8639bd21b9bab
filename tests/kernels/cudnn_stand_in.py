"""Stand-ins for PyTorch's two operators of cuDNN's attention, by its flash attention of CPUs.

The signatures are those of ``aten::_scaled_dot_product_cudnn_attention`` of PyTorch 2.13, and of
its backward. Like them, the backward forms probabilities from the log-sum-exp that it is given. The
output has the layout of the queries, and the log-sum-exp has a last dimension of 1.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


class Cudnn:
    """The operators; ``calls`` has the way, keys and mask of every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, bool]] = []

    @property
    def aten(self) -> Any:
        """Takes the place of ``torch.ops.aten``."""
        return SimpleNamespace(
            _scaled_dot_product_cudnn_attention=self.forward,
            _scaled_dot_product_cudnn_attention_backward=self.backward,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        self.calls.append(("forward", key.shape[2], is_causal))
        self._expect(query, key, is_causal)
        assert (attn_bias, compute_log_sumexp, dropout_p, return_debug_mask) == (None, 1, 0, 0)
        out, log = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
        laid = torch.empty_like(query).copy_(out)
        seed = torch.empty((), dtype=torch.int64)
        sizes = query.shape[2], key.shape[2]
        return laid, log.contiguous().unsqueeze(-1), None, None, *sizes, seed, seed, None

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        philox_seed: Tensor,
        philox_offset: Tensor,
        attn_bias: None,
        cum_seq_q: None,
        cum_seq_k: None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        self.calls.append(("backward", key.shape[2], is_causal))
        self._expect(query, key, is_causal)
        self._expect(grad_out, key, is_causal)
        self._expect(out, key, is_causal)
        assert (attn_bias, cum_seq_q, cum_seq_k, dropout_p) == (None, None, None, 0)
        assert (max_q, max_k) == (query.shape[2], key.shape[2])
        assert logsumexp.shape == (*query.shape[:3], 1)
        assert logsumexp.is_contiguous()
        assert philox_seed.dtype == philox_offset.dtype == torch.int64
        made = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, logsumexp[..., 0], 0.0, is_causal, scale=scale
        )
        given = query, key, value
        return tuple(torch.empty_like(t).copy_(m) for t, m in zip(given, made, strict=True))

    @staticmethod
    def _expect(laid: Tensor, key: Tensor, is_causal: bool) -> None:
        """PyTorch's cache of graphs does not know the layouts of outputs and of gradients."""
        assert laid.transpose(1, 2).is_contiguous()
        assert key.shape[2] > 1, "cuDNN takes no single key"
        assert not is_causal or laid.shape[2] == key.shape[2], "its mask is from the first key on"
