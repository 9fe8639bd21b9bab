"""The tensors of a checkpoint: names and boxes for what the optimizer keeps of every parameter."""

from collections.abc import Iterable

from megatron.checkpoint.boxed import BoxedTensor
from megatron.optimizer.adamw import MixedPrecisionAdamW
from megatron.optimizer.parameters import OptimizedParameter

WEIGHT = "weight"


def tensors_of(
    parameters: Iterable[OptimizedParameter],
    optimizer: MixedPrecisionAdamW,
    *,
    moments: bool = True,
) -> dict[str, BoxedTensor]:
    """Return the tensors of this rank by name: ``weight.NAME``, ``exp_avg.NAME``, ...

    Weights are the optimizer's masters, from which the model's own are rounded.

    Args:
        parameters: of this rank.
        optimizer: of the parameters.
        moments: whether to include what only the optimizer needs.
    """
    found = {}
    for entry in parameters:
        owned = entry.owned
        for kind, tensor in optimizer.tensors_of(owned.name).items():
            if moments or kind == WEIGHT:
                boxed = BoxedTensor(tensor, owned.global_shape, owned.pieces)
                found[f"{kind}.{owned.name}"] = boxed
    return found
