"""Parameters of single modules, as the optimizer sees those of a model."""

from collections.abc import Iterable

from torch import nn

from megatron.model.ownership import OwnedParameter
from megatron.optimizer.parameters import OptimizedParameter


def entries(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[OptimizedParameter]:
    """Named parameters, each a whole tensor of its model."""
    return [OptimizedParameter.of(OwnedParameter.whole(name, p)) for name, p in parameters]
