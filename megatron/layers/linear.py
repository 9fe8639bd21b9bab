"""Linear layers whose weights are drawn once, by the model's own initialisation."""

import torch
from torch import nn


def build_linear(
    in_features: int, out_features: int, *, bias: bool, device: torch.device, dtype: torch.dtype
) -> nn.Linear:
    """A ``torch.nn.Linear`` with memory but no values.

    The default initialisation would draw every weight a first time, from the wrong generator:
    seconds per stage for a large model. ``megatron.model.init`` sets the values.

    Args:
        in_features: columns of the weight.
        out_features: rows of the weight.
        bias: whether a bias is added.
        device: where the parameters live.
        dtype: type of the parameters.
    """
    with torch.device("meta"):
        linear = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    return linear.to_empty(device=device)
