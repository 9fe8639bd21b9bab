"""The operations that layers and gradients need from a device, in mathematical terms.

Each implementation rounds as it likes within its types. ``reference`` is the specification, and one
contract test compares all of them with float64. Nothing above this package knows the device.

Shapes: ``...`` any leading dimensions; h hidden size; b batch, s sequence, d channels of a head,
a query heads, g key/value heads, r = a / g; for the vocabulary n tokens, t rows of the vocabulary.
Types: an *activation* has the type that the kernels were chosen for; a *statistic* and a gradient
over microbatches are fp32, or float64 for float64 activations. A name that ends in an underscore
writes into its first argument.
"""

from typing import Protocol

from torch import Tensor

from megatron.kernels.documents import Documents
from megatron.kernels.scores import PLAIN, Scores


class Kernels(Protocol):
    """The operations of one device for one type of activations.

    The first group is differentiable. The second is not, and works in the calling thread.

    Attributes:
        tile_rows: vocabulary rows that are best worked on at a time.
    """

    tile_rows: int

    def gelu(self, x: Tensor) -> Tensor:
        """``x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``, the GELU of Megatron's MLP.

        Args:
            x: activations of any shape.

        Returns:
            A tensor of the shape and type of ``x``.
        """
        ...

    def squared_relu(self, x: Tensor) -> Tensor:
        """``relu(x)^2`` (arXiv 2109.08668). For the backward it keeps nothing but its output.

        Args:
            x: activations of any shape.

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

    def accumulate_(self, total: Tensor, part: Tensor) -> None:
        """``total += part``: one microbatch's gradient joins the sum over microbatches.

        Args:
            total: the sum so far, of any shape with a first dimension, with any strides.
            part: of the same shape; an activation, or of the type of ``total``.
        """
        ...

    def accumulate_product_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """``total += left @ right``, the product rounded to the activations' type at most.

        Args:
            total: [i, j], as in ``accumulate_``.
            left: activations [i, n].
            right: activations [n, j].
        """
        ...

    def exponentials_(self, logits_tn: Tensor, max_n: Tensor, sum_n: Tensor) -> Tensor:
        """Turn some rows of logits into exponentials and carry the running maximum and sum on.

        Args:
            logits_tn: logits in, exp(logits - new maximum) out, contiguous activations.
            max_n: running maximum of every token, -inf at first. It is a logit, and therefore exact
                in the activations' type.
            sum_n: running sum of the exponentials relative to the running maximum.

        Returns:
            [n], the factor for all exponentials of earlier rows: exp(old - new maximum).
        """
        ...

    def shifted_exponentials_(self, logits_tn: Tensor, shift_n: Tensor) -> None:
        """``logits = exp(logits - shift)``: exponentials, once the maximum of all rows is known.

        Args:
            logits_tn: contiguous activations.
            shift_n: statistics; no logit exceeds it but by rounding.
        """
        ...

    def carry_input_gradient_(
        self, total_nh: Tensor, shrink_n: Tensor, exp_tn: Tensor, weight_th: Tensor
    ) -> None:
        """``total = total * shrink + Eᵀ W``: A of Algorithm 2, rows of the vocabulary at a time.

        Args:
            total_nh: statistics.
            shrink_n: result of ``exponentials_`` for these rows.
            exp_tn: E, contiguous activations.
            weight_th: the same rows of W, activations.
        """
        ...

    def add_input_gradient_(
        self, gradient_nh: Tensor, factor_n: Tensor, exp_tn: Tensor, weight_th: Tensor
    ) -> None:
        """``gradient += factor * Eᵀ W``: the softmax part of Algorithm 1's input gradient.

        Args:
            gradient_nh: statistics.
            factor_n: factor from E to the gradient of the logits, statistics.
            exp_tn: E, contiguous activations.
            weight_th: the same rows of W, activations.
        """
        ...

    def add_weight_gradient_(
        self, gradient_th: Tensor, factor_n: Tensor, exp_tn: Tensor, x_nh: Tensor
    ) -> None:
        """``gradient += E (factor * X)``: the softmax part of the weight gradient.

        Args:
            gradient_th: statistics.
            factor_n: factor from E to the gradient of the logits, statistics.
            exp_tn: E, contiguous activations.
            x_nh: input of the output layer, contiguous activations.
        """
        ...
