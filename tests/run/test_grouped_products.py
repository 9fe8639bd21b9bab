"""The flag that lets a package multiply experts, and the machines that can follow it."""

import sys

import pytest
import torch
from kernels.grouped_stand_ins import installed

from megatron.run.command_line import read
from megatron.run.run_config import resolve

MIXTURE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --num-experts 4 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--vocab-size 999 --mock-data --disable-bias-linear"
)


def mistakes(flags: str) -> str:
    return "\n".join(read(f"{MIXTURE} {flags}".split(), world_size=1).mistakes)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_a_run_has_the_package_that_multiplies() -> None:
    for words, package in (
        ("", None),
        ("--moe-grouped-gemm", None),
        ("--moe-grouped-products transformer_engine", "transformer_engine"),
        ("--moe-use-legacy-grouped-gemm", "grouped_gemm"),
        ("--moe-grouped-products grouped_gemm --fp8-format hybrid", None),
        ("--moe-grouped-products grouped_gemm --num-experts 1", None),
    ):
        found = read(f"{MIXTURE} --bf16 --dry-run --device cpu {words}".split(), world_size=1)
        assert not found.mistakes
        assert resolve(found.flags).train.grouped_package == package, words


def test_a_package_has_nothing_to_multiply_with_one_expert() -> None:
    words = "--moe-grouped-products grouped_gemm --num-experts 1 --bf16 --dry-run --device cpu"
    notes = read(f"{MIXTURE} {words}".split(), world_size=1).notes
    assert "--moe-grouped-products changes nothing at --num-experts 1" in notes


def test_packages_multiply_on_gpus_only() -> None:
    told = mistakes("--moe-grouped-products grouped_gemm --bf16 --device cpu")
    assert "multiplies on GPUs only: leave it out" in told


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["transformer_engine", "grouped_gemm"])
def test_a_package_must_be_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"--moe-grouped-products {name} --bf16"
    with installed():
        assert not mistakes(flags)
    monkeypatch.setitem(sys.modules, name, None)
    told = mistakes(flags)
    assert f"--moe-grouped-products {name}: it does not load here" in told
    assert "or leave it out" in told


@pytest.mark.usefixtures("gpu")
def test_packages_multiply_16_bits_only() -> None:
    with installed():
        assert "add --bf16" in mistakes("--moe-use-legacy-grouped-gemm")
        assert "--bf16 or --fp16" in mistakes("--moe-grouped-products transformer_engine")
        assert not mistakes("--moe-grouped-products transformer_engine --fp16")
