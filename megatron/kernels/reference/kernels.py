"""All kernels in PyTorch's own operations, for any device and type; all others must match these.

Shapes and types: as in ``megatron.kernels.face``.
"""

import sys

from torch import Tensor
from torch.nn import functional

from megatron.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from megatron.kernels.autograd import apply
from megatron.kernels.heads import split_heads_to_keep
from megatron.kernels.reference.activations import Gated, QuickGated, SquaredReLU, with_bias
from megatron.kernels.reference.block_products import BlockOperations
from megatron.kernels.reference.grouped_attention import grouped_attention, knows_repeated
from megatron.kernels.reference.grouped_eight_bits import GroupedEightBitOperations
from megatron.kernels.reference.microscaling import MicroscalingOperations
from megatron.kernels.reference.packed_attention import can_pack, packed_attention
from megatron.kernels.reference.partial_attention import (
    Attended,
    AttentionPart,
    Gradients,
    flash,
    flash_gradients,
    join_parts_,
    knows_flash,
    multiplied,
    multiplied_gradients,
)
from megatron.kernels.reference.rotation import Rotation, turn
from megatron.kernels.reference.scored_attention import scored_attention
from megatron.kernels.reference.slots import SlotOperations
from megatron.kernels.reference.windowed_attention import can_window, windowed_attention
from megatron.kernels.softmax import statistics_dtype
from megatron.kernels.tiled.output_t import TiledOutput

TILE_ROWS = 16384
"""Vocabulary rows of a tile: enough to fill a GPU, where more and smaller tiles only cost
launches."""


class ReferenceKernels(
    SlotOperations, GroupedEightBitOperations, BlockOperations, MicroscalingOperations, TiledOutput
):
    """All operations in PyTorch, for any device and any type of activations.

    The operations of layers are differentiable and stand here. Operations on slots,
    gradients and tiles, and those of the output layer, stand in the base classes.

    Args:
        tile_rows: vocabulary rows that the output layer works on at a time.

    Attributes:
        accumulates_products: whether ``accumulate_product_`` adds while it multiplies, and so is
            quicker than a product followed by an addition.
        activations_form_bias_gradients: whether the backward of ``gelu`` and ``squared_relu`` forms
            the gradient of a bias together with that of the input. If so, the layer with the bias
            should leave this gradient to them.
        updates_at_once: whether ``adamw_`` reads and writes every tensor once, and so is quicker
            than PyTorch's optimizer with the work before and after it.
        longest_norm: longest row for which ``norm_backward`` is as quick as autograd's own
            backward.
    """

    accumulates_products = False
    activations_form_bias_gradients = False
    updates_at_once = False
    longest_norm = sys.maxsize

    def __init__(self, tile_rows: int = TILE_ROWS) -> None:
        self.tile_rows = tile_rows

    def gelu(self, x: Tensor, bias_f: Tensor | None = None) -> Tensor:
        """``x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``, the GELU of Megatron's MLP.

        Args:
            x: activations of any shape.
            bias_f: a bias that is already in ``x`` [..., f], but was added without autograd. The
                backward forms the gradient of the bias together with the gradient of ``x``.

        Returns:
            A tensor of the shape and type of ``x``.
        """
        value: Tensor = functional.gelu(with_bias(x, bias_f), approximate="tanh")
        return value

    def exact_gelu(self, x: Tensor) -> Tensor:
        """``x / 2 (1 + erf(x / sqrt(2)))`` (arXiv 1606.08415).

        Args:
            x: activations of any shape.

        Returns:
            A tensor of the shape and type of ``x``.
        """
        return functional.gelu(x)

    def relu(self, x: Tensor) -> Tensor:
        """``max(x, 0)``, with the slope 0 at 0. For the backward it keeps only its input.

        So the output can be computed again, as that of ``gelu``.

        Args:
            x: activations of any shape.

        Returns:
            A tensor of the shape and type of ``x``.
        """
        return functional.threshold(x, 0.0, 0.0)

    def squared_relu(self, x: Tensor, bias_f: Tensor | None = None) -> Tensor:
        """``relu(x)^2`` (arXiv 2109.08668). For the backward it keeps only its output.

        Args:
            x: activations of any shape.
            bias_f: as in ``gelu``.

        Returns:
            A tensor of the shape and type of ``x``.
        """
        return apply(SquaredReLU, with_bias(x, bias_f))

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of the two halves of the last dimension, the gate first.

        Args:
            gate_up: activations [..., 2 f].

        Returns:
            [..., f].
        """
        return apply(Gated, gate_up, False)

    def geglu(self, gate_up: Tensor) -> Tensor:
        """``gelu(gate) * up`` of the two halves of the last dimension, the gate first.

        Args:
            gate_up: activations [..., 2 f].

        Returns:
            [..., f].
        """
        return apply(Gated, gate_up, True)

    def quick_geglu(self, gate_up: Tensor, *, limit: float | None, offset: float) -> Tensor:
        """``gate sigmoid(1.702 gate) * (up + offset)`` of two halves, the gate first.

        Args:
            gate_up: activations [..., 2 f].
            limit: the gate is at most ``limit``, and up is between ``-limit`` and ``limit``;
                ``None``: any numbers.
            offset: added to up.

        Returns:
            [..., f].
        """
        return apply(QuickGated, gate_up, limit, offset)

    def layer_norm(self, x: Tensor, weight_h: Tensor, bias_h: Tensor, epsilon: float) -> Tensor:
        """``(x - mean) / sqrt(variance + epsilon) * weight + bias`` over the last dimension.

        Computed in fp32 or better.

        Args:
            x: activations [..., h], with any strides.
            weight_h: in the type of ``x``.
            bias_h: in the type of ``x``.
            epsilon: added to the variance.
        """
        return functional.layer_norm(x, weight_h.shape, weight_h, bias_h, epsilon)

    def rms_norm(self, x: Tensor, weight_h: Tensor, epsilon: float) -> Tensor:
        """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension, in fp32 or better.

        Args:
            x: activations [..., h].
            weight_h: in the type of ``x``.
            epsilon: added to the mean square.
        """
        return functional.rms_norm(x, weight_h.shape, weight_h, epsilon)

    def add_layer_norm(
        self, x: Tensor, part: Tensor | None, weight_h: Tensor, bias_h: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Return ``x + part`` and its ``layer_norm``: the stream and the input of the next branch.

        Args:
            x: the stream [..., h].
            part: output of a branch, of the same shape; ``None``: nothing is added. Its gradient is
                the gradient of the sum, to which the norm and the later use of the sum contribute.
            weight_h: as in ``layer_norm``.
            bias_h: as in ``layer_norm``.
            epsilon: as in ``layer_norm``.
        """
        total = x if part is None else x + part
        return total, self.layer_norm(total, weight_h, bias_h, epsilon)

    def add_rms_norm(
        self, x: Tensor, part: Tensor | None, weight_h: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Return ``x + part`` and its ``rms_norm``; arguments as in ``add_layer_norm``."""
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
        """Return the gradients of x, weight and bias for a norm whose forward ran elsewhere.

        Args:
            x: input of the norm [..., h], dense; it has n rows.
            weight_h: in the type of ``x``.
            mean_n: means of the rows, fp32; ``None``: an RMSNorm, without a bias.
            inverse_n: ``1 / sqrt(variance + epsilon)`` of the rows, fp32; an RMSNorm has the mean
                square in place of the variance.
            grad: gradient of the norm's output [..., h].
            stream_grad: gradient of ``x`` from its other use, which is added; ``None``: no other
                use.
        """
        wide = statistics_dtype(x.dtype)
        normed_nh, grad_nh = (t.reshape(-1, x.shape[-1]).to(wide) for t in (x, grad))
        if mean_n is not None:
            normed_nh = normed_nh - mean_n[:, None]
        normed_nh = normed_nh * inverse_n[:, None]
        weight_grad_h = (grad_nh * normed_nh).sum(0).to(weight_h.dtype)
        bias_grad_h = None if mean_n is None else grad_nh.sum(0).to(weight_h.dtype)
        # After the weight's gradient: from here on it is the gradient of x̂, the norm before its
        # scale.
        grad_nh = grad_nh * weight_h
        # ∇x = (∇x̂ - x̂ mean(x̂ ∇x̂) - mean(∇x̂)) / deviation: x also enters by its deviation and
        # its mean (an RMSNorm has no mean).
        along_nh = grad_nh - normed_nh * (grad_nh * normed_nh).mean(-1, keepdim=True)
        if mean_n is not None:
            along_nh -= grad_nh.mean(-1, keepdim=True)
        x_grad = (along_nh * inverse_n[:, None]).view(x.shape)
        if stream_grad is not None:
            x_grad = x_grad + stream_grad
        return x_grad.to(x.dtype), weight_grad_h, bias_grad_h

    def rotate(self, x_bsad: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        """Turn pairs of channels by angles (RoPE), and round once, at the end.

        The angles get no gradient.

        Args:
            x_bsad: queries or keys [b, s, a, d], of any strides.
            cos: cosines of the angles of p pairs, in the dtype of statistics: [s, 1, p] or
                [1, s, 1, p] for all samples, [b, s, 1, p] for each sample.
            sin: sines, of the shape and type of ``cos``.
            interleaved: channels 2i and 2i + 1 make a pair; otherwise i and p + i do. Channels from
                2p on stay.

        Returns:
            A contiguous tensor of the shape and type of ``x_bsad``.
        """
        return apply(Rotation, x_bsad, cos, sin, interleaved, turn)

    def causal_attention(
        self,
        q_basd: Tensor,
        k_bgsd: Tensor,
        v_bgsd: Tensor,
        *,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        """softmax(scores of q kᵀ) v, where every position sees itself and earlier positions.

        There may be fewer queries than keys: the queries of the last positions.

        Without dropout, most kernels keep no tensor [s, s] per head for the backward. The C++
        kernel for short sequences on a CPU keeps probabilities.

        Args:
            q_basd: queries [b, a, s, d], or the queries of the last positions. Queries, keys and
                values may be transposed views.
            k_bgsd: keys [b, g, s, d]; a is a multiple of g.
            v_bgsd: values [b, g, s, d].
            options: scores, dropout, documents and sinks.

        Returns:
            A tensor of the queries' shape, laid out in memory as [b, s, a, d] where the kernel
            allows.
        """
        documents = options.documents
        if options.asked <= {"dropout"}:
            is_whole = q_basd.shape[2] == k_bgsd.shape[2]
            if is_whole or self._attends_partly(q_basd):
                return self._attend(q_basd, k_bgsd, v_bgsd, options)
        elif options.sinks_a is not None or documents is None:
            if self._attends_in_window(q_basd, k_bgsd, options):
                return self._attend_in_window(q_basd, k_bgsd, v_bgsd, options)
        elif documents.are_of(q_basd, k_bgsd) and self._packs(q_basd, options):
            return self._attend_within(q_basd, k_bgsd, v_bgsd, options)
        return scored_attention(q_basd, k_bgsd, v_bgsd, options)

    def _attends_in_window(self, q_basd: Tensor, k_bgsd: Tensor, options: AttentionOptions) -> bool:
        """Return whether ``_attend_in_window`` computes this attention."""
        return can_window(q_basd, k_bgsd, options)

    def _attend_in_window(
        self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return attention in a window or with sinks, where ``_attends_in_window`` allows it."""
        return windowed_attention(q_basd, k_bgsd, v_bgsd, options)

    def attend_to_part(self, part: AttentionPart) -> Attended:
        """Return softmax(scores of a part) v, and the logarithms of the scores' sums.

        Parts of the keys can be put together (``partial_attention``). Autograd records nothing.
        """
        return flash(part) if self._flashes(part) else multiplied(part)

    def join_parts_(self, whole: Attended, part: Attended) -> None:
        """Add a part of the softmax to the parts that ``whole`` has already, in place.

        Args:
            whole: in the dtype of the caller's choice. In fp32 the sum of many parts is rounded
                once, by the caller; in 16 bits it is rounded after each part. Every query has seen
                a key in it, or sees one in ``part``.
            part: attention of the same queries to other keys.
        """
        join_parts_(whole, part)

    def gradients_of_part(
        self, part: AttentionPart, whole: Attended, grad_basd: Tensor
    ) -> Gradients:
        """Return a part's summands of the gradients of its queries, keys and values.

        Args:
            part: as for ``attend_to_part``.
            whole: attention of the part's queries to all keys.
            grad_basd: gradient of the output of ``whole``.
        """
        gradients = flash_gradients if self._flashes(part) else multiplied_gradients
        return gradients(part, whole, grad_basd)

    def _flashes(self, part: AttentionPart) -> bool:
        """Return whether ``flash`` computes attention to a part of the keys."""
        return part.q_basd.is_cuda and knows_flash(part)

    def _attends_partly(self, q_basd: Tensor) -> bool:
        """Return whether ``_attend`` is quick for queries of the last positions only."""
        return q_basd.is_cuda

    def _packs(self, q_basd: Tensor, options: AttentionOptions) -> bool:
        """Return whether ``packed_attention`` computes attention within documents."""
        return can_pack(q_basd, options)

    def _attend_within(
        self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return attention within documents; it is called only where ``_packs`` says so."""
        return packed_attention(q_basd, k_bgsd, v_bgsd, options)

    def _attend(
        self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return attention with scaled products and dropout only; see ``scaled_dot_product``."""
        return scaled_dot_product(q_basd, k_bgsd, v_bgsd, options.dropout, options.scores.scale)

    def causal_self_attention(
        self,
        qkv_bsgcd: Tensor,
        *,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        """Return ``causal_attention`` of the output of a fused projection, without RoPE between.

        Args:
            qkv_bsgcd: [b, s, g, r + 2, d]: for every group its queries, its key and its value.
            options: as in ``causal_attention``.

        Returns:
            [b, s, a d].
        """
        heads = (t.transpose(1, 2) for t in split_heads_to_keep(qkv_bsgcd))
        context_basd = self.causal_attention(*heads, options=options)
        return context_basd.transpose(1, 2).flatten(2)


def causal_lower_right(queries: int, keys: int) -> Tensor:
    """Return PyTorch's causal mask for queries of the last positions only."""
    from torch.nn.attention import bias  # here: a third of a rank's import time

    mask: Tensor = bias.causal_lower_right(queries, keys)
    return mask


def scaled_dot_product(
    q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, dropout: float, scale: float | None = None
) -> Tensor:
    """Causal attention by PyTorch's kernel; see ``Kernels.causal_attention`` and ``Scores``.

    With fewer queries than keys PyTorch makes a mask of all positions on a CPU.
    """
    if q_basd.is_cuda and knows_repeated(q_basd, k_bgsd):
        return grouped_attention(q_basd, k_bgsd, v_bgsd, dropout, scale)
    is_whole = q_basd.shape[2] == k_bgsd.shape[2]
    return functional.scaled_dot_product_attention(
        q_basd,
        k_bgsd,
        v_bgsd,
        None if is_whole else causal_lower_right(q_basd.shape[2], k_bgsd.shape[2]),
        dropout_p=dropout,
        is_causal=is_whole,
        scale=scale,
        enable_gqa=q_basd.shape[1] != k_bgsd.shape[1],
    )
