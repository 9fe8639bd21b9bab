"""Every implementation of the kernels that this machine can run, and how exact each type is."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.choose import kernels_for
from megatron.kernels.cpu.kernels import CompiledKernels, CpuKernels
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.tiled.tiles import TileOperations

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 1e-2,
    torch.float16: 1.25e-3,
}
"""Norm of the error of a result, relative to its own norm."""

HALF_UNIT = 2**-8
"""Of the last of bf16's 8 digits, relative to the number: the most by which rounding changes it."""


def compiled() -> CompiledKernels:
    """The kernels of bf16 on a CPU."""
    kernels = kernels_for(CPU, torch.bfloat16)
    assert isinstance(kernels, CompiledKernels), "the tests need a C++ compiler"
    return kernels


def call_functions_quickly() -> None:
    """Let programs in Triton's interpreter call functions without preparing its language again.

    A launch prepares what our programs see of it, and the first call what Triton's own modules see.
    To do so for every call takes most of the time of a test.
    """
    from triton.runtime.interpreter import InterpretedFunction

    usual, prepared = InterpretedFunction.__call__, set[str]()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        module = function.fn.__module__
        if module.startswith("megatron.") or module in prepared:
            return function.rewrite()(*args, **kwargs)
        prepared.add(module)
        return usual(function, *args, **kwargs)

    InterpretedFunction.__call__ = call


def multiply_bf16_as_numbers() -> None:
    """Let Triton's interpreter multiply matrices in bf16, whose bits it takes for whole numbers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    usual = InterpreterBuilder.create_dot

    def widened(factor: Any) -> Any:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        bits = factor.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(builder: Any, left: Any, right: Any, *others: Any) -> Any:
        return usual(builder, widened(left), widened(right), *others)

    InterpreterBuilder.create_dot = create_dot


def of_a_gpu(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels of a GPU; on a CPU Triton interprets them."""
    from megatron.kernels.cuda.kernels import CudaKernels  # whose launches need Triton

    return CudaKernels(device, dtype)


@dataclass(frozen=True)
class Implementation:
    """Kernels and what they are tried on."""

    name: str
    device: torch.device
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name} {self.device.type} {str(self.dtype).removeprefix('torch.')}"

    @property
    def kernels(self) -> Kernels:
        makers: dict[str, Callable[[], Kernels]] = {
            "reference": ReferenceKernels,
            "cpu": CpuKernels,
            "compiled": compiled,
            "cuda": lambda: of_a_gpu(self.device, self.dtype),
        }
        return makers[self.name]()

    @property
    def tile_kernels(self) -> TileOperations:
        kernels = self.kernels
        assert isinstance(kernels, ReferenceKernels)
        return kernels

    @property
    def cuts_off(self) -> bool:
        """Whether bf16 loses digits instead of being rounded, as in Triton's interpreter."""
        return (self.name, self.device, self.dtype) == ("cuda", CPU, torch.bfloat16)

    @property
    def statistics(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def activation(self, *shape: int, seed: int = 0) -> Tensor:
        """Numbers around 1, the same for every implementation but for rounding."""
        return self._draw(shape, seed).to(self.device, self.dtype)

    def statistic(self, *shape: int, seed: int = 0) -> Tensor:
        return self._draw(shape, seed).to(self.device, self.statistics)

    def assert_close(self, got: Tensor, want: Tensor) -> None:
        assert got.shape == want.shape
        assert relative_error(got, want) < TOLERANCE[self.dtype]

    @staticmethod
    def _draw(shape: tuple[int, ...], seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


IMPLEMENTATIONS = [
    *(Implementation(name, CPU, dtype) for name in ("reference", "cpu") for dtype in DTYPES),
    Implementation("compiled", CPU, torch.bfloat16),
    Implementation("reference", CPU, torch.float16),
]
if torch.cuda.is_available():
    CUDA = torch.device("cuda")
    IMPLEMENTATIONS += [
        Implementation("reference", CUDA, dtype) for dtype in (*DTYPES, torch.float16)
    ]
if find_spec("triton") is not None:
    WHERE = torch.device("cuda") if torch.cuda.is_available() else CPU  # Triton's interpreter
    if WHERE == CPU:
        call_functions_quickly()
        multiply_bf16_as_numbers()
    IMPLEMENTATIONS += [
        Implementation("cuda", WHERE, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of ``want``."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))
