"""The backward of a norm from the statistics of its rows, in fp32 or better.

Shapes: n rows, h their length.
"""

import torch
from torch import Tensor


def norm_backward(
    x: Tensor,
    weight_h: Tensor,
    mean_n: Tensor | None,
    inverse_n: Tensor,
    grad: Tensor,
    stream_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See ``Kernels.norm_backward``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed_nh, grad_nh = (t.reshape(-1, x.shape[-1]).to(wide) for t in (x, grad))
    if mean_n is not None:
        normed_nh = normed_nh - mean_n[:, None]
    normed_nh = normed_nh * inverse_n[:, None]
    weight_grad_h = (grad_nh * normed_nh).sum(0).to(weight_h.dtype)
    bias_grad_h = None if mean_n is None else grad_nh.sum(0).to(weight_h.dtype)
    grad_nh = grad_nh * weight_h
    along_nh = grad_nh - normed_nh * (grad_nh * normed_nh).mean(-1, keepdim=True)
    if mean_n is not None:
        along_nh -= grad_nh.mean(-1, keepdim=True)
    x_grad = (along_nh * inverse_n[:, None]).view(x.shape)
    if stream_grad is not None:
        x_grad = x_grad + stream_grad
    return x_grad.to(x.dtype), weight_grad_h, bias_grad_h
