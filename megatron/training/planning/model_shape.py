"""The shape of a model, from which the simulator counts FLOPs and bytes."""

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
        gated_mlp=model.swiglu,
        own_queries=model.qk_layernorm or model.position_embedding_type == "rope",
        dropout=model.hidden_dropout > 0,
    )
