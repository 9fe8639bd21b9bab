"""Copies of tokens for experts: a *slot* for each of a token's k choices, in the experts' order.

``spread`` copies tokens into their slots, and ``join`` adds the slots of every token up. Each is
the adjoint of the other.

Shapes: n tokens, k choices of a token, c choices of all tokens, r slots, e experts, h any width; f
inner width of an expert, i = f or 2 f the width before its activation function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron.kernels.autograd import apply, once_differentiable


class SlotOperations:
    """The part of ``Kernels`` about slots; only ``weighted`` has a gradient."""

    def slots_by_expert(self, chosen_nk: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sort the choices by their experts; choices of one expert keep their order.

        Args:
            chosen_nk: int64, the experts that every token has chosen.
            experts: e.

        Returns:
            The choice in every slot, int64 [r]: the token's index times k, plus the index of the
            choice among the token's k choices. The slot of every choice, int64 [n, k]. The end of
            every expert's slots, int32 [e]: the index after its last slot.
        """
        sorted_r, choice_r = chosen_nk.flatten().sort(stable=True)
        slot_r = torch.empty_like(choice_r)
        slot_r[choice_r] = torch.arange(len(slot_r), device=slot_r.device)
        each_e = torch.arange(experts, device=slot_r.device)
        ends_e = torch.searchsorted(sorted_r, each_e, right=True, out_int32=True)
        return choice_r, slot_r.view(chosen_nk.shape), ends_e

    def spread(self, x_nh: Tensor, choice_r: Tensor, choices: int) -> Tensor:
        """Return the token of every slot, [r, h].

        Args:
            x_nh: tokens of any type.
            choice_r: as ``slots_by_expert`` returns it; or any rows of ``x_nh``, times k.
            choices: k.
        """
        return x_nh.index_select(0, choice_r // choices)

    def join(self, y_rh: Tensor, slot_nk: Tensor) -> Tensor:
        """Return the sum of every token's slots, [n, h]; it is formed in fp32 or better.

        Args:
            y_rh: slots.
            slot_nk: as ``slots_by_expert`` returns it. A choice whose slot is behind the last one
                adds nothing.
        """
        slots_r = slot_nk.flatten()
        if len(y_rh) < len(slots_r):
            # One row of zeros stands for all choices whose slots are elsewhere.
            y_rh = functional.pad(y_rh, (0, 0, 0, 1))
            slots_r = slots_r.clamp(max=len(y_rh) - 1)
        by_choice = y_rh.index_select(0, slots_r)
        sums_nh: Tensor = by_choice.unflatten(0, slot_nk.shape).sum(1)
        return sums_nh

    def weighted(
        self,
        inner_ri: Tensor,
        weights_c: Tensor,
        choice_r: Tensor,
        activation: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return an activation function of every slot, times the weight of the slot's choice.

        Only the arguments are kept for the backward, which computes the function again.

        Args:
            inner_ri: slots.
            weights_c: statistics, a weight for each choice; a choice without a slot has no effect.
            choice_r: int64, the choice in every slot; all differ.
            activation: an activation function of these kernels.

        Returns:
            [r, f], in the type of ``inner_ri``.
        """
        return apply(Weighted, inner_ri, weights_c, choice_r, activation)


class Weighted(torch.autograd.Function):
    """See ``SlotOperations.weighted``."""

    @staticmethod
    def forward(
        ctx: Any,
        inner_ri: Tensor,
        weights_c: Tensor,
        choice_r: Tensor,
        activation: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """[r, i] -> [r, f]."""
        ctx.save_for_backward(inner_ri, weights_c, choice_r)
        ctx.activation = activation
        weights_r = weights_c.index_select(0, choice_r)
        # Weights are statistics: the product is wide, and rounded once.
        return (activation(inner_ri) * weights_r[:, None]).to(inner_ri.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rf: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the slots and of the weights."""
        inner_ri, weights_c, choice_r = ctx.saved_tensors
        weights_r = weights_c.index_select(0, choice_r)
        inner_ri = inner_ri.detach().requires_grad_()
        with torch.enable_grad():
            active_rf = ctx.activation(inner_ri)
        weights_grad_r = (grad_rf.to(weights_r.dtype) * active_rf.detach()).sum(-1)
        scaled_rf = (grad_rf * weights_r[:, None]).to(active_rf.dtype)
        (inner_grad_ri,) = torch.autograd.grad(active_rf, inner_ri, scaled_rf)
        weights_grad_c = torch.zeros_like(weights_c).index_copy_(0, choice_r, weights_grad_r)
        return inner_grad_ri, weights_grad_c, None, None
