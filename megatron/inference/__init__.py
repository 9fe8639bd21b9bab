"""Models that were trained, run forward: generating text, and scoring it."""
