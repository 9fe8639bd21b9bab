"""The optimizer that a configuration asks for."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.model.ownership import OUTPUT_LAYER, WORD_EMBEDDINGS, OwnedParameter
from megatron.optimizer.adamw import AdamW, keeps_16_bits
from megatron.optimizer.apex_adamw import ApexAdamW
from megatron.optimizer.bucket_layouts import KeepsWhole
from megatron.optimizer.host_link import HostLink
from megatron.optimizer.host_optimizer import HostOptimizer, SplitOptimizer
from megatron.optimizer.matrix_rates import rules_by_width
from megatron.optimizer.mixed_precision import Master, MixedPrecisionOptimizer, Rule
from megatron.optimizer.muon import Muon, QKVRows
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.parameters import ParameterPart
from megatron.optimizer.settings import OptimizerSettings
from megatron.optimizer.sgd import SGD
from megatron.parallel.groups import ConnectedAxis


def make_optimizer(
    config: OptimizerSettings,
    qkv: QKVRows,
    tensor: ConnectedAxis,
    kernels: Kernels,
    parts: Sequence[ParameterPart],
) -> Optimizer:
    """Return the optimizer of some parts of this rank's parameters.

    Args:
        config: names the optimizer and its settings.
        qkv: how queries, keys and values lie in the fused matrices.
        tensor: the ranks that share the layers, with a process group for communication outside of
            the schedule.
        kernels: of the parameters' device.
        parts: the parts of parameters, at least one.
    """

    def rules(masters: Sequence[Master]) -> list[Rule]:
        match config.optimizer:
            case "adam":
                return rules_by_width(masters, config, partial(_adamw, kernels=kernels))
            case "sgd":
                return rules_by_width(masters, config, SGD)
            case "muon":
                matrices = [master for master in masters if takes_muon(master.owned)]
                others = [master for master in masters if not takes_muon(master.owned)]
                made: list[Rule] = [Muon(matrices, config.muon, qkv, tensor)]
                return [*made, _adamw(others, config, kernels)] if others else made

    def decays(owned: OwnedParameter) -> bool:
        return config.decays(owned.name, owned.parameter.dim())

    return MixedPrecisionOptimizer(parts, config.clip_grad, rules, decays)


def make_with_host(
    config: OptimizerSettings,
    qkv: QKVRows,
    tensor: ConnectedAxis,
    kernels: Kernels,
    link: HostLink,
    parts: Sequence[ParameterPart],
) -> Optimizer:
    """Return the optimizer of some parts of this rank's parameters, with states on the host.

    Arguments are those of ``make_optimizer``, and ``link``, which knows the parts of the rank whose
    states are on the host. PyTorch's kernels update them there.
    """
    here = [part for part in parts if part.name not in link.names]
    there = [part for part in parts if part.name in link.names]
    made: list[Optimizer] = []
    if here:
        made.append(make_optimizer(config, qkv, tensor, kernels, here))
    if there:
        on_cpu = replace(config, implementation="torch")
        by_cpu = partial(make_optimizer, on_cpu, qkv, tensor, ReferenceKernels())
        again = config.post_validation
        made.append(HostOptimizer(there, by_cpu, link, config.clip_grad, steps_again=again))
    names = [[part.name for part in own] for own in (here, there) if own]
    return made[0] if len(made) == 1 else SplitOptimizer(made, names)


def _adamw(masters: Sequence[Master], config: OptimizerSettings, kernels: Kernels) -> Rule:
    if config.implementation == "apex":
        assert not keeps_16_bits(masters, config), "FusedAdam takes one type for all"
        return ApexAdamW(masters, config)
    return AdamW(
        masters, config, kernels if config.implementation == "local" else ReferenceKernels()
    )


def make_idle_optimizer(parts: Sequence[ParameterPart]) -> Optimizer:
    """Return an optimizer that holds the weights in full precision, and never steps.

    Runs that only evaluate load their weights through this optimizer.
    """
    return MixedPrecisionOptimizer(parts, 0.0, lambda masters: [], lambda owned: False)


def keeps_whole(config: OptimizerSettings) -> KeepsWhole:
    """Return a function that tells which parameters the optimizer needs whole."""
    return takes_muon if config.takes_whole_matrices else _takes_parts


def _takes_parts(owned: OwnedParameter) -> bool:
    """Return False: the optimizer updates each element by itself."""
    return False


def takes_muon(owned: OwnedParameter) -> bool:
    """Return whether Muon updates a parameter: it must be a matrix, and not of the vocabulary.

    As in Megatron-Core, AdamW updates the input and the output layer, norms and biases, and Muon
    updates the table of learned positions too.
    """
    of_vocabulary = owned.name in (WORD_EMBEDDINGS, OUTPUT_LAYER)
    return len(owned.global_shape) == 2 and not of_vocabulary
