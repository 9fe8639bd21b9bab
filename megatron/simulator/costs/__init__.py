"""Costs of passes and communications from a model and a device, or from measured tables."""

from megatron.simulator.costs.redistribute import redistribute, redistribute_stages
from megatron.simulator.costs.shape import Shape

__all__ = ["Shape", "redistribute", "redistribute_stages"]
