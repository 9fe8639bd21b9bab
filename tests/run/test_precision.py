"""fp16, its loss scale, and the types of gradients and moments, from their flags."""

import pytest
import torch

from megatron.optimizer.settings import LossScaleSettings
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig

MOCK = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 10 --device cpu --mock-data --vocab-size 99"
)


def run(flags: str) -> RunConfig:
    return parse(f"{MOCK} {flags}".split(), world_size=1)


def test_only_fp16_scales_its_losses() -> None:
    assert run("").optimizer.loss_scale is None
    assert run("--bf16").optimizer.loss_scale is None
    made = run("--fp16")
    assert made.train.dtype == torch.float16
    assert made.optimizer.loss_scale == LossScaleSettings(None, 2.0**32, 1.0, 1000, 2)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--loss-scale 4096", LossScaleSettings(loss_scale=4096.0)),
        ("--loss-scaling-factor 4096", LossScaleSettings(loss_scale=4096.0)),
        (
            "--initial-loss-scale 65536 --min-loss-scale 2 --loss-scale-window 500 --hysteresis 3",
            LossScaleSettings(
                initial_loss_scale=65536.0, min_loss_scale=2.0, loss_scale_window=500, hysteresis=3
            ),
        ),
    ],
)
def test_scales_are_those_that_are_asked_for(flags: str, expected: LossScaleSettings) -> None:
    assert run(f"--fp16 {flags}").optimizer.loss_scale == expected


def test_types_of_gradients_and_moments() -> None:
    plain = run("--bf16")
    assert plain.train.gradient_dtype == torch.float32
    assert (plain.optimizer.exp_avg_dtype, plain.optimizer.exp_avg_sq_dtype) == ("fp32", "fp32")
    narrow = run(
        "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype bf16"
    )
    assert narrow.train.gradient_dtype == torch.bfloat16
    assert (narrow.optimizer.exp_avg_dtype, narrow.optimizer.exp_avg_sq_dtype) == ("bf16", "bf16")


@pytest.mark.parametrize(("precision", "wide"), [("--bf16", True), ("--fp16", True), ("", False)])
def test_only_a_stream_of_16_bits_is_widened(precision: str, wide: bool) -> None:
    assert run(f"{precision} --fp32-residual-connection").train.wide_stream == wide
    assert not run(precision).train.wide_stream


def test_an_overflow_never_ends_a_run_whose_scale_changes() -> None:
    (note,) = (
        note
        for note in run("--fp16 --no-check-for-nan-in-loss-and-grad").notes
        if "makes this run slower" not in note
    )
    assert note.startswith("--no-check-for-nan-in-loss-and-grad changes nothing: ")
    constant = run("--fp16 --loss-scale 8 --no-check-for-nan-in-loss-and-grad")
    assert not [note for note in constant.notes if note.startswith("--no-check")]


def test_cpus_multiply_fp32_as_it_is() -> None:
    assert run("").train.precision.fp32_matmul_precision == "highest"
    found = run("--fp32-matmul-precision high")
    assert found.train.precision.fp32_matmul_precision == "high"
    assert [note for note in found.notes if note.startswith("--fp32-matmul-precision high changes")]
