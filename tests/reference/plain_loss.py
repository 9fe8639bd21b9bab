"""The loss of the plain GPT over a global batch, and its gradients by autograd.

Shapes: b batch, s sequence, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from reference import plain_experts
from reference.plain_gpt import Documents, GPTOptions, Parameters, all_logits


class Microbatch(Protocol):
    """What the loss reads of a microbatch; any class with these attributes will do."""

    @property
    def tokens(self) -> torch.Tensor:
        """Input tokens, int64 [b, s]."""

    @property
    def labels(self) -> torch.Tensor:
        """The tokens to predict, int64 [b, s]."""

    @property
    def loss_mask(self) -> torch.Tensor:
        """1 where the loss counts and 0 elsewhere, float [b, s]."""

    @property
    def document_starts(self) -> torch.Tensor | None:
        """The first position of every token's document; ``None``: a sample is one."""

    @property
    def positions(self) -> torch.Tensor | None:
        """Positions other than those of the sample, int64 [b, s]."""

    @property
    def valid_share(self) -> float | None:
        """Not read here: what a rank has of tokens that count, if ranks share samples."""

    @property
    def further(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Not read here: what follows a rank's tokens, if ranks share samples."""


@dataclass(frozen=True, eq=False)
class RandomMicrobatch:
    """Random tokens and labels, with about a fifth of the losses masked out.

    Attributes:
        tokens: int64 [b, s].
        labels: int64 [b, s].
        loss_mask: float32 [b, s].
        document_starts: int64 [b, s]; ``None``: documents are not told apart.
        positions: int64 [b, s], from 0 in every document; ``None``: those of the sample.
        valid_share: nobody shares the samples.
        further: nor what follows them.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    document_starts: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    valid_share: None = None
    further: None = None

    @classmethod
    def draw(
        cls,
        vocab_size: int,
        batch: int,
        sequence: int,
        seed: int,
        masked_out: bool = False,
        documents: bool = False,
    ) -> "RandomMicrobatch":
        """Draw from `seed`.

        With `masked_out`, no loss of this microbatch counts. With `documents`, about every fifth
        token begins a document that sees no other and has positions of its own.
        """
        generator = torch.Generator().manual_seed(seed)
        stream = torch.randint(vocab_size, (batch, sequence + 1), generator=generator)
        kept = torch.rand(batch, sequence, generator=generator) < 0.8
        starts = None
        if documents:
            begins = torch.rand(batch, sequence, generator=generator) < 0.2
            starts = (begins * torch.arange(sequence)).cummax(1).values
        return cls(
            tokens=stream[:, :-1].contiguous(),
            labels=stream[:, 1:].contiguous(),
            loss_mask=torch.zeros(batch, sequence) if masked_out else kept.float(),
            document_starts=starts,
            positions=None if starts is None else torch.arange(sequence) - starts,
        )


layer_losses: dict[str, float] = {}
"""The losses of routers in the last global batch by name, means over the layers."""

replicas = 1
"""So many microbatches of a global batch are computed at once, each by a replica."""


def _count_beforehand(
    parameters: Parameters, microbatches: Sequence[Microbatch], options: GPTOptions
) -> None:
    """Add what microbatches that are computed at once choose, by their scores alone."""
    kept_loads = dict(plain_experts.loads)
    with torch.no_grad():
        for microbatch in microbatches:
            with (
                patch.object(plain_experts, "router_losses", _count_picked),
                patch.object(plain_experts, "is_recording", True),
            ):
                all_logits(parameters, microbatch.tokens, options)
    plain_experts.loads.clear()
    plain_experts.loads.update(kept_loads)


def _count_picked(logits_bse: torch.Tensor, options: GPTOptions, name: str) -> None:
    scores = logits_bse
    if options.moe_router_score_function == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits_bse))
    everything = torch.ones_like(scores, dtype=torch.bool)
    picked = plain_experts.chosen(scores, options.moe_router_topk, everything)
    plain_experts.counted(plain_experts.so_far, name, picked)


def token_losses(
    logits_bsv: torch.Tensor, labels_bs: torch.Tensor, options: GPTOptions
) -> torch.Tensor:
    """Loss of every token [b, s]: smoothed cross-entropy, plus z-loss."""
    losses_bs = F.cross_entropy(
        logits_bsv.flatten(0, 1),
        labels_bs.flatten(),
        reduction="none",
        label_smoothing=options.label_smoothing,
    ).view(labels_bs.shape)
    return losses_bs + options.z_loss_coeff * torch.logsumexp(logits_bsv, dim=-1) ** 2


def count_valid_tokens(microbatches: Iterable[Microbatch]) -> float:
    """Tokens of a global batch whose loss counts.

    Raises:
        ValueError: if there is none, for which the loss is not defined.
    """
    count = sum(float(microbatch.loss_mask.sum()) for microbatch in microbatches)
    if count == 0:
        raise ValueError("every loss of the global batch is masked out: it has no mean loss")
    return count


def loss_and_gradients(
    parameters: Parameters,
    microbatches: Sequence[Microbatch],
    options: GPTOptions,
    loss_scale: float = 1.0,
) -> tuple[float, Parameters]:
    """Mean loss over the valid tokens of a global batch, and its gradients.

    Args:
        parameters: the model's parameters, of any floating dtype; left as they are.
        microbatches: the global batch. Its division decides nothing but rounding.
        options: the model.
        loss_scale: by which the loss is multiplied for the backward; the gradients hold it.

    Returns:
        The loss, and a gradient for every parameter, by name, in the parameter's dtype. With
        multi-token prediction the loss is that of the next token, and the gradients are of the sum
        with the others.
    """
    (loss, *_), gradients = losses_and_gradients(parameters, microbatches, options, loss_scale)
    return loss, gradients


def losses_and_gradients(
    parameters: Parameters,
    microbatches: Sequence[Microbatch],
    options: GPTOptions,
    loss_scale: float = 1.0,
) -> tuple[list[float], Parameters]:
    """The same with the losses of the depths of multi-token prediction behind the first one.

    The gradients are of the sum with the losses of routers too, which the loss does not hold.

    As in Megatron, the loss of a depth is the mean over the positions of a microbatch whose label
    counts, that many positions on; microbatches count by their tokens, as they do for the next one.
    """
    valid_tokens = count_valid_tokens(microbatches)
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    gradients = {name: torch.zeros_like(value) for name, value in parameters.items()}
    depths = options.mtp_num_layers
    totals = [0.0] * (1 + depths)
    plain_experts.loads.clear()
    plain_experts.so_far.clear()
    layer_losses.clear()
    for number, microbatch in enumerate(microbatches):
        if number % replicas == 0 and "global_aux_loss" in plain_experts.types(options):
            _count_beforehand(leaves, microbatches[number : number + replicas], options)
        losses = []
        plain_experts.left.clear()
        with patch.object(plain_experts, "is_recording", True):
            documents = Documents(microbatch.document_starts, microbatch.positions)
            every_logits = all_logits(leaves, microbatch.tokens, options, documents)
        for depth, logits_bsv in enumerate(every_logits):
            mask_bs = microbatch.loss_mask.to(logits_bsv.dtype)
            left_bs, labels_bs = mask_bs[:, depth:], microbatch.labels[:, depth:]
            share = mask_bs.sum() / left_bs.sum() if left_bs.any() else 0.0
            weights_bs = share * left_bs / valid_tokens
            losses.append((weights_bs * token_losses(logits_bsv, labels_bs, options)).sum())
        part = float(microbatch.loss_mask.sum()) / valid_tokens
        of_routers = sum(own.coefficient * own.value for own in plain_experts.left)
        loss = losses[0] + of_routers * part
        for name in {own.name for own in plain_experts.left}:
            values = [own.value.item() for own in plain_experts.left if own.name == name]
            mean = part * sum(values) / len(values)
            layer_losses[name] = layer_losses.get(name, 0.0) + mean
        if depths:
            loss = loss + options.mtp_loss_scaling_factor / depths * sum(losses[1:])
        for gradient, term in zip(
            gradients.values(),
            torch.autograd.grad(loss * loss_scale, list(leaves.values())),
            strict=True,
        ):
            gradient += term
        totals = [total + own.item() for total, own in zip(totals, losses, strict=True)]
    return totals, gradients
