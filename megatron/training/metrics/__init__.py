"""Measures times and memory of a run, records them, and writes the records."""
