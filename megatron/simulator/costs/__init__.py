"""Costs of passes and communications from a model and a device, or from measured tables."""
