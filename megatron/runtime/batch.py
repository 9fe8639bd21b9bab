"""One iteration's microbatches on the device, with the weight of every token's loss.

The weight g is the token's mask times the loss scale, divided by the number of *all* tokens of the
global batch; every rank knows them without asking. How many tokens count is known at the end of the
iteration only, over all replicas (``megatron.optimizer.global_state``); losses and gradients are
scaled then.

With multi-token prediction the same tokens are further samples of the output layer, one for every
depth: depth k predicts the label k positions on. Its loss is, as in Megatron, the mean over those
of a microbatch whose label counts there; positions without such a label have weight 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from megatron.kernels.documents import Documents


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

    @property
    def document_starts(self) -> Tensor | None:
        """The first position of every token's document, int64 [b, s]; ``None``: all are as one."""

    @property
    def positions(self) -> Tensor | None:
        """Of every token in its document, int64 [b, s]; ``None``: in its sample."""


@dataclass(frozen=True)
class DeviceMicrobatch:
    """A microbatch on the device, as the passes read it.

    Attributes:
        tokens_n: input ids, flattened: sample by sample, or as ``part_by_part`` tells.
        targets_n: target ids.
        weight_n: g, the weight of each token's loss: the token's mask times the loss scale, divided
            by the number of tokens of the global batch.
        samples: b, a number of the host.
        valid_tokens: sum of the mask, a number of the host.
        documents: none of which sees another; ``None``: tokens see all earlier ones.
        positions_bs: of every token, [b, s], sample by sample; ``None``: 0, 1, 2, ... in each.
        ahead_n: ids of the tokens that follow, if further ones are predicted (``with_depths``).
    """

    tokens_n: Tensor
    targets_n: Tensor
    weight_n: Tensor
    samples: int
    valid_tokens: float
    documents: Documents | None = None
    positions_bs: Tensor | None = None
    ahead_n: Tensor | None = None

    def part_by_part(self, parts: int) -> "DeviceMicrobatch":
        """Return the same with its tokens in the order that sequence parallelism leaves them in.

        Activations that are gathered from the ranks are not put back into the order of samples,
        which would cost a copy of each: the first part of every sample comes first, then the
        second part of every sample, and so on. Whoever works token by token needs no other order.

        Args:
            parts: into which every sample is cut; with 1 nothing changes.
        """
        assert self.ahead_n is None, "further tokens come last"
        if parts == 1:
            return self
        return replace(
            self,
            tokens_n=_by_parts(self.tokens_n, self.samples, parts),
            targets_n=_by_parts(self.targets_n, self.samples, parts),
            weight_n=_by_parts(self.weight_n, self.samples, parts),
        )

    def with_depths(self, depths: int, factor: float, parts: int) -> "DeviceMicrobatch":
        """Return the same ``part_by_part``, with what multi-token prediction adds.

        Targets and weights then have b further samples for every depth. The ids ahead are, for
        every part of every sample, the part itself from its second token on and as many tokens
        more as there are depths; after the end of a sample they are 0, as in Megatron.

        Args:
            depths: D, 1 or more.
            factor: weight of the mean of the depths' losses.
            parts: into which every sample is cut.
        """
        ids_bs, *rest = (
            tensor_n.view(self.samples, -1)
            for tensor_n in (self.tokens_n, self.targets_n, self.weight_n)
        )
        targets_bs, weight_bs = rest
        targets, weights = [targets_bs], [weight_bs]
        for depth in range(1, depths + 1):
            shifted_bs = functional.pad(weight_bs[:, depth:], (0, depth))
            # The mean over what is left counts as the mean over all: both are sums until the end.
            share = weight_bs.sum() / shifted_bs.sum()
            share = torch.where(share.isfinite(), share, 0) * (factor / depths)
            targets.append(functional.pad(targets_bs[:, depth:], (0, depth)))
            weights.append(shifted_bs * share)
        length, samples = ids_bs.shape[1] // parts, (1 + depths) * self.samples
        ahead = functional.pad(ids_bs[:, 1:], (0, depths)).unfold(1, length + depths - 1, length)
        return replace(
            self,
            tokens_n=_by_parts(self.tokens_n, self.samples, parts),
            targets_n=_by_parts(torch.cat(targets), samples, parts),
            weight_n=_by_parts(torch.cat(weights), samples, parts),
            ahead_n=ahead.transpose(0, 1).flatten(),
        )


def _by_parts(tensor: Tensor, samples: int, parts: int) -> Tensor:
    """Return what tokens have, flattened: the first part of every sample, then the second, ..."""
    return tensor.reshape(samples, parts, -1).transpose(0, 1).flatten()


def to_device(
    microbatches: Sequence[HostMicrobatch],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    replicas: int = 1,
    loss_scale: float = 1.0,
) -> list[DeviceMicrobatch]:
    """Move an iteration's microbatches to ``device`` and derive the loss weights in ``dtype``.

    Args:
        microbatches: of this replica.
        device: to move to.
        dtype: of the weights.
        replicas: number of replicas; each has as many microbatches.
        loss_scale: of fp16; so no tensor is scaled on its own.
    """
    scale = loss_scale / (replicas * sum(m.tokens.numel() for m in microbatches))
    tokens = [m.tokens.flatten() for m in microbatches]
    labels = [m.labels.flatten() for m in microbatches]
    weights = [m.loss_mask.flatten().to(dtype) * scale for m in microbatches]
    moved = _together([*tokens, *labels, *weights], device)
    count, move = len(microbatches), partial(_moved, device=device)
    return [
        DeviceMicrobatch(
            moved[number],
            moved[count + number],
            moved[2 * count + number],
            len(m.tokens),
            float(m.loss_mask.sum(dtype=torch.float64)),
            None if m.document_starts is None else Documents.of(m.document_starts, move),
            None if m.positions is None else move(m.positions),
        )
        for number, m in enumerate(microbatches)
    ]


def rescaled(microbatches: Sequence[DeviceMicrobatch], factor: float) -> list[DeviceMicrobatch]:
    """Return the same microbatches with another loss scale, ``factor`` times theirs."""
    return [replace(m, weight_n=m.weight_n * factor) for m in microbatches]


def token_counts(microbatches: Sequence[DeviceMicrobatch]) -> tuple[float, float]:
    """Return the number of tokens of some microbatches, and of those whose loss counts."""
    tokens = sum(m.tokens_n.numel() for m in microbatches)
    return float(tokens), sum(m.valid_tokens for m in microbatches)


def _together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return one-dimensional ``tensors`` on ``device``; to a GPU all of them go in one copy.

    Args:
        tensors: none has wider elements than one before it, so that all lie at multiples of their
            elements' sizes.
        device: to move to.
    """
    if device.type == "cpu":
        return [tensor.to(device) for tensor in tensors]
    moved = _moved(torch.cat([tensor.view(torch.uint8) for tensor in tensors]), device)
    parts = moved.split([tensor.nbytes for tensor in tensors])
    return [part.view(own.dtype) for part, own in zip(parts, tensors, strict=True)]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; the host does not wait for a copy to a GPU."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from pageable memory the host would wait
    return tensor.to(device, non_blocking=True)
