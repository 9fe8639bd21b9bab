"""Parameters of single modules, as the optimizer sees those of a model."""

from collections.abc import Iterable, Sequence

from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.model.ownership import OwnedParameter
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.make import make_optimizer
from megatron.optimizer.muon import QKVRows
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.parameters import ParameterPart
from megatron.optimizer.settings import OptimizerSettings
from megatron.parallel.groups import ConnectedAxis

ALONE = ConnectedAxis("tensor", 0, (0,))

QKV = QKVRows(query=4, key=2, value=2)
"""Rows of a query group in a fused matrix."""


def entries(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[OwnedParameter]:
    """Named parameters, each a whole tensor of its model."""
    return [OwnedParameter.whole(name, p) for name, p in parameters]


def optimizer_of(config: OptimizerSettings, owned: Sequence[OwnedParameter]) -> Optimizer:
    """The optimizer of whole parameters, which have their gradients."""
    return make_optimizer(
        config,
        QKV,
        ALONE,
        kernels_for(owned[0].parameter.device, owned[0].parameter.dtype),
        list(map(ParameterPart.whole, owned)),
    )


def rates_of(config: OptimizerSettings, lr: float) -> Rates:
    """A learning rate for all weights, with the constant weight decay."""
    return Rates(lr, lr, config.weight_decay)
