"""What the passes cost by their FLOPs: enough to place them before anything is measured."""

from megatron.model.config import ModelConfig
from megatron.schedules.costs import Costs
from megatron.schedules.plan import VOCABULARY_BARRIERS
from megatron.training.config import ParallelConfig
from megatron.training.flops import layer_forward_flops, output_forward_flops

LOOKUP_FLOPS_PER_ELEMENT = 600
"""What reading and adding an embedding costs, as arithmetic that would take as long: about six
bytes an element, on devices that do about a hundred operations in the time of one byte."""


def pass_costs(model: ModelConfig, parallel: ParallelConfig, micro_batch_size: int) -> Costs:
    """Return the assumed durations of passes, in FLOPs; stage i is on rank i.

    Backwards cost twice the forward. Of the output layer's three matrix products S forms one with
    two barriers and else two, T the rest; without vocabulary parallelism S runs in the last stage's
    F and T in its B.
    """
    ranks = parallel.pipeline_size
    barriers = VOCABULARY_BARRIERS[parallel.vocab_parallel]
    products_in_s = 1 if barriers == 2 else 2
    layers = layer_forward_flops(model, micro_batch_size) * model.num_layers / ranks
    product = float(output_forward_flops(model, micro_batch_size))
    in_s, in_t = products_in_s * product, (3 - products_in_s) * product
    lookup = float(
        LOOKUP_FLOPS_PER_ELEMENT * micro_batch_size * model.seq_length * model.hidden_size
    )
    if barriers is None:
        others = ranks - 1
        return Costs(
            {
                "F": [layers] * others + [layers + in_s],
                "B": [2 * layers] * others + [2 * layers + in_t],
            }
        )
    return Costs(
        {
            "F": layers,
            "B": 2 * layers,
            "S": in_s / ranks,
            "T": in_t / ranks,
            "IF": lookup,
            "IB": lookup,
        }
    )
