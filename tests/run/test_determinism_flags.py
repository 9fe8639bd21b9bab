"""--deterministic-mode: where it changes nothing, and what does not go with it."""

import pytest
import torch

from megatron.parallel.environment import DETERMINISTIC_ENVIRONMENT
from megatron.run.command_line import read
from megatron.run.run_config import resolve

MOCK = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 10 --mock-data --vocab-size 99 --deterministic-mode"
)
FLEX = (
    "--bf16 --num-experts 4 --disable-bias-linear --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type flex --dry-run --dry-run-gpu H100 --dry-run-replicas 2"
)


def told(flags: str) -> tuple[str, str]:
    """The mistakes and the notes about the mode."""
    found = read(f"{MOCK} {flags}".split(), world_size=1)
    notes = [note for note in found.notes if "--deterministic-mode" in note]
    return "\n".join(found.mistakes), "\n".join(notes)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that PyTorch finds, and variables that nobody has set."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    for name in DETERMINISTIC_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def test_on_cpus_it_changes_nothing() -> None:
    mistakes, notes = told("--device cpu")
    assert not mistakes
    assert notes == (
        "--deterministic-mode changes nothing: runs on CPUs are the same to the last bit"
    )


def test_in_a_dry_run_it_changes_nothing() -> None:
    mistakes, notes = told("--bf16 --dry-run")
    assert not mistakes
    assert notes.startswith("--deterministic-mode changes nothing in a dry run")


def test_on_gpus_it_reaches_the_run(gpu: None) -> None:
    found = read(MOCK.split(), world_size=1)
    assert not found.mistakes
    devices = resolve(found.flags).parallel.devices
    assert (devices.device, devices.deterministic_mode) == ("cuda", True)
    assert told("") == ("", "")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--profile-schedule-start 2 --replan", "--replan does not go with --deterministic-mode"),
        ("--search-seconds 5", "--search-seconds 5 does not go with --deterministic-mode"),
        (FLEX, "--moe-token-dispatcher-type flex does not go with --deterministic-mode"),
    ],
)
def test_what_a_clock_or_a_package_orders_is_refused(gpu: None, flags: str, words: str) -> None:
    mistakes, _ = told(flags)
    assert words in mistakes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_ALGO", "Tree"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"),
    ],
)
def test_variables_that_allow_any_order_are_refused(
    gpu: None, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    mistakes, _ = told("")
    assert f"--deterministic-mode: {name}={value}" in mistakes
    assert "unset it" in mistakes
    assert told("--device cpu")[0] == ""
