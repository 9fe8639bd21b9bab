"""Kernels of a GPU: cuBLAS for products, PyTorch's own attention, Triton for other work."""
