"""The shape of a model, from which the simulator counts FLOPs and bytes."""

from dataclasses import replace

from megatron.config.run_config import RunConfig
from megatron.model.config import ModelConfig
from megatron.simulator.costs.shape import Shape


def shape_of(model: ModelConfig, micro_batch_size: int) -> Shape:
    """Return the shape from which the simulator counts FLOPs and bytes."""
    return Shape(
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        seq_length=model.seq_length,
        vocab_size=model.vocab_size,
        micro_batch_size=micro_batch_size,
        ffn_hidden_size=model.ffn_hidden_size,
        query_width=model.num_attention_heads * model.kv_channels,
        key_value_width=2 * model.num_query_groups * model.kv_channels,
        gated_mlp=model.activation == "swiglu",
        output_slope=model.activation == "squared_relu",
        vector_parameters=_vector_parameters(model),
        own_queries=model.qk_layernorm or model.position_embedding_type == "rope",
        dropout=model.hidden_dropout > 0,
    )


def _vector_parameters(model: ModelConfig) -> int:
    """Parameters of a layer's biases and norms."""
    h, d = model.hidden_size, model.kv_channels
    norms = 2 * h + (2 * d if model.qk_layernorm else 0)
    biases = 0
    if model.add_bias_linear or model.add_qkv_bias:
        biases += (model.num_attention_heads + 2 * model.num_query_groups) * d
    if model.add_bias_linear:
        biases += 2 * h + model.ffn_hidden_size * (2 if model.activation == "swiglu" else 1)
    return norms * (2 if model.normalization == "LayerNorm" else 1) + biases


def shape_of_run(config: RunConfig) -> Shape:
    """Return the shape of a run, with what its backward computes again."""
    train = config.train
    shape = shape_of(config.model, train.micro_batch_size)
    return replace(shape, vocab_recompute=train.vocab_recompute)
