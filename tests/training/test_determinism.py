"""``--deterministic-mode``: what is set for a process, and what kernels make of it."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron.parallel.environment import (
    DETERMINISTIC_ENVIRONMENT,
    set_deterministic_environment,
    variables_of_any_order,
)
from megatron.parallel.settings import DeviceSettings
from megatron.training.determinism import follow_mode


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's settings and the variables as they were."""
    settings = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory  # type: ignore[attr-defined]  # undeclared
    chosen = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    for name in DETERMINISTIC_ENVIRONMENT:
        monkeypatch.setenv(name, "")
    yield
    torch.use_deterministic_algorithms(False)
    settings.fill_uninitialized_memory = fills  # type: ignore[attr-defined]  # undeclared
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = chosen


def test_a_process_on_a_gpu_adds_up_in_one_order(restored: None) -> None:
    follow_mode(DeviceSettings("cuda", "nccl", 1, deterministic_mode=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["NCCL_ALGO"] == "Ring"
    assert list(variables_of_any_order()) == []


@pytest.mark.parametrize("devices", [DeviceSettings("cuda"), DeviceSettings("cpu")], ids=str)
def test_other_processes_are_left_alone(devices: DeviceSettings, restored: None) -> None:
    on_cpu = devices.device == "cpu"
    follow_mode(replace(devices, deterministic_mode=on_cpu))
    assert not torch.are_deterministic_algorithms_enabled()
    assert not os.environ["CUBLAS_WORKSPACE_CONFIG"]


def test_variables_that_are_set_stay() -> None:
    environment = {"NCCL_ALGO": "CollnetChain", "CUBLAS_WORKSPACE_CONFIG": ""}
    set_deterministic_environment(environment)
    assert environment == {
        "NCCL_ALGO": "CollnetChain",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("NCCL_ALGO", "Tree", True),
        ("NCCL_ALGO", "Ring,Tree", True),
        ("NCCL_ALGO", "Ring,CollnetDirect", False),
        ("NCCL_ALGO", "", False),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", True),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", False),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", True),
    ],
)
def test_variables_with_any_order_are_told(name: str, value: str, told: bool) -> None:
    found = list(variables_of_any_order({name: value}))
    assert len(found) == told
    assert all(line.startswith(f"{name}={value} ") for line in found)
