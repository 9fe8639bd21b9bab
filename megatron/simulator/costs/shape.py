"""What a GPT's layers compute and own, counted from its shape alone.

The counts generalise Table 4 of arXiv 2411.05288 to any widths. For a plain GPT (MLP of width 4h,
as many key heads as query heads), with b sequences of s tokens in a microbatch, they are

    transformer layer  bsh (72h + 12s) FLOPs   12h^2 parameters   34bsh bytes of activations
    input layer        3bsh                    hV
    output layer       6bshV                   hV

Where t ranks share a layer (tensor parallelism, arXiv 1909.08053), the counts of a layer are those
of one of them.

Where c ranks share a sequence (context parallelism), all counts are for the tokens of one of them.
Attention meets the keys of all, which are there from F to B.

Each of D further tokens that are predicted has a transformer layer behind the last one, a product
[n, 2h] x [2h, h] before it, and as much of the output layer again as the next token has.

A multiply-add is two FLOPs. Attention counts in full although causality needs only half of it. The
table gives parameters as bytes of 16 bits, 24h^2 and 2hV.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

from megatron.simulator.costs.recomputed import NOTHING, Recomputed

ACTIVATION_BYTES: Final = 2
"""Bytes of an element in the activation dtype, fp16 or bf16."""

Kept = Literal["all", "flash"]
"""What a layer keeps from its forward to its backward, unless it computes that again: everything
with the attention matrices, or everything that flash attention needs."""


@dataclass(frozen=True)
class TensorSplit:
    """How the ranks of the tensor axis share a layer.

    Attributes:
        ranks: t; they cut heads and MLP among them.
        sequence_parallel: outside of attention and MLP each has its own part of the sequence
            (arXiv 2205.05198); otherwise all have all tokens.
    """

    ranks: int = 1
    sequence_parallel: bool = False

    @property
    def sequence_parts(self) -> int:
        """Parts of the sequence outside of attention and MLP."""
        return self.ranks if self.sequence_parallel else 1


WHOLE: Final = TensorSplit()
"""A rank has its layers alone."""


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
        vector_parameters: parameters of a layer's norms and of the biases after its parts are added
            up, which the paper leaves out; they add nothing to its FLOPs.
        cut_vector_parameters: parameters of the other biases, which are cut like their matrices.
        own_queries: queries and keys are rotated or normalised, so they are kept in addition to the
            output of the projection.
        normed_queries: they are normalised.
        dropout: the two dropouts on the residual stream keep one byte per element each.
        kept: what a layer keeps for its backward.
        stream_inputs: activations of width h that a layer keeps: inputs of norms, of the attention
            and of the MLP. Norms of what attention and MLP add have one each in addition.
        norms: norms before attention and MLP: 2, or 1 if they read the same norm.
        norm_inputs: different inputs of these: 2, or 1 if attention and MLP are side by side.
        norm_after_mlp: what the MLP adds is normalised before.
        windows: how many earlier positions a query sees, for every layer of the model; ``None``:
            all of them. Empty: no layer has a window.
        recomputed: what of what is kept it computes again instead.
        tensor: how ranks share a layer. Counts of a layer are those of one rank; those of the
            vocabulary are of the whole one.
        vocab_recompute: the output layer keeps nothing of the logits for its backward.
        wide_stream: the residual stream is fp32, and so are the tensors between stages.
        depths: further tokens D that every token predicts, with a layer each on the last stage.
        depth_vector_parameters: parameters of the norms of a depth besides those of its layer.
        changes_words: what the first layer, and a depth, reads is formed from word embeddings.
        context: ranks c that share a sequence; each has as many of its tokens.
        narrow: indices of the layers whose linear layers multiply in 8 bits; so do all depths.
        narrow_share: how many of the layers at hand are among them; see ``of_layers``.
        narrow_factors: products of weights' gradients are in 8 bits too, and so is what is kept for
            them.
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
    cut_vector_parameters: int = 0
    own_queries: bool = False
    normed_queries: bool = False
    dropout: bool = True
    kept: Kept = "flash"
    stream_inputs: int = 4
    norms: int = 2
    norm_inputs: int = 2
    norm_after_mlp: bool = False
    windows: tuple[int | None, ...] = ()
    recomputed: Recomputed = NOTHING
    tensor: TensorSplit = WHOLE
    vocab_recompute: bool = False
    wide_stream: bool = False
    depths: int = 0
    depth_vector_parameters: int = 0
    changes_words: bool = False
    context: int = 1
    narrow: range | None = None
    narrow_share: float = 0.0
    narrow_factors: bool = True

    def of_layers(self, first: int, count: int) -> "Shape":
        """Return the shape of some layers, the mean of those with 8 bits and of the others.

        Args:
            first: index of the first of them in the whole model.
            count: how many there are.
        """
        if self.narrow is None or not count:
            return self
        own = sum(layer in self.narrow for layer in range(first, first + count))
        return replace(self, narrow_share=own / count)

    @property
    def of_depths(self) -> "Shape":
        """The shape of the layers that predict further tokens."""
        return self if self.narrow is None else replace(self, narrow_share=1.0)

    @property
    def narrow_weight_bytes(self) -> float:
        """Bytes of a layer's matrices in 8 bits, in two layouts."""
        return 2.0 * self.narrow_share * self.matrix_parameters

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch bs; of ranks that share a sequence, those of one."""
        return self.micro_batch_size * self.seq_length // self.context

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the keys and values of whole sequences that attention gathers in a layer.

        Their gradients have as many. A rank receives (c - 1) / c of either.
        """
        shared = self.context > 1
        return shared * ACTIVATION_BYTES * self.context * self.tokens * self.rank_key_value_width

    @property
    def outputs(self) -> int:
        """Predictions of a microbatch (1 + D)bs, the rows of the output layer's input."""
        return (1 + self.depths) * self.tokens

    @property
    def output_elements(self) -> int:
        """Elements (1 + D)bsh of the output layer's input."""
        return self.outputs * self.hidden_size

    @property
    def elements(self) -> int:
        """Elements bsh of a microbatch's activation between two layers."""
        return self.tokens * self.hidden_size

    @property
    def own_elements(self) -> float:
        """Elements of it that a rank has outside of attention and MLP."""
        return self.elements / self.tensor.sequence_parts

    @property
    def stream_bytes(self) -> float:
        """Bytes of a rank's part of the residual stream, which goes from stage to stage."""
        return (2 if self.wide_stream else 1) * ACTIVATION_BYTES * self.own_elements

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        cut = self.cut_vector_parameters // self.tensor.ranks
        return self.matrix_parameters + self.vector_parameters + cut

    @property
    def matrix_parameters(self) -> int:
        """Parameters of a layer's matrices: query, key, value, projection and MLP."""
        matrices = 3 if self.gated_mlp else 2
        attention = 2 * self.rank_query_width + self.rank_key_value_width
        return self.hidden_size * (attention + matrices * self.rank_ffn_width)

    @property
    def rank_query_width(self) -> int:
        """Width of the query heads of a rank."""
        return (self.query_width or self.hidden_size) // self.tensor.ranks

    @property
    def rank_key_value_width(self) -> int:
        """Width of its keys and values together."""
        return (self.key_value_width or 2 * self.hidden_size) // self.tensor.ranks

    @property
    def rank_ffn_width(self) -> int:
        """Width of its MLP within, of each half where that is gated."""
        return (self.ffn_hidden_size or 4 * self.hidden_size) // self.tensor.ranks

    @property
    def inner_width(self) -> int:
        """Width of the MLP's first product: both halves if the MLP is gated."""
        return self.rank_ffn_width * (2 if self.gated_mlp else 1)

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
        return 4 * self.tokens * self.seq_length * self.rank_query_width

    def hidden_flops(self, window: int | None) -> int:
        """Return the FLOPs of these two products that a window spares.

        Where attention counts in full, later positions included, a window reaches as far to later
        positions as to earlier ones.

        Args:
            window: how many earlier positions a query sees; ``None``: all.
        """
        s = self.seq_length
        if window is None or window >= s - 1:
            return 0
        return self.attention_flops * (s - window) * (s - window - 1) // (s * s)

    @property
    def forward_flops(self) -> int:
        """FLOPs of a layer's F."""
        return self.linear_flops + self.attention_flops

    @property
    def backward_flops(self) -> int:
        """FLOPs of a layer's B without the weight gradient, and without what it computes again."""
        return self.linear_flops + 2 * self.attention_flops

    @property
    def repeated_flops(self) -> int:
        """FLOPs of the parts that a layer's B computes again, if it does not compute all again."""
        core = self.attention_flops if self.recomputed.core else 0
        mlp = 2 * self.elements * self.inner_width if self.recomputed.mlp else 0
        return core + mlp

    @property
    def spared_flops(self) -> int:
        """FLOPs at the end of recomputed layers that are not repeated: of the MLP's last product.

        Nothing in the backward needs its result, unless a norm or a dropout behind it has to be
        repeated.
        """
        needed = self.dropout or self.norm_after_mlp
        return 0 if needed else 2 * self.elements * self.rank_ffn_width

    @property
    def weight_gradient_flops(self) -> int:
        """FLOPs of a layer's W."""
        return self.linear_flops

    @property
    def output_product_flops(self) -> int:
        """FLOPs of one of the output layer's three products: logits and the two gradients."""
        return 2 * self.outputs * self.vocabulary_parameters

    @property
    def logits(self) -> int:
        """Elements (1 + D)bsV of a microbatch's logits."""
        return self.outputs * self.vocab_size

    @property
    def joining_parameters(self) -> int:
        """Parameters of the matrix with which a depth joins a position and a token."""
        return 2 * self.hidden_size**2 // self.tensor.ranks

    @property
    def joining_flops(self) -> int:
        """FLOPs of that product in F; in B and in W it has as many."""
        return 2 * self.tokens * self.joining_parameters

    @property
    def depth_parameters(self) -> int:
        """Parameters of a depth."""
        return self.layer_parameters + self.joining_parameters + self.depth_vector_parameters

    @property
    def last_window(self) -> int | None:
        """Window of the last layer of the model, and of the layers of all depths."""
        return self.windows[-1] if self.windows else None

    @property
    def repeats_depths(self) -> bool:
        """Whether B computes whole depths again."""
        return bool(self.recomputed.group) and self.recomputed.most is None

    @property
    def depth_repeated_flops(self) -> int:
        """FLOPs of a microbatch that B repeats of a depth."""
        hidden = self.hidden_flops(self.last_window)
        if self.repeats_depths:
            return self.forward_flops + self.joining_flops - hidden
        return self.repeated_flops - (hidden if self.recomputed.core else 0)

    def stage_repeated_flops(self, layers: int, first: int = 0) -> int:
        """Return the FLOPs of a microbatch that a stage's B repeats.

        Args:
            layers: of the stage.
            first: index of the first of them in the whole model.
        """
        again = self.recomputed
        whole, groups = again.layers(layers), again.groups(layers)
        parts = (layers - whole) * self.repeated_flops
        attending = self.windows[first : first + (layers if again.core else whole)]
        hidden = sum(map(self.hidden_flops, attending))
        return parts + whole * self.forward_flops - groups * self.spared_flops - hidden


def iteration_flops(shape: Shape, num_layers: int, microbatches: int) -> int:
    """Return the FLOPs of a replica's iteration as the paper counts them, without recomputation.

    Only matrix products count, and the backward counts twice the forward. For a GPT with an MLP of
    width ffn and B sequences in all microbatches together, the FLOPs are

        3 (2 BshV + L (8 Bsh^2 + 4 Bs^2 h + 4 Bsh ffn)).

    Attention counts in full; today's Megatron-LM counts half of it. What windows hide does not
    count. V is the real vocabulary, because padding is no useful work.

    Args:
        shape: the model and one microbatch.
        num_layers: transformer layers of the whole model.
        microbatches: microbatches of the iteration.
    """
    whole = replace(shape, tensor=WHOLE, context=1)
    forward = num_layers * whole.forward_flops + whole.output_product_flops
    depth = whole.forward_flops + whole.joining_flops - whole.hidden_flops(whole.last_window)
    forward += shape.depths * depth
    forward -= sum(whole.hidden_flops(window) for window in shape.windows)
    return 3 * microbatches * forward
