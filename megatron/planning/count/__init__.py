"""Runs the real layers without values, and lists the work that a GPU would do."""
