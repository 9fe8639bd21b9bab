"""A DeepSpeed configuration beside the flags: what agrees is taken, all else refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.run.command_line import parse

BASE = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --train-iters 4 --device cpu --mock-data --vocab-size 99"
)
BLOOM: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
    "bf16": {"enabled": True},
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
FP16: dict[str, Any] = {
    "train_batch_size": "auto",
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 12,
    },
}


def run(content: object, flags: str, folder: Path) -> None:
    file = folder / "ds.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    parse([*BASE.split(), *flags.split(), "--deepspeed_config", str(file)], world_size=1)


@pytest.mark.parametrize(
    ("content", "flags"),
    [
        (BLOOM, "--bf16"),
        (FP16, "--fp16 --initial-loss-scale 4096 --loss-scale-window 500"),
        ({"fp16": {"enabled": False, "hysteresis": 9}}, ""),
        ({"zero_optimization": {"stage": 1}}, "--use-distributed-optimizer"),
        ({}, ""),
    ],
    ids=["bf16", "fp16", "no fp16", "zero-1", "nothing"],
)
def test_a_file_that_says_what_the_flags_say(content: object, flags: str, tmp_path: Path) -> None:
    run(content, flags, tmp_path)


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        (BLOOM, "", "bf16.enabled is True, but --bf16 is False: make the two the same"),
        (BLOOM | {"train_batch_size": 9}, "--bf16", "train_batch_size is 9, but --global-batch-si"),
        (FP16, "--fp16", "fp16.loss_scale_window is 500, but --loss-scale-window is 1000"),
        ({"zero_optimization": {"stage": 3}}, "", "zero_optimization.stage is 3, but the stage"),
        ({"optimizer": {"type": "Adam"}}, "", "optimizer.type is not known here; leave it out"),
        ("{", "", "is no JSON"),
        ([1], "", "holds no settings by name"),
    ],
)
def test_another_file_is_refused(content: object, flags: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--deepspeed-config") as caught:
        run(content, flags, tmp_path)
    assert words in str(caught.value)


def test_a_missing_file_is_told_but_for_a_dry_run() -> None:
    words = [*BASE.split(), "--deepspeed-config", "not-here"]
    with pytest.raises(ValueError, match="--deepspeed-config not-here cannot be read"):
        parse(words, world_size=1)
    parse([*words, "--bf16", "--dry-run"], world_size=1)
