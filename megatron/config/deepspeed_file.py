"""Compares a DeepSpeed configuration, which BigScience's launch scripts write, with the flags.

There the file and the flags name some settings twice, and must agree. Here the flags count; a file
that asks for something else is refused.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from megatron.config.log import LogFlags
from megatron.config.optimizer import OptimizerFlags
from megatron.config.precision import PrecisionFlags
from megatron.config.replicas import ReplicaFlags
from megatron.config.side_files import json_of
from megatron.config.train import TrainFlags
from megatron.flags.groups import Flags

_FLAG: Final = "--deepspeed-config"
Setting = tuple[str, Callable[[Flags], object]]

_SETTINGS: Final[Mapping[str, Setting]] = {
    "train_micro_batch_size_per_gpu": (
        "--micro-batch-size",
        lambda f: f[TrainFlags].micro_batch_size,
    ),
    "train_batch_size": ("--global-batch-size", lambda f: f[TrainFlags].global_batch_size),
    "gradient_clipping": ("--clip-grad", lambda f: f[OptimizerFlags].clip_grad),
    "bf16.enabled": ("--bf16", lambda f: f[TrainFlags].bf16),
    "fp16.enabled": ("--fp16", lambda f: f[PrecisionFlags].fp16),
    "fp16.loss_scale": ("--loss-scale", lambda f: f[PrecisionFlags].loss_scale or 0),
    "fp16.initial_scale_power": (
        "the power of 2 of --initial-loss-scale",
        lambda f: math.log2(f[PrecisionFlags].initial_loss_scale),
    ),
    "fp16.loss_scale_window": (
        "--loss-scale-window",
        lambda f: f[PrecisionFlags].loss_scale_window,
    ),
    "fp16.hysteresis": ("--hysteresis", lambda f: f[PrecisionFlags].hysteresis),
    "fp16.min_loss_scale": ("--min-loss-scale", lambda f: f[PrecisionFlags].min_loss_scale),
    "zero_optimization.stage": (
        "the stage of --use-distributed-optimizer (0 without it, 1 with it)",
        lambda f: int(f[ReplicaFlags].use_distributed_optimizer),
    ),
}
"""The settings of the file that decide a run, and what the flags say of them."""

_IDLE: Final = frozenset(("steps_per_print", "wall_clock_breakdown", "gradient_accumulation_steps"))
"""Settings that decide no result, or follow from others."""


def deepspeed_file(flags: Flags) -> Iterator[str]:
    """Yield a line on everything in the file that is not what the flags ask for."""
    file = flags[TrainFlags].deepspeed_config
    if file is None or flags[LogFlags].dry_run:
        return
    try:
        found = dict(_settings(_content(file)))
    except ValueError as error:
        yield str(error)
        return
    for name, value in found.items():
        if name.startswith("fp16.") and not found.get("fp16.enabled"):
            continue
        if name not in _SETTINGS:
            yield (
                f"{_FLAG} {file}: {name} is not known here; leave it out, and give what it asks "
                "for as flags"
            )
            continue
        flag, own = _SETTINGS[name][0], _SETTINGS[name][1](flags)
        if value != own:
            yield f"{_FLAG} {file}: {name} is {value}, but {flag} is {own}: make the two the same"


def _content(file: Path) -> Mapping[str, Any]:
    content = json_of(_FLAG, file, "give DeepSpeed's file")
    if not isinstance(content, dict):
        raise ValueError(f"{_FLAG} {file} holds no settings by name: give DeepSpeed's file")
    return content


def _settings(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the settings that ask for something, those of sections as SECTION.NAME."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{name}.")
        elif prefix + name not in _IDLE and value != "auto":
            yield prefix + name, value
