"""The tensors of a checkpoint: names and boxes of the tensors that the optimizer keeps."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from megatron.checkpoint.boxed import BoxedTensor
from megatron.model.ownership import OwnedBuffer
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

    The weights are the optimizer's master weights; the model's weights are rounded from them.

    Args:
        parts: the parts of this rank's parameters that the optimizer updates.
        optimizer: optimizer of the parts.
        moments: whether to include the tensors that only the optimizer needs.
    """
    found = {}
    for part in parts:
        for kind, tensor in optimizer.tensors_of(part.name).items():
            if moments or kind == WEIGHT:
                found[f"{kind}.{part.name}"] = BoxedTensor(tensor, part.global_shape, part.pieces)
    return found


def tensors_of_buffers(buffers: Iterable[OwnedBuffer]) -> dict[str, BoxedTensor]:
    """Return tensors of the model that no gradient reaches, as ``weight.NAME``.

    All ranks that have parts of a layer have the same values.
    """
    return {
        f"{WEIGHT}.{own.name}": BoxedTensor(
            own.buffer, tuple(own.buffer.shape), whole(tuple(own.buffer.shape))
        )
        for own in buffers
    }


def tensors_of_scales(scales: Mapping[str, Tensor]) -> dict[str, BoxedTensor]:
    """Return the state of 8-bit delayed scaling of every layer, as ``fp8_scales.NAME``.

    All ranks that have parts of a layer have the same state.

    Args:
        scales: state of every layer, by the name of the layer.
    """
    return {
        f"{SCALES}.{name}": BoxedTensor(tensor, tuple(tensor.shape), whole(tuple(tensor.shape)))
        for name, tensor in scales.items()
    }
