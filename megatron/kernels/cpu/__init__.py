"""What a CPU does better than by PyTorch's own kernels, in C++ for bf16."""
