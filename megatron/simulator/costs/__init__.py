"""Costs of passes and communications from a model and a device, or from measured tables."""

from megatron.simulator.costs.redistribute import redistribute, redistribute_stages

__all__ = ["redistribute", "redistribute_stages"]
