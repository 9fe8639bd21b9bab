"""What the passes cost by their FLOPs: enough to place them before anything is measured."""

from collections.abc import Callable

from megatron.model.config import ModelConfig
from megatron.schedules.passes import Pass, PassKind
from megatron.training.config import ParallelConfig
from megatron.training.flops import layer_forward_flops, output_forward_flops

LOOKUP_FLOPS_PER_ELEMENT = 600
"""What reading and adding an embedding costs, as arithmetic that would take as long: about six
bytes an element, on devices that do about a hundred operations in the time of one byte."""


def pass_costs(
    model: ModelConfig, parallel: ParallelConfig, micro_batch_size: int
) -> Callable[[int, Pass], float]:
    """Return the assumed duration of a pass on a rank, in FLOPs.

    Backwards cost twice the forward. The output layer has three matrix products: S forms one of
    them with two barriers and two with one, T the rest; without vocabulary parallelism all are on
    the last stage, one in F and two in B.
    """
    ranks = parallel.pipeline_size
    layers = layer_forward_flops(model, micro_batch_size) * model.num_layers / ranks
    output = float(output_forward_flops(model, micro_batch_size))
    lookup = LOOKUP_FLOPS_PER_ELEMENT * micro_batch_size * model.seq_length * model.hidden_size
    share = output / ranks
    in_s = {"none": 0, "vocab-1": 1, "vocab-2": 2}[parallel.vocab_parallel]
    costs: dict[PassKind, float] = {
        "F": layers,
        "B": 2 * layers,
        "S": in_s * share,
        "T": (3 - in_s) * share,
        "IF": lookup,
        "IB": lookup,
    }
    last = {"F": layers + output, "B": 2 * (layers + output)}

    def cost(rank: int, item: Pass) -> float:
        if parallel.vocab_parallel == "none" and rank == ranks - 1:
            return last.get(item.kind, costs[item.kind])
        return costs[item.kind]

    return cost
