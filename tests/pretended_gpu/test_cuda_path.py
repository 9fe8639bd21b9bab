"""A run in which nobody tried the CUDA code is not green."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_path import BUILT_FOR, HERE, Place, place

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(sys.platform != "linux", reason="the CUDA code is tested on Linux only")
def test_the_cuda_code_is_tested_somewhere() -> None:
    version = torch.__version__.partition("+")[0]
    if HERE == "nowhere":
        pytest.fail(
            f"PyTorch is built for {BUILT_FOR} and can use no GPU here: neither the tests on GPUs "
            "nor those on pretended ones can run. Run them where PyTorch finds a GPU, or with its "
            f"CPU build: {sys.executable} -m pip install --force-reinstall torch=={version} "
            "--index-url https://download.pytorch.org/whl/cpu",
            pytrace=False,
        )


@pytest.mark.parametrize(
    ("built_for", "has_gpus", "platform", "expected"),
    [
        (None, False, "linux", "pretended GPUs"),
        ("13.0", True, "linux", "GPUs"),
        ("13.0", False, "linux", "nowhere"),
        (None, False, "darwin", "nowhere"),
    ],
)
def test_where(built_for: str | None, has_gpus: bool, platform: str, expected: Place) -> None:
    assert place(built_for, has_gpus, platform) == expected


STOCK_WHEEL = """
import sys, torch
torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: False
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
"""Runs pytest with a PyTorch that says that it is built for CUDA, and finds no GPU."""


@pytest.mark.full
def test_a_stock_wheel_without_gpus_is_told_the_way_out() -> None:
    folder = TESTS / "pretended_gpu"
    chosen = ("-k", "somewhere or every_kind_of_model or two_ranks", str(TESTS / "launch"))
    done = subprocess.run(
        [sys.executable, "-c", STOCK_WHEEL, "-q", "-p", "no:cacheprovider", str(folder), *chosen],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout
    assert "built for 13.0" in done.stdout
    assert "pip install --force-reinstall torch==" in done.stdout
    assert "1 failed, " in done.stdout
    assert "passed" not in done.stdout
