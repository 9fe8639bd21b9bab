"""Sums of squares and AdamW in PyTorch."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.kernels.adamw import AdamWStep, AdamWTensors

# Summing 64M fp32 squares in one go loses 1.2 % on the CPU (one running sum per SIMD lane); blocks
# of this many, added up in fp64, lose 1e-8 (4e-6 at worst) and run at the speed of memory.
BLOCK_ELEMENTS = 4096


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Sum of squares in float64 [] of a contiguous tensor: fp32 within blocks, fp64 across."""
    flat, dtype = tensor.view(-1), torch.promote_types(tensor.dtype, torch.float32)
    whole = flat.numel() - flat.numel() % BLOCK_ELEMENTS
    block_norms: Tensor = torch.linalg.vector_norm(
        flat[:whole].view(-1, BLOCK_ELEMENTS), dim=1, dtype=dtype
    )
    tail_norm: Tensor = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    return block_norms.double().square().sum() + tail_norm.double().square()


def adamw_(tensors: AdamWTensors, step: AdamWStep) -> None:
    """See ``Kernels.adamw_``."""
    beta1, beta2 = step.betas
    correction1, correction2 = 1 - beta1**step.number, 1 - beta2**step.number
    for index, (kept, master) in enumerate(zip(tensors.gradients, tensors.masters, strict=True)):
        gradient = _divided(kept, step.divisors)
        if step.keeps_quotients:
            kept.copy_(gradient)
        gradient = gradient.to(master.dtype)
        lr = step.vocabulary_lr if tensors.in_vocabulary[index] else step.lr
        if tensors.decays[index]:
            master.sub_(lr * step.weight_decay * master)
        moment = tensors.moments[index].to(master.dtype) * beta1 + (1 - beta1) * gradient
        square = tensors.squares[index].to(master.dtype) * beta2 + (1 - beta2) * gradient**2
        master.sub_(lr / correction1 * moment / ((square / correction2).sqrt() + step.epsilon))
        tensors.moments[index].copy_(moment)
        tensors.squares[index].copy_(square)
    for weight, master in zip(tensors.weights, tensors.masters, strict=bool(tensors.weights)):
        weight.copy_(master)


def _divided(gradient: Tensor, divisors: Iterable[float]) -> Tensor:
    for divisor in divisors:
        gradient = gradient / divisor
    return gradient
