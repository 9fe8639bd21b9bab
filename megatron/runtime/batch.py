"""One iteration's microbatches on the device, with the weight of every token's loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class HostMicrobatch(Protocol):
    """What training reads of a microbatch, see ``megatron.data.microbatch.Microbatch``."""

    @property
    def tokens(self) -> Tensor:
        """Input ids, int64 [b, s]."""

    @property
    def labels(self) -> Tensor:
        """The token after each input, int64 [b, s]."""

    @property
    def loss_mask(self) -> Tensor:
        """1 where the prediction counts, 0 where it does not, float32 [b, s]."""


@dataclass(frozen=True)
class DeviceMicrobatch:
    """A microbatch on the device, as the passes read it.

    Attributes:
        tokens_bs: input ids.
        targets_n: target ids, flattened.
        weight_n: g, the weight of each token's loss: the token's mask divided by the number of
            valid tokens of the iteration. The sum of weighted losses is the mean over these tokens.
    """

    tokens_bs: Tensor
    targets_n: Tensor
    weight_n: Tensor


def to_device(
    microbatches: Sequence[HostMicrobatch], device: torch.device, dtype: torch.dtype = torch.float32
) -> list[DeviceMicrobatch]:
    """Move an iteration's microbatches to ``device`` and derive the loss weights in ``dtype``.

    If no token of the iteration counts, all weights are zero.
    """
    valid = sum(float(m.loss_mask.sum(dtype=torch.float64)) for m in microbatches)
    scale = 1.0 / valid if valid else 0.0
    return [
        DeviceMicrobatch(
            _moved(m.tokens, device),
            _moved(m.labels.flatten(), device),
            _moved(m.loss_mask.flatten().to(dtype) * scale, device),
        )
        for m in microbatches
    ]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; the host does not wait for a copy to a GPU."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from pageable memory the host would wait
    return tensor.to(device, non_blocking=True)
