"""What runs on the GPU, in Triton; ``operators`` launches it."""
