"""Timelines, traces and measured costs of a run, and plans made from them."""
