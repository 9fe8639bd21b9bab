"""What a GPT's layers compute, own and keep, counted from its shape alone.

The counts generalise Table 4 of arXiv 2411.05288 to any widths. For a plain GPT (MLP of width 4h,
as many key heads as query heads), with b sequences of s tokens in a microbatch, they are

    transformer layer  bsh (72h + 12s) FLOPs   12h^2 parameters   34bsh bytes of activations
    input layer        3bsh                    hV
    output layer       6bshV                   hV

A multiply-add is two FLOPs. Attention counts in full although causality needs only half of it. The
table gives parameters as bytes of 16 bits, 24h^2 and 2hV.
"""

from dataclasses import dataclass
from typing import Final, Literal

ACTIVATION_BYTES: Final = 2
"""Bytes of an element in the activation dtype, fp16 or bf16."""

Kept = Literal["all", "flash", "input"]
"""What a layer keeps from its forward to its backward: everything with the attention matrices,
everything that flash attention needs, or only its input, from which it is recomputed."""


@dataclass(frozen=True)
class Shape:
    """The shape of a GPT and of one microbatch.

    Attributes:
        hidden_size: width h of the residual stream.
        num_attention_heads: query heads a.
        seq_length: tokens of a sequence s.
        vocab_size: vocabulary entries V.
        micro_batch_size: sequences of a microbatch b.
        ffn_hidden_size: inner width of the MLP, of each half where it is gated; 0 stands for 4h.
        query_width: width of all query heads; 0 stands for h.
        key_value_width: width of all keys and values together; 0 stands for 2h.
        gated_mlp: the MLP has three matrices, as SwiGLU has, instead of two.
        output_slope: the slope of the MLP's activation function follows from its output, as that
            of squared ReLU does, so that its input is not kept.
        vector_parameters: parameters of a layer's biases and norms, which the paper leaves out;
            they add nothing to its FLOPs.
        own_queries: queries and keys are rotated or normalised, so they are kept in addition to the
            output of the projection.
        dropout: the two dropouts on the residual stream keep one byte per element each.
        kept: what a layer keeps for its backward.
        wide_stream: the residual stream is fp32, and so are the tensors between stages.
    """

    hidden_size: int
    num_attention_heads: int
    seq_length: int
    vocab_size: int
    micro_batch_size: int = 1
    ffn_hidden_size: int = 0
    query_width: int = 0
    key_value_width: int = 0
    gated_mlp: bool = False
    output_slope: bool = False
    vector_parameters: int = 0
    own_queries: bool = False
    dropout: bool = True
    kept: Kept = "flash"
    wide_stream: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch bs."""
        return self.micro_batch_size * self.seq_length

    @property
    def elements(self) -> int:
        """Elements bsh of a microbatch's activation between two layers."""
        return self.tokens * self.hidden_size

    @property
    def stream_bytes(self) -> int:
        """Bytes of a microbatch's residual stream, which goes from stage to stage."""
        return (2 if self.wide_stream else 1) * ACTIVATION_BYTES * self.elements

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        return self.matrix_parameters + self.vector_parameters

    @property
    def matrix_parameters(self) -> int:
        """Parameters of a layer's matrices: query, key, value, projection and MLP."""
        matrices = 3 if self.gated_mlp else 2
        attention = 2 * self._query_width + self._key_value_width
        return self.hidden_size * (attention + matrices * self._ffn_width)

    @property
    def inner_width(self) -> int:
        """Width of the MLP's first product: both halves if the MLP is gated."""
        return self._ffn_width * (2 if self.gated_mlp else 1)

    @property
    def vocabulary_parameters(self) -> int:
        """Parameters hV of the input layer; the output layer has as many if it is not tied."""
        return self.hidden_size * self.vocab_size

    @property
    def linear_flops(self) -> int:
        """FLOPs of a layer's linear layers in one of: forward, input gradient, weight gradient."""
        return 2 * self.tokens * self.matrix_parameters

    @property
    def attention_flops(self) -> int:
        """FLOPs of the two attention products of a layer's forward; its backward has four."""
        return 4 * self.tokens * self.seq_length * self._query_width

    @property
    def forward_flops(self) -> int:
        """FLOPs of a layer's F."""
        return self.linear_flops + self.attention_flops

    @property
    def backward_flops(self) -> int:
        """FLOPs of a layer's B without the weight gradient, but with a recomputed forward."""
        again = self.forward_flops if self.kept == "input" else 0
        return self.linear_flops + 2 * self.attention_flops + again

    @property
    def weight_gradient_flops(self) -> int:
        """FLOPs of a layer's W."""
        return self.linear_flops

    @property
    def output_product_flops(self) -> int:
        """FLOPs of one of the output layer's three products: logits and the two gradients."""
        return 2 * self.tokens * self.vocabulary_parameters

    @property
    def logits(self) -> int:
        """Elements bsV of a microbatch's logits."""
        return self.tokens * self.vocab_size

    @property
    def layer_activation_bytes(self) -> float:
        """Bytes that a layer keeps of one microbatch, from its F to its B (or W).

        A layer keeps the inputs of both norms, of the four linear layers and of the activation
        function, unless ``output_slope``; query, key and value; and the masks of the dropouts
        (arXiv 2205.05198, section 4.1; flash attention saves its 5as/h).
        """
        if self.kept == "input":
            return float(self.stream_bytes)
        inner = 3 if self.gated_mlp else 1 if self.output_slope else 2
        width = 4 * self.hidden_size + 2 * self._query_width + self._key_value_width
        width += inner * self._ffn_width
        width += 2 * self.hidden_size if self.wide_stream else 0
        if self.own_queries:
            width += self._query_width + self._key_value_width // 2
        masks = 2 * self.hidden_size if self.dropout else 0
        stored = 5 * self.num_attention_heads * self.seq_length if self.kept == "all" else 0
        return float(self.tokens * (ACTIVATION_BYTES * width + masks + stored))

    @property
    def _ffn_width(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def _query_width(self) -> int:
        return self.query_width or self.hidden_size

    @property
    def _key_value_width(self) -> int:
        return self.key_value_width or 2 * self.hidden_size


def iteration_flops(shape: Shape, num_layers: int, microbatches: int) -> int:
    """Return the FLOPs of an iteration as the paper counts them, without recomputation.

    Only matrix products count, and the backward counts twice the forward. For a GPT with an MLP of
    width ffn and B sequences in all microbatches together, the FLOPs are

        3 (2 BshV + L (8 Bsh^2 + 4 Bs^2 h + 4 Bsh ffn)).

    Attention counts in full; today's Megatron-LM counts half of it. V is the real vocabulary,
    because padding is no useful work.

    Args:
        shape: the model and one microbatch.
        num_layers: transformer layers of the whole model.
        microbatches: microbatches of the iteration.
    """
    forward = num_layers * shape.forward_flops + shape.output_product_flops
    return 3 * microbatches * forward
