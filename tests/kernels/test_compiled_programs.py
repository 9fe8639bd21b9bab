"""The Triton programs compile for GPUs that are not there, fit into their registers, and reach far.

A compiler of its own process, because here Triton interprets (see ``tests/conftest.py``).
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")
def test_triton_is_here() -> None:
    """A run in which nobody tried the programs is not green."""
    if find_spec("triton") is None:
        pytest.fail(
            "Triton is not installed, so that no program of kernels/cuda is tested; install it: "
            f"{sys.executable} -m pip install -c constraints.txt triton",
            pytrace=False,
        )


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("capability", "types"),
    [
        pytest.param(90, ["bf16"], id="H100 in bf16"),
        pytest.param(80, ["bf16"], id="A100 in bf16", marks=pytest.mark.full),
        pytest.param(90, ["fp16", "fp32"], id="H100", marks=pytest.mark.full),
        pytest.param(80, ["fp16", "fp32"], id="A100", marks=pytest.mark.full),
    ],
)
def test_every_program_in_every_form_compiles_without_spilling(
    capability: int, types: list[str]
) -> None:
    options = [str(capability), "--json", "--types", *types]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tools.triton_programs", *options],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {each["program"] for each in found} == {
        "column_maxima",
        "exponentials",
        "input_gradient",
        "merge",
        "merge_input_gradient",
        "scale_rows",
        "subtract_targets",
        "gated",
        "gated_backward",
        "norm",
        "norm_backward",
        "column_sums",
        "activation",
        "activation_backward",
        "rotate",
        "adamw",
        "sums_of_squares",
        "quantise",
    }
    assert [each for each in found if each["spilled_bytes"]] == []
    assert [each for each in found if each["short_offsets"]] == []
    # With at most 128 registers each, 512 threads and more are there at a time to hide latencies.
    assert max(each["registers"] for each in found) <= 128
