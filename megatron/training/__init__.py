"""Flags to configurations, the training loop, metrics and logging."""
