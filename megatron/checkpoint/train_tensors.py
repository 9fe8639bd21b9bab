"""The tensors of a checkpoint: names and boxes for what the optimizer keeps of every parameter."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from megatron.checkpoint.boxed import BoxedTensor
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.parameters import ParameterPart
from megatron.parallel.box import whole

WEIGHT = "weight"
SCALES = "fp8_scales"


def tensors_of(
    parts: Iterable[ParameterPart],
    optimizer: Optimizer,
    *,
    moments: bool = True,
) -> dict[str, BoxedTensor]:
    """Return the tensors of this rank by name: ``weight.NAME``, ``exp_avg.NAME``, ...

    Weights are the optimizer's masters, from which the model's own are rounded.

    Args:
        parts: of this rank's parameters that the optimizer updates.
        optimizer: of the parts.
        moments: whether to include what only the optimizer needs.
    """
    found = {}
    for part in parts:
        for kind, tensor in optimizer.tensors_of(part.name).items():
            if moments or kind == WEIGHT:
                found[f"{kind}.{part.name}"] = BoxedTensor(tensor, part.global_shape, part.pieces)
    return found


def tensors_of_scales(scales: Mapping[str, Tensor]) -> dict[str, BoxedTensor]:
    """Return what delayed scaling in 8 bits remembers of every layer, as ``fp8_scales.NAME``.

    All ranks that have parts of a layer have the same.

    Args:
        scales: by the names of the layers.
    """
    return {
        f"{SCALES}.{name}": BoxedTensor(tensor, tuple(tensor.shape), whole(tuple(tensor.shape)))
        for name, tensor in scales.items()
    }
