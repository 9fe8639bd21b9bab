"""Whose AdamW a run takes, and what is said where it is not the one that is asked for."""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from optimizer.apex_stand_in import installed

from megatron.optimizer.settings import Implementation
from megatron.run import optimizer_kind
from megatron.run.command_line import read
from megatron.run.run_config import resolve

MOCK = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 10 --mock-data --vocab-size 99"
)
NARROW = "--use-precision-aware-optimizer --exp-avg-dtype bf16"
NOT_NVIDIAS = {"apex/optimizers/__init__.py": None}

Apex = Callable[[], AbstractContextManager[None]]


def told(flags: str) -> tuple[list[str], list[str], Implementation | None]:
    """The mistakes, the notes on the flag, and whose AdamW is taken if nothing is wrong."""
    found = read(f"{MOCK} {flags}".split(), world_size=1)
    notes = [note for note in found.notes if note.startswith("--optimizer-impl")]
    mistakes = list(found.mistakes)
    return mistakes, notes, None if mistakes else resolve(found.flags).optimizer.implementation


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that PyTorch finds."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")


@pytest.mark.parametrize(
    ("flags", "taken", "words"),
    [
        ("", "local", []),
        ("--optimizer-impl apex", "local", ["apex changes nothing: it is for GPUs only; PyTorch"]),
        ("--optimizer-impl local", "local", ["local changes nothing: it is for GPUs only; PyT"]),
        ("--optimizer-impl torch", "torch", ["torch changes nothing: PyTorch's AdamW updates on"]),
        ("--optimizer-impl apex --optimizer sgd", "local", ["apex changes nothing with --optim"]),
        (
            "--optimizer-impl torch --bf16 --dry-run",
            "local",
            ["torch changes nothing in a dry run"],
        ),
    ],
)
def test_on_cpus_pytorch_updates(flags: str, taken: Implementation, words: list[str]) -> None:
    mistakes, notes, implementation = told(f"--device cpu {flags}")
    assert (mistakes, implementation) == ([], taken)
    assert len(notes) == len(words)
    for note, said in zip(notes, words, strict=True):
        assert note.startswith(f"--optimizer-impl {said}")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("apex", "triton", "flags", "taken", "words"),
    [
        (installed, True, "", "local", ""),
        (
            installed,
            False,
            "",
            "apex",
            "auto takes apex's FusedAdam: the Triton kernel is not here",
        ),
        (installed, False, NARROW, "local", "apex's FusedAdam (it takes no 16 bits)"),
        (nullcontext, True, "", "local", ""),
        (nullcontext, False, "", "local", "auto takes PyTorch's AdamW: neither the Triton kernel"),
        (installed, True, "--optimizer-impl apex", "apex", ""),
        (installed, False, "--optimizer-impl apex --optimizer muon", "apex", ""),
        (
            nullcontext,
            True,
            "--optimizer-impl apex",
            "local",
            "apex changes nothing: apex is not installed (build it from github.com/NVIDIA/apex "
            "with its CUDA extensions); the Triton kernel updates",
        ),
        (
            lambda: installed(NOT_NVIDIAS),
            False,
            "--optimizer-impl apex",
            "local",
            "apex changes nothing: the package apex that is installed is not NVIDIA's, but another "
            "project of this name, such as PyPI's: it has no apex.optimizers (build it from "
            "github.com/NVIDIA/apex with its CUDA extensions); PyTorch's AdamW updates",
        ),
        (installed, True, "--optimizer-impl local", "local", ""),
        (installed, False, "--optimizer-impl local", "local", "Triton is not installed; PyTorch's"),
        (installed, True, "--optimizer-impl torch", "torch", ""),
    ],
)
def test_on_gpus(
    apex: Apex,
    triton: bool,
    flags: str,
    taken: Implementation,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        optimizer_kind,
        "find_spec",
        lambda name: (real("torch") if triton else None) if name == "triton" else real(name),
    )
    with apex():
        mistakes, notes, implementation = told(flags)
    assert (mistakes, implementation) == ([], taken)
    assert len(notes) == bool(words)
    assert all(words in note for note in notes), notes


@pytest.mark.parametrize(
    "narrow",
    ["--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16", "--bf16 --main-grads-dtype bf16"],
)
def test_apex_takes_no_16_bits(narrow: str) -> None:
    flags = f"--device cpu --optimizer-impl apex --use-precision-aware-optimizer {narrow}"
    (mistake,), _, _ = told(flags)
    assert "bf16 does not go with --optimizer-impl apex" in mistake
    assert told(flags.replace("apex", "torch"))[0] == []
