"""Timelines as pictures, text and traces."""
