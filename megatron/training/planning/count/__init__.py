"""Runs the real layers without values, and lists what a GPU would be asked to do."""
