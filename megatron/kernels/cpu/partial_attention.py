"""Attention to a part of the keys by PyTorch's flash attention of CPUs, which takes any type."""

import torch
from torch import Tensor

from megatron.kernels.reference.partial_attention import Attended, AttentionPart, Gradients

_aten = torch.ops.aten


def host_flash(part: AttentionPart) -> Attended:
    """See ``Kernels.attend_to_part``."""
    q_basd, k_bgzd, v_bgzd, is_causal, scale, _ = part
    made = _aten._scaled_dot_product_flash_attention_for_cpu(
        q_basd, k_bgzd, v_bgzd, 0.0, is_causal, scale=scale
    )
    return Attended(*made)


def host_flash_gradients(part: AttentionPart, whole: Attended, grad_basd: Tensor) -> Gradients:
    """See ``Kernels.gradients_of_part``."""
    q_basd, k_bgzd, v_bgzd, is_causal, scale, _ = part
    made: Gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_basd, q_basd, k_bgzd, v_bgzd, *whole, 0.0, is_causal, scale=scale
    )
    return made
