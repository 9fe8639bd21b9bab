"""Work between products, and the optimizer's step, against the bytes that each must move.

Shapes: n tokens, h hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from megatron.kernels.adamw import AdamWStep, AdamWTensors
from megatron.kernels.choose import kernels_for
from megatron.kernels.face import Kernels
from megatron.optimizer.apex_adamw import load_fused_adam
from tools.gpu_sections.timing import Scale, Section, laps, table

HEAD_SIZE: Final = 128
STEP: Final = AdamWStep((), False, 1e-4, 1e-4, 0.1, (0.9, 0.95), 1e-8, 10)


@dataclass(frozen=True)
class Work:
    """An operation to time.

    Attributes:
        name: of the operation.
        run: runs the operation once.
        bytes: bytes that the operation must read and write, each once.
    """

    name: str
    run: Callable[[], object]
    bytes: int


def measure(scale: Scale) -> Section:
    """Time each operation by the kernels that training takes."""
    n, h = (64, 64) if scale.small else (4096, 4096)
    kernels = kernels_for(scale.device, torch.bfloat16)
    steps, lack = _optimizer_works(scale, kernels)
    works = [*_row_works(scale, kernels, n, h), *steps]
    seconds = laps(scale, [work.run for work in works])
    known = scale.gpu
    rows, values = [], {}
    for work, taken in zip(works, seconds, strict=True):
        speed = work.bytes / taken
        share = "" if known is None else f"{speed / known.bandwidth:.0%}"
        rows.append((work.name, 1e6 * taken, work.bytes / 1e6, speed / 1e9, share))
        values[work.name] = speed
    head = ("operation", "us", "MB that must move", "GB/s", "of the memory's")
    said = f"n = {n}, h = {h}, bf16, by {type(kernels).__name__}; the optimizer has fp32 states."
    without = [] if lack is None else ["", f"Without apex's FusedAdam: {lack}."]
    return Section([said, "", *table(head, rows), *without], {"bytes_per_s": values})


def _row_works(scale: Scale, kernels: Kernels, n: int, h: int) -> list[Work]:
    """Forward and backward of norms, activations and rotations."""

    def drawn(*shape: int) -> Tensor:
        return scale.drawn(*shape).requires_grad_()

    x, part, weight, bias = drawn(n, h), drawn(n, h), drawn(h), drawn(h)
    total, normed = kernels.add_layer_norm(x, part, weight, bias, 1e-5)
    few, half = drawn(n // 2, h), n // 2 * h
    _, few_normed = kernels.add_layer_norm(few, None, weight, bias, 1e-5)
    wide, wide_bias = drawn(n, 4 * h), drawn(4 * h)
    inner = kernels.gelu(wide, wide_bias)
    heads = max(1, h // HEAD_SIZE)
    q = drawn(1, n, heads, min(h, HEAD_SIZE))
    cos, sin = torch.randn(2, n, 1, q.shape[3] // 2, device=scale.device).unbind()
    turned = kernels.rotate(q, cos, sin, interleaved=False)
    one = 2 * n * h  # bytes of [n, h]

    def backward(outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> Callable[[], object]:
        grads = [torch.randn_like(output) for output in outputs]
        return lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

    return [
        Work(
            "sum and LayerNorm",
            lambda: kernels.add_layer_norm(x, part, weight, bias, 1e-5),
            4 * one,
        ),
        Work("their backward", backward((total, normed), (x, part, weight, bias)), 4 * one),
        Work(
            "LayerNorm's backward [n/2, h]", backward((few_normed,), (few, weight, bias)), 6 * half
        ),
        *_embedding_works(scale, kernels, n, h),
        Work("GELU [n, 4h]", lambda: kernels.gelu(wide, wide_bias), 8 * one),
        Work("its backward with a bias", backward((inner,), (wide, wide_bias)), 12 * one),
        Work("rotation", lambda: kernels.rotate(q, cos, sin, interleaved=False), 2 * one),
        Work("rotation back", backward((turned,), (q,)), 2 * one),
    ]


def _embedding_works(scale: Scale, kernels: Kernels, n: int, h: int) -> list[Work]:
    """Gradients of the input embedding (IB), with all tokens here and with an eighth of them.

    All tokens are sorted either way, but the rows of tokens of other shards are not read.
    """
    rows = n
    gradient = torch.randn(n, h, device=scale.device, dtype=torch.bfloat16)
    total = torch.zeros(rows, h, device=scale.device)
    works = []
    for shards in (1, 8):
        tokens = torch.randint(rows * shards, (n,), device=scale.device)
        works.append(
            Work(
                f"IB, tokens of {shards} shards",
                partial(kernels.add_rows_, total, tokens, gradient, 0),
                (2 + 8) * n * h // shards,
            )
        )
    return works


def _optimizer_works(scale: Scale, kernels: Kernels) -> tuple[list[Work], str | None]:
    """Return the gradient norm and optimizer steps, and the reason why apex's is missing."""
    count, size = (2, 1 << 12) if scale.small else (8, 1 << 26)
    wide = [[torch.zeros(size, device=scale.device) for _ in range(count)] for _ in range(4)]
    weights = [torch.zeros(size, device=scale.device, dtype=torch.bfloat16) for _ in range(count)]
    no = [False] * count
    tensors = AdamWTensors(wide[0], wide[1], wide[2], wide[3], weights, no, no)
    works = [
        Work("norm of gradients", lambda: kernels.sum_of_squares(wide[0]), 4 * count * size),
        Work("AdamW", lambda: kernels.adamw_(tensors, STEP), 30 * count * size),
    ]
    if scale.device.type != "cuda":
        return works, "it is for GPUs only"
    try:
        return [*works, step_by_apex(tensors)], None
    except ValueError as error:
        return works, str(error)


def step_by_apex(tensors: AdamWTensors) -> Work:
    """Return the same step by apex: its kernel, and the rounding, which takes one more pass.

    Args:
        tensors: without decay, outside of the vocabulary.

    Raises:
        ValueError: apex's optimizer is not installed.
    """
    for master, gradient in zip(tensors.masters, tensors.gradients, strict=True):
        master.grad = gradient
    fused = load_fused_adam()(
        params=list(tensors.masters),
        lr=STEP.lr,
        betas=STEP.betas,
        eps=STEP.epsilon,
        set_grad_none=False,
    )
    fused.param_groups[0]["step"] = STEP.number - 1
    for master, moment, square in zip(
        tensors.masters, tensors.moments, tensors.squares, strict=True
    ):
        fused.state[master] = {"exp_avg": moment, "exp_avg_sq": square}

    def step() -> None:
        fused.step()
        torch._foreach_copy_(list(tensors.weights), list(tensors.masters))

    elements = sum(master.numel() for master in tensors.masters)
    return Work("AdamW by apex, and rounding", step, 30 * elements)
