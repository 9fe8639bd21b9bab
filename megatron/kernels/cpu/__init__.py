"""Kernels that are faster on a CPU than PyTorch's own, in C++ for bf16."""
