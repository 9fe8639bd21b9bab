"""The optimizer that a configuration asks for."""

from collections.abc import Sequence

from megatron.model.ownership import LAYERS
from megatron.optimizer.adamw import AdamW
from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.mixed_precision import Master, MixedPrecisionOptimizer, Rule
from megatron.optimizer.muon import Muon, QKVRows
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.parameters import ParameterPart
from megatron.optimizer.sgd import SGD
from megatron.parallel.groups import ConnectedAxis


def make_optimizer(
    config: OptimizerConfig,
    qkv: QKVRows,
    tensor: ConnectedAxis,
    parts: Sequence[ParameterPart],
) -> Optimizer:
    """Return the optimizer of some parts of this rank's parameters.

    Args:
        config: which one, and its settings.
        qkv: how queries, keys and values lie in the fused matrices.
        tensor: the ranks that share the layers, for sums outside of the schedule.
        parts: at least one.
    """

    def rules(masters: Sequence[Master]) -> list[Rule]:
        match config.optimizer:
            case "adam":
                return [AdamW(masters, config)]
            case "sgd":
                return [SGD(masters, config)]
            case "muon":
                matrices = [master for master in masters if takes_muon(master)]
                others = [master for master in masters if not takes_muon(master)]
                made: list[Rule] = [Muon(matrices, config.muon, qkv, tensor)]
                return [*made, AdamW(others, config)] if others else made

    return MixedPrecisionOptimizer(parts, config.clip_grad, rules)


def takes_muon(master: Master) -> bool:
    """Whether Muon updates it: a matrix of a layer.

    Vocabulary and position tables, norms and biases are left to AdamW. (Megatron gives Muon the
    position table too.)
    """
    return master.name.startswith(LAYERS) and len(master.part.global_shape) == 2
