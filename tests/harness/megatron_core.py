"""Megatron-Core on CPUs, where it is installed.

It names the device ``cuda`` in a few places; what makes tensors there is given the CPU.
"""

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


def needs_core() -> None:
    """Skip a test where the package is missing."""
    if importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that are asked for on ``cuda``."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if str(named.get("device")).startswith("cuda"):
            named["device"] = "cpu"
        return func(*args, **named)


@contextmanager
def core_on_cpu() -> Iterator[None]:
    """Let Megatron-Core's code find the CPU where it asks for a GPU; its warnings are its own."""
    here = mock.patch("torch.cuda.current_device", return_value=torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        random = import_module("megatron.core.tensor_parallel.random")
        nothing_random = mock.patch.object(  # its states are those of GPUs
            random.CudaRNGStatesTracker, "fork", return_value=nullcontext()
        )
        with here, mock.patch("torch.cuda.synchronize"), nothing_random, OnCpu():
            yield


@contextmanager
def core_ranks(chunks: int) -> Iterator[None]:
    """Megatron-Core's groups, with all ranks as a pipeline.

    Args:
        chunks: of the model on every rank.
    """
    state = import_module("megatron.core.parallel_state")
    state.initialize_model_parallel(
        1,
        dist.get_world_size(),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    try:
        yield
    finally:
        state.destroy_model_parallel()
