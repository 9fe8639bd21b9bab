"""Floating-point operations of a training iteration, counted as the paper counts them.

Only matrix products count, two operations per multiply-add, and the backward costs twice the
forward. For a plain GPT the sum is (as arXiv 2411.05288 reports it, with ffn for its 4h)

    3 (2 BshV + L (8 Bsh^2 + 4 Bs^2 h + 4 Bsh ffn)),    B = samples per iteration.

Attention counts in full although the causal half of it is never needed; today's Megatron-LM
counts that half only, and so reports less. V is the real vocabulary: padding is no useful work.
"""

from megatron.model.config import ModelConfig

FLOPS_CONVENTION = (
    "model FLOPs = 3 x forward matrix products, causal attention counted in full "
    "(Megatron-LM counts half), vocabulary without padding"
)


def layer_forward_flops(model: ModelConfig, samples: int) -> int:
    """Forward operations of one transformer layer.

    Args:
        model: widths; ``kv_channels``, query groups and ``swiglu`` are taken into account.
        samples: sequences of ``model.seq_length`` tokens.

    Returns:
        Operations of the four linear layers and of the two attention products.
    """
    tokens = samples * model.seq_length
    query_width = model.num_attention_heads * model.kv_channels
    key_value_width = 2 * model.num_query_groups * model.kv_channels
    qkv = 2 * tokens * model.hidden_size * (query_width + key_value_width)
    attention = 4 * tokens * model.seq_length * query_width
    projection = 2 * tokens * query_width * model.hidden_size
    mlp_matrices = 3 if model.swiglu else 2
    mlp = 2 * mlp_matrices * tokens * model.hidden_size * model.ffn_hidden_size
    return qkv + attention + projection + mlp


def output_forward_flops(model: ModelConfig, samples: int) -> int:
    """Forward operations of the output layer, over the real vocabulary."""
    return 2 * samples * model.seq_length * model.hidden_size * model.vocab_size


def iteration_flops(model: ModelConfig, global_batch_size: int) -> int:
    """Operations of one training iteration, over all ranks.

    Args:
        model: the model.
        global_batch_size: samples of the iteration.

    Returns:
        Three times the forward of all layers and of the output layer.
    """
    layers = model.num_layers * layer_forward_flops(model, global_batch_size)
    return 3 * (layers + output_forward_flops(model, global_batch_size))
