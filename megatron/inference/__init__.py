"""Trained models at work: they generate text, and score it."""
