"""Triton programs, which run on the GPU; ``operators`` launches them."""
