"""The kernels of a GPU, for activations of bf16, fp16 and fp32."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.kernels.adamw import AdamWStep, AdamWTensors
from megatron.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from megatron.kernels.autograd import apply, apply_all
from megatron.kernels.cuda import attention_parts, block_products, update_operators
from megatron.kernels.cuda.activations import Activation, Gated
from megatron.kernels.cuda.block_products import CudaBlocks
from megatron.kernels.cuda.eight_bits import CudaEightBits
from megatron.kernels.cuda.flash import find_flash_attention
from megatron.kernels.cuda.grouped import CudaGrouped
from megatron.kernels.cuda.grouped_eight_bits import CudaGroupedEightBits
from megatron.kernels.cuda.microscaling import CudaMicroscaling
from megatron.kernels.cuda.norms import Norm, norm_backward
from megatron.kernels.cuda.output import CudaOutput
from megatron.kernels.cuda.products import Products
from megatron.kernels.cuda.row_operators import WIDEST_ROW, turn
from megatron.kernels.cuda.rows import CudaRows
from megatron.kernels.cuda.slots import CudaSlots
from megatron.kernels.cuda.update_operators import blocks_of
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.reference.partial_attention import Attended, AttentionPart, Gradients
from megatron.kernels.reference.rotation import Rotation

_LOG = logging.getLogger(__name__)

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Types of activations that the Triton programs take. Their arithmetic is fp32."""


class CudaKernels(
    CudaOutput,
    CudaEightBits,
    CudaBlocks,
    CudaMicroscaling,
    CudaGrouped,
    CudaGroupedEightBits,
    CudaSlots,
    CudaRows,
    ReferenceKernels,
):
    """Triton programs, and PyTorch's operations where these are one kernel; see ``Kernels``.

    Args:
        device: where activations live.
        dtype: type of activations, one of ``TYPES``.
    """

    activations_form_bias_gradients = True
    updates_at_once = True
    longest_norm = WIDEST_ROW

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        assert dtype in TYPES, dtype
        products = self._find_products(device, dtype)
        CudaOutput.__init__(self, products)
        CudaGrouped.__init__(self, device)
        ReferenceKernels.__init__(self)
        self._flash = find_flash_attention(device)
        self._has_cudnn = self._finds_cudnn(device)
        self.has_block_products = self._finds_block_products(device)
        self._said: set[str] = set()
        self.accumulates_products = products.accumulates

    def _find_products(self, device: torch.device, dtype: torch.dtype) -> Products:
        return Products(device, dtype)

    def _finds_cudnn(self, device: torch.device) -> bool:
        """Return whether cuDNN computes attention with plain scores the fastest."""
        return attention_parts.takes_cudnn(device)

    def _finds_block_products(self, device: torch.device) -> bool:
        """Return whether cuBLAS multiplies in 8 bits with scales of blocks."""
        return block_products.has_block_products(device)

    def gelu(self, x: Tensor, bias_f: Tensor | None = None) -> Tensor:
        """See ``Kernels``."""
        return apply(Activation, x, bias_f, True)

    def squared_relu(self, x: Tensor, bias_f: Tensor | None = None) -> Tensor:
        """See ``Kernels``."""
        return apply(Activation, x, bias_f, False)

    def layer_norm(self, x: Tensor, weight_h: Tensor, bias_h: Tensor, epsilon: float) -> Tensor:
        """See ``Kernels``."""
        return self.add_layer_norm(x, None, weight_h, bias_h, epsilon)[1]

    def rms_norm(self, x: Tensor, weight_h: Tensor, epsilon: float) -> Tensor:
        """See ``Kernels``."""
        return self.add_rms_norm(x, None, weight_h, epsilon)[1]

    def add_layer_norm(
        self, x: Tensor, part: Tensor | None, weight_h: Tensor, bias_h: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernels``."""
        if x.shape[-1] > WIDEST_ROW:
            total = x if part is None else x + part
            return total, ReferenceKernels.layer_norm(self, total, weight_h, bias_h, epsilon)
        total, y = apply_all(Norm, x, part, weight_h, bias_h, epsilon)
        return total, y

    def add_rms_norm(
        self, x: Tensor, part: Tensor | None, weight_h: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernels``."""
        if x.shape[-1] > WIDEST_ROW:
            total = x if part is None else x + part
            return total, self._plain_rms_norm(total, weight_h, epsilon)
        total, y = apply_all(Norm, x, part, weight_h, None, epsilon)
        return total, y

    def _plain_rms_norm(self, x: Tensor, weight_h: Tensor, epsilon: float) -> Tensor:
        """Return ``rms_norm`` of rows of any length, by PyTorch's kernel."""
        return ReferenceKernels.rms_norm(self, x, weight_h, epsilon)

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
        assert x.shape[-1] <= WIDEST_ROW, x.shape
        unread_n = inverse_n if mean_n is None else mean_n
        statistics_2n, has_bias = torch.stack((unread_n, inverse_n)), mean_n is not None
        return norm_backward(x, weight_h, statistics_2n, grad, stream_grad, has_bias=has_bias)

    def rotate(self, x_bsad: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        """See ``Kernels``."""
        return apply(Rotation, x_bsad, cos, sin, interleaved, turn)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See ``Kernels``."""
        return apply(Gated, gate_up, False)

    def geglu(self, gate_up: Tensor) -> Tensor:
        """See ``Kernels``."""
        return apply(Gated, gate_up, True)

    def causal_attention(
        self,
        q_basd: Tensor,
        k_bgsd: Tensor,
        v_bgsd: Tensor,
        *,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        """See ``Kernels``."""
        for flash in self._flash:
            refusal = flash.refusal(q_basd, k_bgsd, options)
            if refusal is None:
                return flash.attend(q_basd, k_bgsd, v_bgsd, options)
            self._say_once(f"attention: not by flash-attn {flash.version}, which lacks {refusal}")
        return super().causal_attention(q_basd, k_bgsd, v_bgsd, options=options)

    def _attend(
        self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, options: AttentionOptions
    ) -> Tensor:
        is_whole = q_basd.shape[2] == k_bgsd.shape[2]  # then PyTorch itself takes cuDNN
        if not is_whole and not options.dropout and self._seen_by_cudnn(q_basd, k_bgsd):
            scale = options.scores.scale_of(q_basd.shape[3])
            return attention_parts.seen_attention(q_basd, k_bgsd, v_bgsd, None, scale)
        return super()._attend(q_basd, k_bgsd, v_bgsd, options)

    def _seen_by_cudnn(self, q_basd: Tensor, k_bgsd: Tensor) -> bool:
        return self._has_cudnn and attention_parts.knows_seen(q_basd, k_bgsd)

    def _attend_in_window(
        self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, options: AttentionOptions
    ) -> Tensor:
        if options.asked <= {"sinks_a"} and self._seen_by_cudnn(q_basd, k_bgsd):
            scale = options.scores.scale_of(q_basd.shape[3])
            return attention_parts.seen_attention(q_basd, k_bgsd, v_bgsd, options.sinks_a, scale)
        return super()._attend_in_window(q_basd, k_bgsd, v_bgsd, options)

    def attend_to_part(self, part: AttentionPart) -> Attended:
        """See ``Kernels``."""
        if self._has_cudnn and attention_parts.knows_part(part):
            return attention_parts.attend(part)
        return super().attend_to_part(part)

    def gradients_of_part(
        self, part: AttentionPart, whole: Attended, grad_basd: Tensor
    ) -> Gradients:
        """See ``Kernels``."""
        if self._has_cudnn and attention_parts.knows_part(part):
            return attention_parts.gradients(part, whole, grad_basd)
        return super().gradients_of_part(part, whole, grad_basd)

    def join_parts_(self, whole: Attended, part: Attended) -> None:
        """See ``Kernels``."""
        attention_parts.join_parts_(*whole, *part)

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            _LOG.info(line)

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """See ``Kernels``."""
        sums_k = tensors[0].new_empty(blocks_of(tensors), dtype=torch.float32)
        update_operators.sums_of_squares(tensors, sums_k)
        return sums_k.sum(dtype=torch.float64)

    def adamw_(self, tensors: AdamWTensors, step: AdamWStep) -> None:
        """See ``Kernels``."""
        update_operators.adamw_(
            tensors.gradients,
            tensors.gradients if step.keeps_quotients else [],
            tensors.masters,
            tensors.moments,
            tensors.squares,
            tensors.weights,
            [
                decays + 2 * in_vocabulary
                for decays, in_vocabulary in zip(tensors.decays, tensors.in_vocabulary, strict=True)
            ],
            step.both_divisors,
            step.lr,
            step.vocabulary_lr,
            step.weight_decay,
            *step.betas,
            step.epsilon,
            step.number,
        )

    def wide_product(self, x_nk: Tensor, weight_jk: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``Kernels``; cuBLAS widens 16-bit factors itself, and no copies are made."""
        if dtype != torch.float32 or not self._products.widens:
            return ReferenceKernels.wide_product(self, x_nk, weight_jk, dtype)
        total_nj = x_nk.new_empty(len(x_nk), len(weight_jk), dtype=dtype)
        self._products.form(total_nj, x_nk, weight_jk.T)
        return total_nj

    def accumulate_product_(
        self, total: Tensor, left: Tensor, right: Tensor, *, begins: bool = False
    ) -> None:
        """See ``Kernels``."""
        self._products.accumulate_(total, left, right, begins=begins)
