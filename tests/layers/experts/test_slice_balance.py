"""Slices together have the balancing losses of the whole microbatch, and their gradients."""

from typing import Final

import pytest
import torch
from torch import Tensor

from megatron.kernels.choose import kernels_for
from megatron.layers.experts.balance import LOSS_NAMES, Balance, leave_balancing_losses
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.left_losses import LayerLosses, LeftLoss
from megatron.layers.site import Site
from megatron.layers.slices import SeenChoices, SeenKeys, SequenceSlice, SlicedPass

B, S, EXPERTS, TOPK = 2, 12, 5, 2
BALANCES: Final[dict[Balance, float]] = {
    "aux_loss": 0.5,
    "seq_aux_loss": 0.25,
    "global_aux_loss": 2.0,
}
CPU = torch.device("cpu")
SITE = Site(CPU, torch.float64, given_kernels=kernels_for(CPU, torch.float64))


def left(
    scores_bue: Tensor, so_far: dict[int, Tensor], sliced: SlicedPass | None
) -> list[LeftLoss]:
    """The losses that a layer leaves for tokens with these scores."""
    losses = LayerLosses(so_far)
    forward_pass = ForwardPass(losses=losses, layer=3, sliced=sliced)
    leave_balancing_losses(scores_bue, TOPK, BALANCES, forward_pass, SITE)
    return losses.close()[0]


def gradients(lengths: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """Gradients of two microbatches' scores, and the value of every loss in the second one."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, B, S, EXPERTS, generator=generator, dtype=torch.float64)
    so_far: dict[int, Tensor] = {}
    parts = SequenceSlice.of_lengths(lengths) if len(lengths) > 1 else (None,)
    found, values = [], []
    for microbatch in logits:
        choices, own = SeenChoices(), microbatch.softmax(-1).requires_grad_()
        values, total = [torch.zeros(()).double() for _ in BALANCES], []
        for part in parts:
            sliced = None if part is None else SlicedPass(part, SeenKeys(), choices)
            weight = 1.0 if part is None else part.fraction
            scores = own if part is None else own[:, part.first : part.end]
            losses = left(scores, so_far, sliced)
            values = [value + weight * one.value for value, one in zip(values, losses, strict=True)]
            total += [weight * one.loss for one in losses]
        for one in reversed(total):  # after all forwards, the last slice first
            one.backward(retain_graph=True)
        assert own.grad is not None
        found.append(own.grad)
    return torch.stack(found), values


@pytest.mark.parametrize("lengths", [(6, 6), (1, 4, 7), (3,) * 4], ids=str)
def test_slices_together_are_the_whole_microbatch(lengths: tuple[int, ...]) -> None:
    whole, values = gradients((S,))
    cut, of_slices = gradients(lengths)
    torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(of_slices, values, rtol=1e-12, atol=1e-14)
    assert set(LOSS_NAMES) == set(BALANCES)


def test_a_gradient_of_the_own_choices_alone_would_be_another() -> None:
    """Else the comparison above would show nothing."""
    whole, _ = gradients((S,))
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, B, S, EXPERTS, generator=generator, dtype=torch.float64)
    own = logits[0].softmax(-1).requires_grad_()
    for part in SequenceSlice.of_lengths((6, 6)):
        for one in left(own[:, part.first : part.end], {}, None):
            (part.fraction * one.loss).backward(retain_graph=True)
    assert own.grad is not None
    assert not torch.allclose(own.grad, whole[0], rtol=1e-3)
