"""Sums of squares, divisions of gradients and AdamW in PyTorch."""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron.kernels.adamw import AdamWStep, AdamWTensors

# Summing 64M fp32 squares in one go loses 1.2 % on the CPU (one running sum per SIMD lane); blocks
# of this many, added up in fp64, lose 1e-8 (4e-6 at worst) and run at the speed of memory.
BLOCK_ELEMENTS = 4096

ELEMENTS_AT_ONCE: Final = 1 << 22
"""Elements that are widened to fp32 at a time: 16 MiB for each of gradient, mean and square."""


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
    """See ``Kernels.adamw_``; it is PyTorch's fused kernel here.

    The kernel makes one pass over master, gradient and both moments. In this pass it also divides
    by the last divisor. On one CPU core (17 GB/s) a step takes 160 ms per 100M bf16 parameters, of
    which rounding takes 45 ms. Slices that stay in cache were no faster, since the kernel already
    runs at the speed of memory. Gradients and moments of 16 bits are widened to fp32 and rounded
    back, some elements at a time, so that the wide copies need little memory.
    """
    gradients = tensors.gradients
    if not step.keeps_quotients:
        gradients = [gradient.clone() for gradient in gradients]
    columns = (tensors.masters, gradients, tensors.moments, tensors.squares)
    kinds = list(zip(tensors.decays, tensors.in_vocabulary, strict=True))
    if _is_narrow(columns):
        divide(gradients, step.divisors)
        for kind, operands in zip(kinds, zip(*columns, strict=True), strict=True):
            _update_narrow(operands, step, *kind)
    else:
        divisor = last_divisor(gradients, step.divisors)
        for kind in dict.fromkeys(kinds):
            own = [i for i, other in enumerate(kinds) if other == kind]
            _update([[column[i] for i in own] for column in columns], step, *kind, divisor)
    if tensors.weights:
        torch._foreach_copy_(list(tensors.weights), list(tensors.masters))


def _is_narrow(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Whether gradients or moments are narrower than the masters."""
    return len({column[0].dtype for column in columns}) > 1


def _update_narrow(
    operands: Sequence[Tensor], step: AdamWStep, decays: bool, in_vocabulary: bool
) -> None:
    """Update one master whose gradient or moments are narrower; operands as in ``_update``."""
    for slices in in_slices(operands, ELEMENTS_AT_ONCE):
        wide = [each.to(operands[0].dtype) for each in slices]  # no copy if it is wide already
        _update([[each] for each in wide], step, decays, in_vocabulary)
        for moment, updated in zip(slices[2:], wide[2:], strict=True):
            if moment is not updated:
                moment.copy_(updated)


def _update(
    operands: Sequence[list[Tensor]],
    step: AdamWStep,
    decays: bool,
    in_vocabulary: bool,
    divisor: Tensor | None = None,
) -> None:
    """Update masters by PyTorch's kernel.

    This calls PyTorch's function, because PyTorch's class imports the compiler, which takes a
    second at every start.

    Args:
        operands: masters, their gradients, first and second moments, all of one type.
        step: the numbers of the step.
        decays: whether the weight decay applies.
        in_vocabulary: whether the learning rate of the vocabulary layers applies.
        divisor: the kernel divides gradients by it in the same pass; ``None``: it does not divide.
    """
    masters, gradients, means, squares = operands
    before = torch.full((len(masters),), step.number - 1.0, device=masters[0].device)
    adamw(
        masters,
        gradients,
        means,
        squares,
        [],
        list(before.unbind()),  # the kernel adds 1 to each
        fused=True,
        grad_scale=divisor,
        amsgrad=False,
        maximize=False,
        beta1=step.betas[0],
        beta2=step.betas[1],
        eps=step.epsilon,
        lr=step.vocabulary_lr if in_vocabulary else step.lr,
        weight_decay=step.weight_decay if decays else 0.0,
    )


def in_slices(tensors: Sequence[Tensor], elements: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield flat views of the same slice of all tensors, which have one shape, slice by slice."""
    flat = (tensor.detach().view(-1).split(elements) for tensor in tensors)
    return zip(*flat, strict=True)


def last_divisor(gradients: Sequence[Tensor], divisors: Sequence[float]) -> Tensor | None:
    """Divide by all divisors except the last; return the last as a scalar, ``None`` without any.

    PyTorch's fused kernels divide gradients by a scale, which is meant for loss scaling, and store
    the quotients. This saves a pass over memory for a separate division.
    """
    if not divisors:
        return None
    divide(gradients, divisors[:-1])
    return torch.full((), divisors[-1], device=gradients[0].device)


def divide(gradients: Sequence[Tensor], divisors: Sequence[float]) -> None:
    """Divide gradients by one number after the other, in place; there may be no gradients."""
    for divisor in divisors if gradients else ():
        torch._foreach_div_(list(gradients), torch.full((), divisor, device=gradients[0].device))
