"""All kernels in PyTorch's own operations, for any device and type; the others must match them."""

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from megatron.kernels.adamw import AdamWStep, AdamWTensors
from megatron.kernels.autograd import apply
from megatron.kernels.documents import Documents
from megatron.kernels.eight_bits import EightBits
from megatron.kernels.heads import split_heads
from megatron.kernels.reference import eight_bits, optimizer
from megatron.kernels.reference.activations import Gated, SquaredReLU, with_bias
from megatron.kernels.reference.norm_backward import norm_backward
from megatron.kernels.reference.packed_attention import can_pack, packed_attention
from megatron.kernels.reference.rotation import Rotation, turn
from megatron.kernels.reference.scored_attention import scored_attention
from megatron.kernels.scores import PLAIN, Scores
from megatron.kernels.tiled.output import TiledOutput

TILE_ROWS = 16384
"""Vocabulary rows of a tile: it should fill a GPU, where more tiles only cost launches."""

EXPONENTIALS_AT_ONCE = 1 << 22
"""How many logits PyTorch's operations turn into exponentials at a time: 16 MiB in fp32. The work
on such a slice takes a GPU longer than the launch of the work on the next slice."""


class ReferenceKernels(TiledOutput):
    """See ``Kernels`` and ``TileKernels`` for what each operation computes.

    Args:
        tile_rows: vocabulary rows that are best worked on at a time.
    """

    accumulates_products = False
    activations_form_bias_gradients = False
    updates_at_once = False
    longest_norm = sys.maxsize

    def __init__(self, tile_rows: int = TILE_ROWS) -> None:
        self.tile_rows = tile_rows

    def gelu(self, x: Tensor, bias_f: Tensor | None = None) -> Tensor:
        """See ``Kernels``."""
        value: Tensor = functional.gelu(with_bias(x, bias_f), approximate="tanh")
        return value

    def squared_relu(self, x: Tensor, bias_f: Tensor | None = None) -> Tensor:
        """See ``Kernels``."""
        return apply(SquaredReLU, with_bias(x, bias_f))

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See ``Kernels``."""
        return apply(Gated, gate_up, False)

    def geglu(self, gate_up: Tensor) -> Tensor:
        """See ``Kernels``."""
        return apply(Gated, gate_up, True)

    def layer_norm(self, x: Tensor, weight_h: Tensor, bias_h: Tensor, epsilon: float) -> Tensor:
        """See ``Kernels``."""
        return functional.layer_norm(x, weight_h.shape, weight_h, bias_h, epsilon)

    def rms_norm(self, x: Tensor, weight_h: Tensor, epsilon: float) -> Tensor:
        """See ``Kernels``."""
        return functional.rms_norm(x, weight_h.shape, weight_h, epsilon)

    def add_layer_norm(
        self, x: Tensor, part: Tensor | None, weight_h: Tensor, bias_h: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernels``."""
        total = x if part is None else x + part
        return total, self.layer_norm(total, weight_h, bias_h, epsilon)

    def add_rms_norm(
        self, x: Tensor, part: Tensor | None, weight_h: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernels``."""
        total = x if part is None else x + part
        return total, self.rms_norm(total, weight_h, epsilon)

    def norm_backward(
        self,
        x: Tensor,
        weight_h: Tensor,
        mean_n: Tensor | None,
        inverse_n: Tensor,
        grad: Tensor,
        stream_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See ``Kernels``."""
        return norm_backward(x, weight_h, mean_n, inverse_n, grad, stream_grad)

    def rotate(self, x_bsad: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        """See ``Kernels``."""
        return apply(Rotation, x_bsad, cos, sin, interleaved, turn)

    def causal_attention(
        self,
        q_basd: Tensor,
        k_bgsd: Tensor,
        v_bgsd: Tensor,
        *,
        dropout: float,
        scores: Scores = PLAIN,
        documents: Documents | None = None,
    ) -> Tensor:
        """See ``Kernels``."""
        if documents is None:
            is_whole = q_basd.shape[2] == k_bgsd.shape[2]
            if scores.are_products and (is_whole or self._attends_partly(q_basd)):
                return self._attend(q_basd, k_bgsd, v_bgsd, dropout, scores.scale)
        elif documents.are_of(q_basd, k_bgsd) and self._packs(q_basd, scores, dropout):
            return packed_attention(q_basd, k_bgsd, v_bgsd, scores, documents)
        return scored_attention(q_basd, k_bgsd, v_bgsd, scores, dropout, documents)

    def _attends_partly(self, q_basd: Tensor) -> bool:
        """Return whether ``_attend`` is quick for queries of the last positions only."""
        return q_basd.is_cuda

    def _packs(self, q_basd: Tensor, scores: Scores, dropout: float) -> bool:
        """Return whether ``packed_attention`` computes attention within documents."""
        return can_pack(q_basd, scores, dropout)

    def _attend(
        self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, dropout: float, scale: float | None
    ) -> Tensor:
        """Return causal attention whose scores are products; see ``scaled_dot_product``."""
        return scaled_dot_product(q_basd, k_bgsd, v_bgsd, dropout, scale)

    def causal_self_attention(
        self,
        qkv_bsgcd: Tensor,
        *,
        dropout: float,
        scores: Scores = PLAIN,
        documents: Documents | None = None,
    ) -> Tensor:
        """See ``Kernels``."""
        heads = (t.transpose(1, 2) for t in split_heads(qkv_bsgcd))
        context_basd = self.causal_attention(
            *heads, dropout=dropout, scores=scores, documents=documents
        )
        return context_basd.transpose(1, 2).flatten(2)

    def accumulate_(self, total: Tensor, part: Tensor) -> None:
        """See ``Kernels``."""
        total.add_(part)

    def accumulate_product_(
        self, total: Tensor, left: Tensor, right: Tensor, *, begins: bool = False
    ) -> None:
        """See ``Kernels``."""
        if begins:
            total.copy_(left @ right)
        else:
            self.accumulate_(total, left @ right)

    def largest(self, x: Tensor) -> Tensor:
        """See ``Kernels``."""
        return eight_bits.largest(x)

    def quantise(
        self,
        x_rk: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        *,
        straight: bool,
        turned: bool,
        seen: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See ``Kernels``."""
        return eight_bits.quantise(x_rk, scale, dtype, straight, turned, seen)

    def eight_bit_product(
        self,
        left: EightBits,
        right: EightBits,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        *,
        quick: bool = False,
    ) -> Tensor:
        """See ``Kernels``."""
        return eight_bits.product(left, right, dtype, bias)

    def accumulate_eight_bit_product_(
        self,
        total: Tensor,
        left: EightBits,
        right: EightBits,
        dtype: torch.dtype,
        *,
        begins: bool = False,
    ) -> None:
        """See ``Kernels``."""
        product = self.eight_bit_product(left, right, total.dtype)
        if begins:
            total.copy_(product)
        else:
            self.accumulate_(total, product)

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """See ``Kernels``."""
        total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
        for tensor in tensors:
            total += optimizer.sum_of_squares(tensor)
        return total

    def adamw_(self, tensors: AdamWTensors, step: AdamWStep) -> None:
        """See ``Kernels``."""
        optimizer.adamw_(tensors, step)

    def exponentials_(self, logits_tn: Tensor, max_n: Tensor, sum_n: Tensor) -> Tensor:
        """See ``TileKernels``."""
        new_max_n = torch.maximum(max_n, logits_tn.amax(0).to(max_n.dtype))
        shrink_n = (max_n - new_max_n).exp_()
        sum_n.mul_(shrink_n)
        for part_tn in _slices(logits_tn):
            # In the dtype of statistics, because a difference in bf16 would be far off.
            exp_tn = (part_tn - new_max_n).exp_()
            sum_n.add_(exp_tn.sum(0))
            part_tn.copy_(exp_tn)
        max_n.copy_(new_max_n)
        return shrink_n

    def shifted_exponentials_(self, logits_tn: Tensor, shift_n: Tensor) -> None:
        """See ``TileKernels``."""
        for part_tn in _slices(logits_tn):
            part_tn.copy_((part_tn - shift_n).exp_())

    def carry_input_gradient_(
        self, total_nh: Tensor, shrink_n: Tensor, exp_tn: Tensor, weight_th: Tensor
    ) -> None:
        """See ``TileKernels``."""
        total_nh.mul_(shrink_n.unsqueeze(1)).add_(exp_tn.T @ weight_th)

    def add_input_gradient_(
        self, gradient_nh: Tensor, factor_n: Tensor, exp_tn: Tensor, weight_th: Tensor
    ) -> None:
        """See ``TileKernels``."""
        product_nh = (exp_tn.T @ weight_th).to(gradient_nh.dtype)
        gradient_nh.addcmul_(product_nh, factor_n.unsqueeze(1))

    def add_weight_gradient_(
        self, gradient_th: Tensor, factor_n: Tensor, exp_tn: Tensor, x_nh: Tensor
    ) -> None:
        """See ``TileKernels``."""
        scaled_nh = torch.mul(x_nh, factor_n.unsqueeze(1), out=torch.empty_like(x_nh))
        self.accumulate_product_(gradient_th, exp_tn, scaled_nh)


def _slices(logits_tn: Tensor) -> Iterator[Tensor]:
    """Yield parts of a tile whose exponentials may be in fp32 at the same time."""
    yield from logits_tn.split(max(1, EXPONENTIALS_AT_ONCE // logits_tn.shape[1]))


def causal_lower_right(queries: int, keys: int) -> Tensor:
    """Return the mask of queries that are those of the last positions, as PyTorch makes it."""
    from torch.nn.attention import bias  # a third of all imports of a rank, and few need it

    mask: Tensor = bias.causal_lower_right(queries, keys)
    return mask


def scaled_dot_product(
    q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, dropout: float, scale: float | None = None
) -> Tensor:
    """Causal attention by PyTorch's kernel; see ``Kernels.causal_attention`` and ``Scores``.

    On a CPU a mask of all positions would be made if there were fewer queries than keys.
    """
    grouped = q_basd.shape[1] != k_bgsd.shape[1]
    if grouped and q_basd.is_cuda and q_basd.dtype == torch.float32:
        # CUDA's flash kernel has groups but no fp32; the memory-efficient one has fp32, no groups
        copies = q_basd.shape[1] // k_bgsd.shape[1]
        k_bgsd, v_bgsd = (t.repeat_interleave(copies, dim=1) for t in (k_bgsd, v_bgsd))
        grouped = False
    is_whole = q_basd.shape[2] == k_bgsd.shape[2]
    return functional.scaled_dot_product_attention(
        q_basd,
        k_bgsd,
        v_bgsd,
        None if is_whole else causal_lower_right(q_basd.shape[2], k_bgsd.shape[2]),
        dropout_p=dropout,
        is_causal=is_whole,
        scale=scale,
        enable_gqa=grouped,
    )
