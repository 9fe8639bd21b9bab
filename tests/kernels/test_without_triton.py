"""A machine without Triton says what a GPU would launch, as a machine with Triton does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WITHOUT_TRITON = "import sys; sys.modules['triton'] = None\n"

COUNTS = """
import json
from typing import Any
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from megatron.kernels.cuda.kernels import CudaKernels
from megatron.kernels.counted import counted_kernels
from megatron.kernels.softmax import LossOptions

class Operators(TorchDispatchMode):
    found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        shape = result.shape if isinstance(result, torch.Tensor) else ()
        self.found.append((function._schema.name, list(shape)))
        return result

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(dtype.is_floating_point)

kernels = counted_kernels(torch.bfloat16)
assert isinstance(kernels, CudaKernels)
x, weight, angles = empty(2, 8, 32), empty(32), torch.empty(8, 1, 4, device="meta")
heads = empty(2, 4, 8, 16)
tokens = torch.empty(8, dtype=torch.int64, device="meta")
with Operators() as operators:
    for y in (
        kernels.gelu(x, weight),
        kernels.squared_relu(x),
        kernels.swiglu(x),
        kernels.geglu(x),
        kernels.layer_norm(x, weight, weight, 1e-5),
        kernels.rms_norm(x, weight, 1e-5),
        kernels.rotate(heads, angles, angles, interleaved=False),
        kernels.causal_attention(heads, heads, heads),
    ):
        y.backward(torch.empty_like(y))
    with torch.no_grad():
        flat, wide = x[0].detach(), torch.empty(32, 32, device="meta")
        kernels.accumulate_product_(wide, flat.T, flat)
        kernels.quantise(
            flat, kernels.largest(flat), torch.float8_e4m3fn, straight=True, turned=True
        )
        kernels.sum_of_squares([wide])
        room = kernels.kept_room(flat, 48)
        state = kernels.output_s(
            flat, empty(48, 32).detach(), tokens, 0, LossOptions(48), room,
            form_gradient=True, keep=True,
        )
assert x.grad.shape == x.shape and heads.grad.shape == heads.shape
assert state.raw_gradient_nh.shape == flat.shape
print(json.dumps(operators.found))
"""

LAUNCHES = """
import torch
from megatron.kernels.cuda.kernels import CudaKernels
from megatron.kernels.choose import kernels_for
print(type(kernels_for(torch.device("cuda"), torch.bfloat16)).__name__)
CudaKernels(torch.device("cpu"), torch.float32).gelu(torch.zeros(4))
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script with this Python, in which Triton does not interpret unless it is asked."""
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_it_counts_the_same() -> None:
    without = run(WITHOUT_TRITON + COUNTS)
    assert without.returncode == 0, without.stderr
    found = json.loads(without.stdout)
    names = {name for name, _ in found}
    assert {"megatron_kernels::norm", "megatron_kernels::gated_backward"} <= names
    pytest.importorskip("triton")
    assert json.loads(run(COUNTS).stdout) == found


def test_counting_loads_no_program() -> None:
    """PyTorch itself may import Triton meanwhile."""
    said = run(COUNTS + "import sys; assert not [m for m in sys.modules if '.programs' in m]")
    assert said.returncode == 0, said.stderr


def test_a_launch_says_what_is_missing_and_a_gpu_gets_pytorch() -> None:
    said = run(WITHOUT_TRITON + LAUNCHES)
    assert said.stdout.split() == ["ReferenceKernels"]
    assert "triton" in said.stderr.splitlines()[-1]
    assert "ModuleNotFoundError" in said.stderr.splitlines()[-1]
