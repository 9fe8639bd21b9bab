"""Slots of tokens on a GPU: the programs as operators, and the part of ``Kernels`` about slots.

Shapes: n tokens, k choices of a token, c choices of all tokens, r slots, g experts, b blocks of
choices, h width of a row; f inner width of an expert, i = f or 2 f the width before its activation
function.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from megatron.kernels.autograd import apply, once_differentiable
from megatron.kernels.cuda.library import Programs, operator
from megatron.kernels.cuda.operators import BLOCK, LAUNCH, over_rows
from megatron.kernels.cuda.sizes import next_power_of_2, quotient
from megatron.kernels.reference.slots import SlotOperations

slot_programs = Programs("slots")
weighted_programs = Programs("weighted")

CHOICES: Final = 128
"""Choices of a block: each program compares all pairs of its choices."""

COUNTED_GROUPS: Final = 16
"""Experts whose choices are counted at a time."""

SORT_LAUNCH: Final = {**LAUNCH, "num_warps": 8}


@operator("count_choices(Tensor(a!) counts_gb, Tensor chosen_nk) -> ()")
def count_choices(counts_gb: Tensor, chosen_nk: Tensor) -> None:
    """See ``programs.slots``."""
    assert chosen_nk.is_contiguous()
    g, b = counts_gb.shape
    slot_programs.count_choices[(b,)](
        counts_gb,
        chosen_nk,
        chosen_nk.numel(),
        g,
        b,
        BLOCK=CHOICES,
        GROUPS=COUNTED_GROUPS,
        **LAUNCH,
    )


@operator(
    "place_choices(Tensor(a!) choice_r, Tensor(b!) slot_nk, Tensor(c!) ends_g, Tensor sums_gb, "
    "Tensor counts_gb, Tensor chosen_nk) -> ()"
)
def place_choices(
    choice_r: Tensor,
    slot_nk: Tensor,
    ends_g: Tensor,
    sums_gb: Tensor,
    counts_gb: Tensor,
    chosen_nk: Tensor,
) -> None:
    """See ``programs.slots``."""
    g, b = counts_gb.shape
    slot_programs.place_choices[(b,)](
        choice_r,
        slot_nk,
        ends_g,
        sums_gb,
        counts_gb,
        chosen_nk,
        chosen_nk.numel(),
        g,
        b,
        BLOCK=CHOICES,
        GROUPS=next_power_of_2(g),
        **SORT_LAUNCH,
    )


@operator("spread(Tensor(a!) out_rh, Tensor x_nh, Tensor choice_r, int choices) -> ()")
def spread(out_rh: Tensor, x_nh: Tensor, choice_r: Tensor, choices: int) -> None:
    """See ``programs.slots``."""
    assert x_nh.is_contiguous()
    slot_programs.spread[over_rows(out_rh)](
        out_rh, x_nh, choice_r, choices, x_nh.shape[1], BLOCK=BLOCK, **LAUNCH
    )


@operator("join(Tensor(a!) out_nh, Tensor y_rh, Tensor slot_nk) -> ()")
def join(out_nh: Tensor, y_rh: Tensor, slot_nk: Tensor) -> None:
    """See ``programs.slots``."""
    assert y_rh.is_contiguous()
    assert slot_nk.is_contiguous()
    slot_programs.join[over_rows(out_nh)](
        out_nh, y_rh, slot_nk, len(y_rh), slot_nk.shape[1], y_rh.shape[1], BLOCK=BLOCK, **LAUNCH
    )


@operator(
    "weighted(Tensor(a!) out_rf, Tensor inner_ri, Tensor weights_c, Tensor choice_r, bool gelu) "
    "-> ()"
)
def weighted(
    out_rf: Tensor, inner_ri: Tensor, weights_c: Tensor, choice_r: Tensor, gelu: bool
) -> None:
    """See ``programs.weighted``; with a gate, an inner row has 2 f channels."""
    f = out_rf.shape[1]
    weighted_programs.weighted[over_rows(out_rf)](
        out_rf,
        inner_ri,
        weights_c,
        choice_r,
        f,
        GATED=inner_ri.shape[1] == 2 * f,
        GELU=gelu,
        BLOCK=BLOCK,
        **LAUNCH,
    )


@operator(
    "weighted_backward(Tensor(a!) inner_grad_ri, Tensor(b!) weights_grad_c, Tensor inner_ri, "
    "Tensor weights_c, Tensor choice_r, Tensor grad_rf, bool gelu) -> ()"
)
def weighted_backward(
    inner_grad_ri: Tensor,
    weights_grad_c: Tensor,
    inner_ri: Tensor,
    weights_c: Tensor,
    choice_r: Tensor,
    grad_rf: Tensor,
    gelu: bool,
) -> None:
    """See ``programs.weighted``."""
    r, f = grad_rf.shape
    weighted_programs.weighted_backward[(r,)](
        inner_grad_ri,
        weights_grad_c,
        inner_ri,
        weights_c,
        choice_r,
        grad_rf,
        f,
        GATED=inner_ri.shape[1] == 2 * f,
        GELU=gelu,
        BLOCK=BLOCK,
        **LAUNCH,
    )


class Weighted(torch.autograd.Function):
    """See ``SlotOperations.weighted``: one kernel forward and one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        inner_ri: Tensor,
        weights_c: Tensor,
        choice_r: Tensor,
        gated: bool,
        gelu: bool,
    ) -> Tensor:
        """[r, i] -> [r, f]."""
        inner_ri, weights_c = inner_ri.contiguous(), weights_c.contiguous()
        ctx.save_for_backward(inner_ri, weights_c, choice_r)
        ctx.gelu, f = gelu, inner_ri.shape[1] // (2 if gated else 1)
        out_rf = inner_ri.new_empty(len(inner_ri), f)
        weighted(out_rf, inner_ri, weights_c, choice_r, gelu)
        return out_rf

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rf: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the slots and of their weights."""
        inner_ri, weights_c, choice_r = ctx.saved_tensors
        inner_grad_ri = torch.empty_like(inner_ri)
        make = torch.empty_like if len(choice_r) == len(weights_c) else torch.zeros_like
        weights_grad_c = make(weights_c)
        weighted_backward(
            inner_grad_ri,
            weights_grad_c,
            inner_ri,
            weights_c,
            choice_r,
            grad_rf.contiguous(),
            ctx.gelu,
        )
        return inner_grad_ri, weights_grad_c, None, None, None


_FUSED: Final = {
    "gelu": (False, True),
    "squared_relu": (False, False),
    "swiglu": (True, False),
    "geglu": (True, True),
}
"""For each activation function that the programs know, whether it has a gate, and is by GELU."""


class CudaSlots(SlotOperations):
    """The part of ``Kernels`` about slots."""

    def slots_by_expert(self, chosen_nk: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Kernels``: three launches, and the host does not wait."""
        chosen_nk = chosen_nk.contiguous()
        # Without any choice a program still runs, and writes the ends.
        shape = experts, max(1, quotient(chosen_nk.numel(), CHOICES))
        counts_gb = chosen_nk.new_empty(shape, dtype=torch.int32)
        count_choices(counts_gb, chosen_nk)
        sums_gb = counts_gb.flatten().cumsum(0, dtype=torch.int32)
        choice_r, slot_nk = torch.empty_like(chosen_nk).flatten(), torch.empty_like(chosen_nk)
        ends_g = chosen_nk.new_empty(experts, dtype=torch.int32)
        place_choices(choice_r, slot_nk, ends_g, sums_gb, counts_gb, chosen_nk)
        return choice_r, slot_nk, ends_g

    def spread(self, x_nh: Tensor, choice_r: Tensor, choices: int) -> Tensor:
        """See ``Kernels``."""
        out_rh = x_nh.new_empty(len(choice_r), x_nh.shape[1])
        spread(out_rh, x_nh.contiguous(), choice_r, choices)
        return out_rh

    def join(self, y_rh: Tensor, slot_nk: Tensor) -> Tensor:
        """See ``Kernels``."""
        out_nh = y_rh.new_empty(len(slot_nk), y_rh.shape[1])
        join(out_nh, y_rh.contiguous(), slot_nk)
        return out_nh

    def weighted(
        self,
        inner_ri: Tensor,
        weights_c: Tensor,
        choice_r: Tensor,
        activation: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """See ``Kernels``; an activation function that no Triton program has runs in PyTorch."""
        fused = _FUSED.get(getattr(activation, "__name__", ""))
        if fused is None or getattr(activation, "__self__", None) is not self:
            return super().weighted(inner_ri, weights_c, choice_r, activation)
        return apply(Weighted, inner_ri, weights_c, choice_r, *fused)
