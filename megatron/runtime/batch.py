"""One iteration's microbatches on the device, with the weight of every token's loss.

The weight g is the token's mask times the loss scale, divided by the number of *all* tokens of the
global batch, a number that every rank knows. The number of tokens that count is known only at the
end of the iteration, after a sum over all replicas (``megatron.optimizer.global_state``). Losses
and gradients are scaled then.

Megatron-LM's default gives every microbatch the same weight instead: its loss is the mean over its
own tokens that count. Every rank reads whole samples and knows these tokens, so g is the mask times
the loss scale, divided by them and by the number of microbatches of the global batch.

With multi-token prediction the output layer sees every sample again for every depth: depth k
predicts the label that stands k positions later. As in Megatron, a depth's loss is the mean over
the tokens of a microbatch whose label at that depth counts. All other tokens have weight 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from megatron.kernels.documents import Documents

_ALIGNED: Final = 16
"""Alignment in bytes: every tensor in a buffer begins at a multiple of it."""


class HostMicrobatch(Protocol):
    """The part of ``megatron.data.microbatch.Microbatch`` that training reads."""

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
        """The first position of every token's document, int64 [b, s]; ``None``: one per sample.

        Context-parallel ranks, which share sequences, each have the starts of whole sequences.
        """

    @property
    def positions(self) -> Tensor | None:
        """Position of every token, int64, [b, s] or [1, s]; ``None``: 0, 1, 2, ... per sample."""

    @property
    def valid_share(self) -> float | None:
        """Number of predictions that count in whole samples, for each rank that shares them.

        ``None``: every sample is whole on one rank.
        """

    @property
    def further(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The tokens after parts of samples: ids and targets of D depths [b, D, u], and their mask.

        ``None``: every sample is whole on one rank, or no further token is predicted.
        """


@dataclass(frozen=True)
class DeviceMicrobatch:
    """A microbatch on the device, as the passes read it.

    Attributes:
        tokens_n: input ids, flattened: sample by sample, or in the order of ``part_by_part``.
        targets_n: target ids.
        weight_n: g, the weight of each token's loss: the token's mask times the loss scale, divided
            by the number of tokens of the global batch.
        samples: b, known on the host.
        valid_tokens: sum of the mask, known on the host.
        documents: bounds that attention does not cross; ``None``: tokens see all earlier tokens.
        positions_bs: of every token, [b, s], sample by sample, or [1, s] if all samples have the
            same positions; ``None``: 0, 1, 2, ... in each sample.
        ahead_n: ids of the following tokens, for multi-token prediction (``with_depths``).
        mean_weight: weight of a loss that is a mean over this rank's tokens, known on the host. It
            is the sum that ``weight_n`` would have if the tokens that count were spread evenly
            over the ranks that share the samples.
        further: what follows parts of samples, as in ``HostMicrobatch``, with weights for the mask.
        loss_factor: if every microbatch has the same weight, the factor that turns this one's
            weighted loss into that with equal weights of all tokens; ``None``: all tokens have
            equal weights.
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
    further: tuple[Tensor, Tensor, Tensor] | None = None
    loss_factor: float | None = None

    @property
    def kept_by_layers(self) -> Iterator[Tensor]:
        """The tensors that layers may keep for their backward."""
        if self.documents is not None:
            yield from (self.documents.first_bs, self.documents.bounds_k)
        if self.positions_bs is not None:
            yield self.positions_bs

    def part_by_part(self, parts: int) -> "DeviceMicrobatch":
        """Return the microbatch with its tokens in the order that sequence parallelism gives them.

        An all-gather over the ranks puts the first part of every sample first, then the second
        part of every sample, and so on. Restoring the order of samples would cost a copy of each
        activation, and layers that work token by token do not need that order.

        Every sample is cut into ``parts``; with 1 part nothing changes.
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
        """Return the microbatch ``part_by_part``, with the data of multi-token prediction.

        Targets and weights get b further samples for every depth. ``ahead_n`` holds, for every
        part of every sample, the part's ids from its second token on, and then the D ids that
        follow the part. After the end of a sample the ids are 0, as in Megatron. Of ``further``,
        it holds for every part the ids of each depth.

        Args:
            depths: D, 1 or more.
            factor: weight of the mean of the depths' losses.
            parts: into which every sample is cut.
        """
        if self.further is not None:
            return self._with_further(*self.further, factor / depths, parts)
        ids_bs, *rest = (
            tensor_n.view(self.samples, -1)
            for tensor_n in (self.tokens_n, self.targets_n, self.weight_n)
        )
        targets_bs, weight_bs = rest
        targets, weights = [targets_bs], [weight_bs]
        for depth in range(1, depths + 1):
            shifted_bs = functional.pad(weight_bs[:, depth:], (0, depth))
            # Losses are sums until the end of the iteration. This factor gives the remaining tokens
            # the weight of all tokens, so that the sum becomes the mean over the remaining ones.
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

    def _with_further(
        self, ids_bdu: Tensor, targets_bdu: Tensor, weight_bdu: Tensor, factor: float, parts: int
    ) -> "DeviceMicrobatch":
        """Return ``with_depths`` of parts of samples, whose further tokens other ranks may have."""
        samples = (1 + ids_bdu.shape[1]) * self.samples

        def joined(own_n: Tensor, of_depths_bdu: Tensor) -> Tensor:
            return torch.cat((own_n, of_depths_bdu.transpose(0, 1).flatten()))

        return replace(
            self,
            tokens_n=_by_parts(self.tokens_n, self.samples, parts),
            targets_n=_by_parts(joined(self.targets_n, targets_bdu), samples, parts),
            weight_n=_by_parts(joined(self.weight_n, weight_bdu * factor), samples, parts),
            ahead_n=ids_bdu.unflatten(2, (parts, -1)).movedim(2, 0).flatten(),
            further=None,
        )


def _by_parts(tensor: Tensor, samples: int, parts: int) -> Tensor:
    """Return a tensor of tokens flattened: the first part of every sample, then the second, ..."""
    return tensor.reshape(samples, parts, -1).transpose(0, 1).flatten()


@dataclass(frozen=True, eq=False)
class HostStep:
    """An iteration's microbatches on the host, all their tensors in one buffer.

    Attributes:
        buffer: bytes of all tensors, the weights last.
        microbatches: as on the device, except that weights are masks and sums of masks.
        places: where each tensor begins in the buffer, in the order of ``_tensors``.
    """

    buffer: Tensor
    microbatches: Sequence[DeviceMicrobatch]
    places: Sequence[int]

    @classmethod
    def of(cls, microbatches: Sequence[HostMicrobatch], device: torch.device) -> "HostStep":
        """Pack microbatches for a copy to ``device``."""
        flat = [_on_host(microbatch) for microbatch in microbatches]
        tensors = _tensors(flat)
        *places, end = accumulate((_room(tensor) for tensor in tensors), initial=0)
        buffer = _memory(end, device)
        for tensor, place in zip(tensors, places, strict=True):
            buffer[place : place + tensor.nbytes].copy_(tensor.flatten().view(torch.uint8))
        return cls(buffer, flat, places)

    def on(
        self,
        buffer: Tensor,
        dtype: torch.dtype,
        *,
        replicas: int,
        loss_scale: float,
        by_microbatch: bool = False,
    ) -> list[DeviceMicrobatch]:
        """Return the microbatches with their tensors in ``buffer``, a copy of ``self.buffer``.

        The copy may be on any device, and may be longer. The other arguments are as in
        ``to_device``.
        """
        # The tokens of the global batch, masked ones too: each rank knows them without asking. The
        # step makes up for masked tokens (``GlobalState.factor``), or ``_weighed_alike`` does.
        scale = loss_scale / (replicas * sum(m.tokens_n.numel() for m in self.microbatches))
        tensors = _tensors(self.microbatches)
        exact = len(tensors) - len(_weights(self.microbatches))
        found = [
            buffer[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, place in zip(tensors[:exact], self.places, strict=False)
        ]
        first, end = self.places[exact], self.buffer.numel()
        weights = buffer[first:end].view(torch.float32).to(dtype) * scale
        for tensor, place in zip(tensors[exact:], self.places[exact:], strict=True):
            begin = (place - first) // tensor.itemsize
            found.append(weights[begin : begin + tensor.numel()].view(tensor.shape))
        scaled = [replace(m, mean_weight=m.mean_weight * scale) for m in self.microbatches]
        moved = _with_tensors(scaled, found)
        return _weighed_alike(moved, loss_scale / replicas) if by_microbatch else moved


def _weighed_alike(
    microbatches: Sequence[DeviceMicrobatch], total: float
) -> list[DeviceMicrobatch]:
    """Return microbatches with equal weights of tokens with equal weights of microbatches instead.

    A microbatch without a token that counts keeps its weights, which are 0. ``total`` is the sum of
    the weights that these microbatches get.
    """
    each, found = total / len(microbatches), []
    for own in microbatches:
        factor = each / own.mean_weight if own.mean_weight else 1.0
        weighed = rescaled([own], factor)[0]
        found.append(replace(weighed, mean_weight=each, loss_factor=1.0 / factor))
    return found


def _on_host(microbatch: HostMicrobatch) -> DeviceMicrobatch:
    """Return a microbatch in the form for the device, with the mask in place of the weights."""
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
        further=microbatch.further,
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
        if microbatch.further is not None:
            found += microbatch.further[:2]
    return [*found, *_weights(microbatches)]


def _weights(microbatches: Sequence[DeviceMicrobatch]) -> list[Tensor]:
    """Return the weights of all microbatches, those of further tokens behind a microbatch's own."""
    found = []
    for microbatch in microbatches:
        found.append(microbatch.weight_n)
        if microbatch.further is not None:
            found.append(microbatch.further[2])
    return found


def _with_tensors(
    microbatches: Sequence[DeviceMicrobatch], tensors: Sequence[Tensor]
) -> list[DeviceMicrobatch]:
    """Return the same microbatches with other tensors, in the order of ``_tensors``."""
    exact = len(tensors) - len(_weights(microbatches))
    others, weights = iter(tensors[:exact]), iter(tensors[exact:])
    return [
        replace(
            microbatch,
            tokens_n=next(others),
            targets_n=next(others),
            documents=microbatch.documents
            and replace(microbatch.documents, first_bs=next(others), bounds_k=next(others)),
            positions_bs=None if microbatch.positions_bs is None else next(others),
            weight_n=next(weights),
            further=microbatch.further and (next(others), next(others), next(weights)),
        )
        for microbatch in microbatches
    ]


def to_device(
    microbatches: Sequence[HostMicrobatch],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    replicas: int = 1,
    loss_scale: float = 1.0,
    by_microbatch: bool = False,
) -> list[DeviceMicrobatch]:
    """Move an iteration's microbatches to ``device`` and derive the loss weights in ``dtype``.

    Args:
        microbatches: of this replica.
        device: to move to; a GPU gets all of them in one copy.
        dtype: of the weights.
        replicas: number of replicas; each has other tokens, and the same number of them.
        loss_scale: of fp16; the weights contain it, so that no other tensor needs scaling.
        by_microbatch: give every microbatch the same weight, whatever number of its tokens counts;
            otherwise every token that counts has the same weight.
    """
    step = HostStep.of(microbatches, device)
    moved = step.buffer.to(device, non_blocking=True)
    return step.on(
        moved, dtype, replicas=replicas, loss_scale=loss_scale, by_microbatch=by_microbatch
    )


def rescaled(microbatches: Sequence[DeviceMicrobatch], factor: float) -> list[DeviceMicrobatch]:
    """Return the same microbatches with the loss scale multiplied by ``factor``."""
    return [
        replace(
            m,
            weight_n=m.weight_n * factor,
            mean_weight=m.mean_weight * factor,
            further=m.further and (*m.further[:2], m.further[2] * factor),
        )
        for m in microbatches
    ]


def token_counts(microbatches: Sequence[DeviceMicrobatch]) -> tuple[float, float]:
    """Return the number of tokens of some microbatches, and of the tokens whose loss counts."""
    tokens = sum(m.tokens_n.numel() for m in microbatches)
    return float(tokens), sum(m.valid_tokens for m in microbatches)


def _room(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in a buffer, with padding that aligns the next one."""
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def _memory(size: int, device: torch.device) -> Tensor:
    """Return ``size`` bytes of host memory, pinned for a GPU, so that copies need no wait."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
