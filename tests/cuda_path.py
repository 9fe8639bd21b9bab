"""Where the CUDA code can be tested here: on GPUs, on pretended ones, or nowhere.

``launch/test_cuda_job.py`` tests it on real GPUs, and ``pretended_gpu/`` without. Where neither can
run, ``pretended_gpu/test_cuda_path.py`` fails: nobody shall take the code for tested.
"""

import sys
from typing import Literal

import pytest
import torch

Place = Literal["GPUs", "pretended GPUs", "nowhere"]


def place(built_for: str | None, has_gpus: bool, platform: str) -> Place:
    """Return where tests of the CUDA code run.

    Args:
        built_for: version of CUDA or ROCm that PyTorch is built for, if for one.
        has_gpus: whether PyTorch can use GPUs.
        platform: as ``sys.platform`` has it.
    """
    if has_gpus:
        return "GPUs"
    # A CUDA build brings real devices, and elsewhere nothing can be put in their place.
    return "pretended GPUs" if built_for is None and platform == "linux" else "nowhere"


BUILT_FOR = torch.version.cuda or torch.version.hip
HERE = place(BUILT_FOR, torch.cuda.is_available(), sys.platform)

needs_gpus = pytest.mark.skipif(
    HERE != "GPUs", reason="needs CUDA: NCCL moves data between GPUs only"
)
needs_pretended_gpus = pytest.mark.skipif(
    HERE != "pretended GPUs", reason="needs PyTorch's CPU build, on Linux: see tests/cuda_path.py"
)
