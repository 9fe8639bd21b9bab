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
from itertools import accumulate
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from megatron.kernels.documents import Documents

_ALIGNED: Final = 16
"""Bytes: every tensor in a buffer begins at a multiple of them."""


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
        """The first position of every token's document, int64 [b, s]; ``None``: all are as one.

        Of ranks that share sequences, each has those of whole ones.
        """

    @property
    def positions(self) -> Tensor | None:
        """Of every token, int64, [b, s] or [1, s]; ``None``: 0, 1, 2, ... in its sample."""

    @property
    def valid_share(self) -> float | None:
        """Predictions of whole samples that count, divided by the ranks that share the samples.

        ``None``: nobody shares them.
        """


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
        positions_bs: of every token, [b, s], sample by sample, or [1, s] if all have the same;
            ``None``: 0, 1, 2, ... in each.
        ahead_n: ids of the tokens that follow, if further ones are predicted (``with_depths``).
        mean_weight: weight of a loss that is a mean over this rank's tokens, a number of the host:
            what ``weight_n`` would add up to if the tokens that count were spread evenly over the
            ranks that share the samples.
    """

    tokens_n: Tensor
    targets_n: Tensor
    weight_n: Tensor
    samples: int
    valid_tokens: float
    documents: Documents | None = None
    positions_bs: Tensor | None = None
    ahead_n: Tensor | None = None
    mean_weight: float = 0.0

    def part_by_part(self, parts: int) -> "DeviceMicrobatch":
        """Return the same with its tokens in the order that sequence parallelism leaves them in.

        Activations that are gathered from the ranks are not put back into the order of samples,
        which would cost a copy of each: the first part of every sample comes first, then the
        second part of every sample, and so on. Whoever works token by token needs no other order.

        Every sample is cut into ``parts``; with one nothing changes.
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
    """Return a tensor of tokens flattened: the first part of every sample, then the second, ..."""
    return tensor.reshape(samples, parts, -1).transpose(0, 1).flatten()


@dataclass(frozen=True, eq=False)
class HostStep:
    """An iteration's microbatches on the host, all their tensors in one buffer.

    Attributes:
        buffer: bytes of all tensors, the weights last.
        microbatches: as on the device, but for their weights, which are the masks and their sums.
        places: where each tensor begins in the buffer, in the order of ``_tensors``.
    """

    buffer: Tensor
    microbatches: Sequence[DeviceMicrobatch]
    places: Sequence[int]

    @classmethod
    def of(cls, microbatches: Sequence[HostMicrobatch], device: torch.device) -> "HostStep":
        """Pack microbatches that are to go to ``device``."""
        flat = [_on_host(microbatch) for microbatch in microbatches]
        tensors = _tensors(flat)
        *places, end = accumulate((_room(tensor) for tensor in tensors), initial=0)
        buffer = _memory(end, device)
        for tensor, place in zip(tensors, places, strict=True):
            buffer[place : place + tensor.nbytes].copy_(tensor.flatten().view(torch.uint8))
        return cls(buffer, flat, places)

    def on(
        self, buffer: Tensor, dtype: torch.dtype, *, replicas: int, loss_scale: float
    ) -> list[DeviceMicrobatch]:
        """Return the microbatches whose tensors lie in ``buffer``, a copy of the own one.

        The buffer may be on any device, and longer; further arguments as of ``to_device``, with
        ``dtype`` that of the weights.
        """
        scale = loss_scale / (replicas * sum(m.tokens_n.numel() for m in self.microbatches))
        tensors = _tensors(self.microbatches)
        exact = len(tensors) - len(self.microbatches)
        found = [
            buffer[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, place in zip(tensors[:exact], self.places, strict=False)
        ]
        first, end = self.places[exact], self.buffer.numel()
        weights = buffer[first:end].view(torch.float32).to(dtype) * scale
        for tensor, place in zip(tensors[exact:], self.places[exact:], strict=True):
            begin = (place - first) // tensor.itemsize
            found.append(weights[begin : begin + tensor.numel()])
        scaled = [replace(m, mean_weight=m.mean_weight * scale) for m in self.microbatches]
        return _with_tensors(scaled, found)


def _on_host(microbatch: HostMicrobatch) -> DeviceMicrobatch:
    """Return a microbatch as it is to be on the device, with its mask for weights."""
    starts, share = microbatch.document_starts, microbatch.valid_share
    valid = float(microbatch.loss_mask.sum(dtype=torch.float64))
    return DeviceMicrobatch(
        microbatch.tokens.flatten(),
        microbatch.labels.flatten(),
        microbatch.loss_mask.flatten().to(torch.float32),
        len(microbatch.tokens),
        valid,
        None if starts is None else Documents.of(starts, lambda tensor: tensor),
        microbatch.positions,
        mean_weight=valid if share is None else share,
    )


def _tensors(microbatches: Sequence[DeviceMicrobatch]) -> list[Tensor]:
    """Return all tensors that go to the device: microbatch by microbatch, then their weights."""
    found = []
    for microbatch in microbatches:
        found += [microbatch.tokens_n, microbatch.targets_n]
        if microbatch.documents is not None:
            found += [microbatch.documents.first_bs, microbatch.documents.bounds_k]
        if microbatch.positions_bs is not None:
            found.append(microbatch.positions_bs)
    return [*found, *(microbatch.weight_n for microbatch in microbatches)]


def _with_tensors(
    microbatches: Sequence[DeviceMicrobatch], tensors: Sequence[Tensor]
) -> list[DeviceMicrobatch]:
    """Return the same microbatches with other tensors, in the order of ``_tensors``."""
    others, weights = iter(tensors), tensors[len(tensors) - len(microbatches) :]
    return [
        replace(
            microbatch,
            tokens_n=next(others),
            targets_n=next(others),
            documents=microbatch.documents
            and replace(microbatch.documents, first_bs=next(others), bounds_k=next(others)),
            positions_bs=None if microbatch.positions_bs is None else next(others),
            weight_n=weight_n,
        )
        for microbatch, weight_n in zip(microbatches, weights, strict=True)
    ]


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
        device: to move to; a GPU gets all of them in one copy.
        dtype: of the weights.
        replicas: ranks with other tokens than these; each has as many.
        loss_scale: of fp16; so no tensor is scaled on its own.
    """
    step = HostStep.of(microbatches, device)
    moved = step.buffer.to(device, non_blocking=True)
    return step.on(moved, dtype, replicas=replicas, loss_scale=loss_scale)


def rescaled(microbatches: Sequence[DeviceMicrobatch], factor: float) -> list[DeviceMicrobatch]:
    """Return the same microbatches with another loss scale, ``factor`` times theirs."""
    return [
        replace(m, weight_n=m.weight_n * factor, mean_weight=m.mean_weight * factor)
        for m in microbatches
    ]


def token_counts(microbatches: Sequence[DeviceMicrobatch]) -> tuple[float, float]:
    """Return the number of tokens of some microbatches, and of those whose loss counts."""
    tokens = sum(m.tokens_n.numel() for m in microbatches)
    return float(tokens), sum(m.valid_tokens for m in microbatches)


def _room(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in a buffer, so that the next one is aligned."""
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def _memory(size: int, device: torch.device) -> Tensor:
    """Return so many bytes of the host's memory, from which ``device`` copies without a wait."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
