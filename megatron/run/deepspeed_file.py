"""Compares a DeepSpeed configuration, which BigScience's launch scripts write, with the flags.

For DeepSpeed, the file and the flags name some settings twice, and must agree. Here only the flags
decide, and a file that asks for something else is refused.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.rules import refuses
from megatron.flags.tree import declared_in
from megatron.native.side_files import json_of
from megatron.optimizer.settings import LossScaleSettings, OptimizerSettings
from megatron.parallel.settings import ReplicaSettings
from megatron.run.dry_run import DryRunSettings
from megatron.run.precision import PrecisionSettings
from megatron.run.train import TrainSettings

_FLAG: Final = "--deepspeed-config"
_SETTINGS: Final[Mapping[str, tuple[type, str]]] = {
    "train_micro_batch_size_per_gpu": (TrainSettings, "micro_batch_size"),
    "train_batch_size": (TrainSettings, "global_batch_size"),
    "gradient_clipping": (OptimizerSettings, "clip_grad"),
    "bf16.enabled": (PrecisionSettings, "bf16"),
    "fp16.enabled": (PrecisionSettings, "fp16"),
    "fp16.loss_scale": (LossScaleSettings, "loss_scale"),
    "fp16.initial_scale_power": (LossScaleSettings, "initial_loss_scale"),
    "fp16.loss_scale_window": (LossScaleSettings, "loss_scale_window"),
    "fp16.hysteresis": (LossScaleSettings, "hysteresis"),
    "fp16.min_loss_scale": (LossScaleSettings, "min_loss_scale"),
    "zero_optimization.stage": (ReplicaSettings, "shard_optimizer"),
}
"""For each setting of the file that decides a run, the flag with the same meaning."""

_IDLE: Final = frozenset(("steps_per_print", "wall_clock_breakdown", "gradient_accumulation_steps"))
"""Settings that do not change results, or follow from other settings."""


@dataclass(frozen=True)
class DeepSpeedSettings:
    """The file of a launch line for DeepSpeed."""

    # fmt: off
    deepspeed_config: Path | None = flag(None,
        "File of a DeepSpeed configuration, of a launch line for DeepSpeed; it must agree with "
        "the flags.", unset="none")
    # fmt: on


@refuses
def _deepspeed_file(flags: Flags) -> Iterator[str]:
    """Yield a line on every setting of the file that differs from the flags."""
    file = flags[DeepSpeedSettings].deepspeed_config
    if file is None or flags[DryRunSettings].dry_run:
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
        flag, own = _said_by_flags(name, flags)
        if value != own:
            yield f"{_FLAG} {file}: {name} is {value}, but {flag} is {own}: make the two the same"


def _said_by_flags(name: str, flags: Flags) -> tuple[str, object]:
    """Return the flag with the meaning of a setting, and the setting's value by the flag."""
    group, field = _SETTINGS[name]
    [declared] = declared_in(group)[field]
    flag, value = declared.option, getattr(flags[group], field)
    if name == "fp16.loss_scale":
        return flag, value or 0
    if name == "fp16.initial_scale_power":
        return f"the power of 2 of {flag}", math.log2(value)
    if name == "zero_optimization.stage":
        return f"the stage of {flag} (0 without it, 1 with it)", int(value)
    return flag, value


def _content(file: Path) -> Mapping[str, Any]:
    content = json_of(_FLAG, file, "give DeepSpeed's file")
    if not isinstance(content, dict):
        raise ValueError(f"{_FLAG} {file} holds no settings by name: give DeepSpeed's file")
    return content


def _settings(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the settings that ask for something. In a section they are named SECTION.NAME."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{name}.")
        elif prefix + name not in _IDLE and value != "auto":
            yield prefix + name, value
