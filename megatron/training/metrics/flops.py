"""Floating-point operations of a training iteration, counted as the paper counts them.

Only matrix products count, two operations per multiply-add, and the backward costs twice the
forward. For a plain GPT the sum is (as arXiv 2411.05288 reports it, with ffn for its 4h)

    3 (2 BshV + L (8 Bsh^2 + 4 Bs^2 h + 4 Bsh ffn)),    B = samples per iteration.

Attention counts in full although the causal half of it is never needed; today's Megatron-LM
counts that half only, and so reports less. V is the real vocabulary: padding is no useful work.
"""

from megatron.model.config import ModelConfig
from megatron.simulator.costs import shape
from megatron.training.planning.model_shape import shape_of

FLOPS_CONVENTION = (
    "model FLOPs = 3 x forward matrix products, causal attention counted in full "
    "(Megatron-LM counts half), vocabulary without padding"
)


def iteration_flops(model: ModelConfig, global_batch_size: int) -> int:
    """Operations of one training iteration, over all ranks.

    Args:
        model: the model.
        global_batch_size: samples of the iteration.

    Returns:
        Three times the forward of all layers and of the output layer.
    """
    return shape.iteration_flops(shape_of(model, 1), model.num_layers, global_batch_size)
