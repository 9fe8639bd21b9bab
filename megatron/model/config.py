"""The shape of a GPT model, as frozen data that every layer below the flags reads."""

from dataclasses import dataclass
from typing import Literal

from megatron.layers.mlp import Activation


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides the model's mathematics and the size of its parameters.

    All values are resolved: no ``None`` means "derive it", because the flags are resolved before.

    Attributes:
        num_layers: transformer layers of the whole model.
        hidden_size: width h of the residual stream.
        ffn_hidden_size: inner width of the MLP (of each of the two halves with ``swiglu``).
        num_attention_heads: query heads.
        num_query_groups: key/value heads; equal to ``num_attention_heads`` without GQA.
        kv_channels: width of one head.
        seq_length: tokens per sample s.
        max_position_embeddings: rows of the learned position table.
        vocab_size: real vocabulary entries V, before padding.
        position_embedding_type: ``learned_absolute`` adds a table on the first stage; ``rope``
            rotates queries and keys.
        rotary_base: RoPE theta.
        rotary_percent: share of each head that is rotated.
        rotary_interleaved: RoPE turns neighbouring channels together, not those of two halves.
        use_rope_scaling: RoPE's low frequencies are scaled down, as in Llama 3.1.
        rope_scaling_factor: by which the lowest are divided.
        normalization: ``LayerNorm`` or ``RMSNorm``.
        norm_epsilon: epsilon of every norm.
        swiglu: SiLU-gated MLP instead of GELU.
        squared_relu: MLP with relu(x)^2 instead of GELU.
        qk_layernorm: normalise queries and keys per head.
        add_bias_linear: biases in the linear layers of the blocks.
        add_qkv_bias: a bias of queries, keys and values, also without ``add_bias_linear``.
        tie_embeddings: the output layer uses the input embedding's matrix.
        attention_dropout: dropout on attention probabilities.
        hidden_dropout: dropout on the embedding and on each residual branch.
        init_method_std: standard deviation of the normal initialisation.
        label_smoothing: share of the target mass spread evenly over the real vocabulary.
        z_loss_coeff: weight of the squared log-partition added to each token's loss.
        logit_softcap: c of ``c * tanh(logit / c)``; 0 switches it off.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int
    max_position_embeddings: int
    vocab_size: int
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_epsilon: float = 1e-5
    swiglu: bool = False
    squared_relu: bool = False
    qk_layernorm: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    tie_embeddings: bool = True
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    init_method_std: float = 0.02
    label_smoothing: float = 0.0
    z_loss_coeff: float = 0.0
    logit_softcap: float = 0.0

    @property
    def activation(self) -> Activation:
        """The MLP's activation function."""
        if self.swiglu:
            return "swiglu"
        return "squared_relu" if self.squared_relu else "gelu"
