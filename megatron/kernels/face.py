"""The operations that layers and gradients need from a device, in mathematical terms.

Each implementation rounds as it likes within its types. ``reference`` is the specification, and one
contract test compares all of them with float64. Nothing above this package knows the device.

Shapes: ``...`` any leading dimensions; h hidden size; b batch, s sequence, d channels of a head,
a query heads, g key/value heads, r = a / g; for the vocabulary n tokens, v rows of a shard without
padding.
Types: an *activation* has the type that the kernels were chosen for; a *statistic* and a gradient
over microbatches are fp32, or float64 for float64 activations. A name that ends in an underscore
writes into its first argument.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron.kernels.adamw import AdamWStep, AdamWTensors
from megatron.kernels.documents import Documents
from megatron.kernels.eight_bits import EightBits
from megatron.kernels.scores import PLAIN, Scores
from megatron.kernels.softmax import LossOptions, Merged, ShardState


class Kernels(Protocol):
    """The operations of one device for one type of activations.

    The first group is differentiable. The second is not, and works in the calling thread: sums of
    gradients, then the output layer of one shard of the vocabulary (arXiv 2411.05288, section 4).

    Attributes:
        accumulates_products: ``accumulate_product_`` adds while it multiplies, so that it is
            quicker than a product and an addition.
        activations_form_bias_gradients: ``gelu`` and ``squared_relu`` form the gradient of a bias
            beside that of their input, so that a layer with such a bias had better not form it.
        updates_at_once: ``adamw_`` reads and writes every tensor once, so that it is quicker than
            PyTorch's optimizer with what must happen before and after it.
        longest_norm: longest row that ``norm_backward`` takes as quickly as autograd's own.
    """

    accumulates_products: bool
    activations_form_bias_gradients: bool
    updates_at_once: bool
    longest_norm: int

    def gelu(self, x: Tensor, bias_f: Tensor | None = None) -> Tensor:
        """``x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``, the GELU of Megatron's MLP.

        Args:
            x: activations of any shape.
            bias_f: a bias that has been added to x [..., f], but not recorded by autograd: its
                gradient is formed here, beside that of x, and not by a pass of its own.

        Returns:
            A tensor of the shape and type of ``x``.
        """
        ...

    def squared_relu(self, x: Tensor, bias_f: Tensor | None = None) -> Tensor:
        """``relu(x)^2`` (arXiv 2109.08668). For the backward it keeps nothing but its output.

        Args:
            x: activations of any shape.
            bias_f: as in ``gelu``.

        Returns:
            A tensor of the shape and type of ``x``.
        """
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of the two halves of the last dimension, the gate first.

        Args:
            gate_up: activations [..., 2 f].

        Returns:
            [..., f].
        """
        ...

    def geglu(self, gate_up: Tensor) -> Tensor:
        """``gelu(gate) * up`` of the two halves of the last dimension, the gate first.

        Args:
            gate_up: activations [..., 2 f].

        Returns:
            [..., f].
        """
        ...

    def layer_norm(self, x: Tensor, weight_h: Tensor, bias_h: Tensor, epsilon: float) -> Tensor:
        """``(x - mean) / sqrt(variance + epsilon) * weight + bias`` over the last dimension.

        Computed in fp32 or better.

        Args:
            x: activations [..., h], with any strides.
            weight_h: in the type of ``x``.
            bias_h: in the type of ``x``.
            epsilon: added to the variance.
        """
        ...

    def rms_norm(self, x: Tensor, weight_h: Tensor, epsilon: float) -> Tensor:
        """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension, in fp32 or better.

        Args:
            x: activations [..., h].
            weight_h: in the type of ``x``.
            epsilon: added to the mean square.
        """
        ...

    def add_layer_norm(
        self, x: Tensor, part: Tensor | None, weight_h: Tensor, bias_h: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """``x + part`` and its ``layer_norm``: a branch joins the stream, and the next reads it.

        Args:
            x: the stream [..., h].
            part: what a branch adds, of the same shape; ``None``: nothing. Its gradient is that of
                the sum, where the sum's own use and the norm meet.
            weight_h: as in ``layer_norm``.
            bias_h: as in ``layer_norm``.
            epsilon: as in ``layer_norm``.
        """
        ...

    def add_rms_norm(
        self, x: Tensor, part: Tensor | None, weight_h: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """``x + part`` and its ``rms_norm``; arguments as those of ``add_layer_norm``."""
        ...

    def rotate(self, x_bsad: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        """Turn pairs of channels by angles (RoPE), which have no gradient.

        Args:
            x_bsad: queries or keys [b, s, a, d], of any strides.
            cos: of the angles of p pairs, [s, 1, p], or by sample [b, s, 1, p], or [1, s, 1, p] if
                all have the same; statistics. Each is rounded once, at the end.
            sin: likewise.
            interleaved: channels 2i and 2i + 1 make a pair, not i and p + i; those from 2p on stay.

        Returns:
            A contiguous tensor of the shape and type of ``x_bsad``.
        """
        ...

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
        """softmax(scores of q kᵀ) v, where every position sees itself and earlier positions.

        There may be queries of the last positions only, fewer than keys.

        No tensor of [s, s] for every head outlives the forward if nothing is dropped.

        Args:
            q_basd: queries [b, a, s, d], or those of the last positions; transposed views are taken
                as they are.
            k_bgsd: keys [b, g, s, d]; a is a multiple of g.
            v_bgsd: values [b, g, s, d].
            dropout: probability of dropping an attention weight, 0 outside training.
            scores: how products of queries and keys become scores.
            documents: of s positions or more, none of which sees another; ``None``: every position
                sees all earlier ones.

        Returns:
            The shape of the queries, laid out in memory as [b, s, a, d] where the kernel allows.
        """
        ...

    def causal_self_attention(
        self,
        qkv_bsgcd: Tensor,
        *,
        dropout: float,
        scores: Scores = PLAIN,
        documents: Documents | None = None,
    ) -> Tensor:
        """``causal_attention`` of a fused projection's output, with no operation between the two.

        Args:
            qkv_bsgcd: [b, s, g, r + 2, d]: for every group its queries, its key and its value.
            dropout: as in ``causal_attention``.
            scores: as in ``causal_attention``.
            documents: as in ``causal_attention``.

        Returns:
            [b, s, a d].
        """
        ...

    def norm_backward(
        self,
        x: Tensor,
        weight_h: Tensor,
        mean_n: Tensor | None,
        inverse_n: Tensor,
        grad: Tensor,
        stream_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of a norm that was formed elsewhere: of x, weight and bias.

        Args:
            x: its input [..., h], which n rows make; dense.
            weight_h: in the type of ``x``.
            mean_n: fp32, of the rows; ``None``: it is an RMSNorm, without a bias.
            inverse_n: fp32, ``1 / sqrt(variance + epsilon)``, or of the mean square.
            grad: of the norm [..., h].
            stream_grad: of another use of ``x``, which is added to the norm's; ``None``: nothing.
        """
        ...

    def accumulate_(self, total: Tensor, part: Tensor) -> None:
        """``total += part``: one microbatch's gradient joins the sum over microbatches.

        Args:
            total: the sum so far, of any shape with a first dimension, with any strides.
            part: of the same shape; an activation, or of the type of ``total``.
        """
        ...

    def accumulate_product_(
        self, total: Tensor, left: Tensor, right: Tensor, *, begins: bool = False
    ) -> None:
        """``total += left @ right``, the product rounded to the activations' type at most.

        Args:
            total: [i, j], as in ``accumulate_``.
            left: activations [i, n].
            right: activations [n, j].
            begins: the sum begins with this product: what ``total`` holds does not count.
        """
        ...

    def largest(self, x: Tensor) -> Tensor:
        """Return the largest magnitude of all elements, fp32 []; undefined if one is NaN."""
        ...

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
        """``x * scale``, rounded to the nearest number of 8 bits.

        What is too large becomes the largest number; infinity and NaN become NaN, so that what is
        computed with them shows it.

        Args:
            x_rk: activations.
            scale: fp32 [].
            dtype: e4m3 or e5m2.
            straight: whether [r, k] is asked for.
            turned: whether [k, r] is asked for, as dense.
            seen: fp32 [], is raised to the largest magnitude in x if that is greater.
        """
        ...

    def eight_bit_product(
        self,
        left: EightBits,
        right: EightBits,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        *,
        quick: bool = False,
    ) -> Tensor:
        """``left @ right.T + bias`` by rows of both, rounded once.

        Args:
            left: [i, k]; all sizes are multiples of ``MULTIPLE``.
            right: [j, k]; not both are e5m2.
            dtype: of the result [i, j]: an activation or a statistic.
            bias: activations [j].
            quick: sums may be formed in fewer bits than fp32 where that is faster: on Hopper.
        """
        ...

    def accumulate_eight_bit_product_(
        self,
        total: Tensor,
        left: EightBits,
        right: EightBits,
        dtype: torch.dtype,
        *,
        begins: bool = False,
    ) -> None:
        """``total += left @ right.T``, the product rounded to ``dtype`` at most.

        Args:
            total: [i, j], as in ``accumulate_``.
            left: [i, k].
            right: [j, k].
            dtype: of activations.
            begins: as in ``accumulate_product_``.
        """
        ...

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of the squares of all elements, float64 [], in an order that is fixed.

        Args:
            tensors: at least one, contiguous, of any floating types; read once.
        """
        ...

    def adamw_(self, tensors: AdamWTensors, step: AdamWStep) -> None:
        """Take a step of AdamW and round the masters to the weights.

        Args:
            tensors: at least one of each; the masters are statistics.
            step: its numbers.
        """
        ...

    def kept_room(self, x_nh: Tensor, rows: int) -> Sequence[Tensor]:
        """Return memory for what S keeps for T of one microbatch; it may be used again after T.

        Args:
            x_nh: input of the output layer, of which only shape, type and device count.
            rows: v.

        Returns:
            Contiguous activations [., n], one after the other [v, n].
        """
        ...

    def scratch_room(self, x_nh: Tensor, rows: int, *, again: bool) -> Sequence[Tensor]:
        """Return memory for logits that are not kept; it is smaller than ``kept_room``'s.

        Args:
            x_nh: as in ``kept_room``.
            rows: v.
            again: T forms the logits again, so that a shard shall not have all of them at a time.
        """
        ...

    def output_s(
        self,
        x_nh: Tensor,
        weight_vh: Tensor,
        targets_n: Tensor,
        first_row: int,
        options: LossOptions,
        room: Sequence[Tensor],
        *,
        form_gradient: bool,
        keep: bool,
    ) -> ShardState:
        """Pass S: all work of the output layer that one shard can do alone.

        Args:
            x_nh: input of the output layer.
            weight_vh: this rank's rows, without padding.
            targets_n: target ids over the whole vocabulary, int64.
            first_row: vocabulary id of ``weight_vh[0]``.
            options: form of the loss.
            room: of ``kept_room``, or of ``scratch_room`` where nothing is kept.
            form_gradient: also begin the input gradient, as Algorithm 2 does.
            keep: the exponentials, for T. An evaluation needs only the statistics, and so does a T
                that forms the exponentials again.
        """
        ...

    def naive_s(
        self,
        x_nh: Tensor,
        weight_vh: Tensor,
        targets_n: Tensor,
        first_row: int,
        options: LossOptions,
        room: Sequence[Tensor],
    ) -> ShardState:
        """Pass S of the naive treatment: the logits, the targets' and ``maximum_n``.

        Args: as those of ``output_s``, the room of ``kept_room``.
        """
        ...

    def naive_e(self, state: ShardState, maximum_n: Tensor, options: LossOptions) -> None:
        """Pass E of the naive treatment: exponentials relative to m, and ``sums_kn``.

        Args:
            state: the state that ``naive_s`` left; afterwards T takes it.
            maximum_n: m, the maximum over all ranks.
            options: form of the loss.
        """
        ...

    def merge(
        self,
        statistics_p4n: Tensor,
        state: ShardState,
        weight_vh: Tensor,
        weight_n: Tensor,
        options: LossOptions,
    ) -> tuple[Merged, Tensor | None]:
        """C1 between its two collectives: merge statistics; finish the input gradient, if begun.

        Args:
            statistics_p4n: ``statistics_4n`` of all shards.
            state: the state that S left; it still has its gradient afterwards.
            weight_vh: as in ``output_s``, and unchanged since.
            weight_n: g, the weight of each token's loss, statistics.
            options: form of the loss.

        Returns:
            Statistics over the whole vocabulary, and in Algorithm 2 this shard's part of the input
            gradient [n, h], activations.
        """
        ...

    def output_t(
        self,
        state: ShardState,
        weight_vh: Tensor,
        gradient_vh: Tensor | None,
        merged: Merged,
        weight_n: Tensor,
        options: LossOptions,
        room: Sequence[Tensor] | None,
        *,
        form_gradient: bool,
        begins: bool = False,
    ) -> Tensor | None:
        """Pass T: add the weight gradient to ``gradient_vh``.

        Args:
            state: the state that S or E left.
            weight_vh: as in ``output_s``, and unchanged since.
            gradient_vh: sum of the gradients of these rows, statistics; ``None``: none is formed.
            merged: statistics over the whole vocabulary.
            weight_n: g, the weight of each token's loss, statistics.
            options: form of the loss.
            room: of ``scratch_room`` if the state has no exponentials, which are then formed again.
            form_gradient: also form this shard's part of the input gradient, as Algorithm 1 does.
            begins: the sum begins with this microbatch: what ``gradient_vh`` holds does not count.

        Returns:
            The input gradient [n, h], activations, or ``None`` without ``form_gradient``.
        """
        ...
