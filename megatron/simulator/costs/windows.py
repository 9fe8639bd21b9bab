"""How much of a full layer each layer of a model is, where some have a window."""

from megatron.schedules.passes import PassKind
from megatron.simulator.costs.device import Product
from megatron.simulator.costs.from_model import ModelTimes


def layer_weights(times: ModelTimes) -> dict[PassKind, tuple[float, ...]]:
    """Return the time of every layer as a share of that of a layer without a window.

    Args:
        times: times of the model's parts.

    Returns:
        By kind of pass; without those in which all layers take the same time.
    """
    shape, device, whole = times.shape, times.device, times.layer()
    hidden = [shape.hidden_flops(window) for window in shape.windows]
    if not any(hidden):
        return {}
    # Passes with attention, the kind of its products, and how often it has those of a forward.
    products: tuple[tuple[PassKind, Product, int], ...] = (
        ("F", "forward", 1),
        ("B", "backward", 2 + shape.recomputed.core),
    )
    return {
        kind: tuple(1 - device.product(product, often * own) / whole[kind] for own in hidden)
        for kind, product, often in products
    }
