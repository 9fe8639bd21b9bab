"""The peak: the right row of the table, the flag above all, a measurement that makes sense."""

import time

import pytest
import torch

from megatron.training.metrics.peak_tflops import (
    CPU_PRODUCT,
    measure_tflops,
    peak_of_rank,
    tabulated_tflops,
)


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 19.5),
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA H100 NVL", 835, 60),
        ("NVIDIA H200", 989, 67),
        ("NVIDIA H20", 148, 44),
        ("NVIDIA GH200 480GB", 989, 67),
        ("NVIDIA B200", 2250, 80),
        ("NVIDIA B300 SXM6 AC", 2250, 75),
        ("NVIDIA GB200", 2500, 80),
        ("NVIDIA GB300", 2500, 80),
        ("AMD Instinct MI300X", 1307.4, 163.4),
        ("AMD Instinct MI355X", 2516.6, 157.3),
        ("NVIDIA A10", 125, 31.2),
        ("NVIDIA L4", 121, 30.3),
        ("NVIDIA L40S", 362, 91.6),
        ("NVIDIA RTX A6000", 154.8, 38.7),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 3090", 71, 35.6),
    ],
)
def test_names_that_drivers_give_find_their_row(name: str, bf16: float, fp32: float) -> None:
    assert tabulated_tflops(name, torch.bfloat16) == bf16
    assert tabulated_tflops(name, torch.float32) == fp32


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-32GB", "Tesla T4", "AMD Instinct MI250X", ""])
def test_other_names_are_unknown(name: str) -> None:
    assert tabulated_tflops(name, torch.bfloat16) is None


def test_the_flag_wins() -> None:
    peak = peak_of_rank(torch.device("cpu"), torch.float32, 12.5)
    assert (peak.tflops, peak.source) == (12.5, "--peak-tflops")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_is_measured(dtype: torch.dtype) -> None:
    peak = peak_of_rank(torch.device("cpu"), dtype, None)
    # From a slow emulator to more than any socket can do.
    assert 1e-5 < peak.tflops < 100
    assert "measured" in peak.source
    assert str(dtype).removeprefix("torch.") in peak.source


def test_a_measurement_without_time_is_still_one() -> None:
    assert measure_tflops(torch.device("cpu"), torch.float32, seconds=1e-9) > 0


def test_the_time_in_which_others_have_the_core_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that sleeps has no core either: a quarter of a second is nothing."""
    multiply = torch.matmul

    def interrupted(*factors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        time.sleep(0.25)
        return multiply(*factors, out=out)

    monkeypatch.setattr(torch, "matmul", interrupted)
    by_the_clock_on_the_wall = 2 * CPU_PRODUCT**3 / 0.25 / 1e12
    found = measure_tflops(torch.device("cpu"), torch.float32, seconds=1e-9)
    assert found > 2 * by_the_clock_on_the_wall
