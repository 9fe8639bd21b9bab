"""Whose AdamW a run takes: what is asked for, and what this machine has."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

from megatron.config.cluster_rules import on_cuda
from megatron.config.declare import Flags, Rule, option_of
from megatron.config.flags import LogFlags, TrainFlags
from megatron.config.optimizer_flags import OptimizerFlags
from megatron.config.precision_flags import PrecisionFlags
from megatron.optimizer.apex_adamw import load_fused_adam
from megatron.optimizer.config import Implementation

_FLAG: Final = "--optimizer-impl"
_NARROW: Final = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")

INSTALL: Final = "build it from github.com/NVIDIA/apex with its CUDA extensions"


def implementation_of(flags: Flags) -> Implementation:
    """Return whose AdamW updates."""
    asked = flags[OptimizerFlags].optimizer_impl
    if not _updates(flags) or flags[LogFlags].dry_run:
        return "local"
    if asked == "auto":
        needs = _lack_of_own(flags) is not None and not _is_narrow(flags)
        return "apex" if needs and _lack_of_apex(flags) is None else "local"
    if asked == "apex":
        return "apex" if _lack_of_apex(flags) is None else "local"
    return asked


def _updates(flags: Flags) -> bool:
    """Whether Adam has anything to update."""
    return flags[OptimizerFlags].optimizer != "sgd" and not flags[TrainFlags].skip_train


def _is_narrow(flags: Flags) -> bool:
    return any(getattr(flags[PrecisionFlags], name) != "fp32" for name in _NARROW)


def _lack_of_own(flags: Flags) -> str | None:
    """Return what this machine lacks for the Triton kernel; ``None``: nothing."""
    if not on_cuda(flags):
        return "it is for GPUs only"
    return None if find_spec("triton") else "Triton is not installed"


def _lack_of_apex(flags: Flags) -> str | None:
    """Return what this machine lacks for apex's; ``None``: nothing."""
    if not on_cuda(flags):
        return "it is for GPUs only"
    try:
        load_fused_adam()
    except ValueError as error:
        return str(error)
    return None


def _narrow_types(flags: Flags) -> Iterator[str]:
    if flags[OptimizerFlags].optimizer_impl != "apex" or not _updates(flags):
        return
    for name in _NARROW:
        if getattr(flags[PrecisionFlags], name) != "fp32":
            yield (
                f"{option_of(name)} {getattr(flags[PrecisionFlags], name)} does not go with "
                f"{_FLAG} "
                "apex, whose gradients and moments are fp32 as the master weights are: use fp32, "
                f"or leave {_FLAG} out"
            )


def _predicted_as_one_pass(flags: Flags) -> Iterator[str]:
    asked = flags[OptimizerFlags].optimizer_impl
    if flags[LogFlags].dry_run and asked != "auto" and _updates(flags):
        yield (
            f"{_FLAG} {asked} changes nothing in a dry run, which counts the bytes of a step that "
            "moves each of them once"
        )


def _taken_instead(flags: Flags) -> Iterator[str]:
    """Note that what is asked for is not here, or is what there is anyway."""
    asked = flags[OptimizerFlags].optimizer_impl
    if not _updates(flags) or asked == "auto":
        return
    own = _lack_of_own(flags)
    there = "PyTorch's AdamW updates" if own else "the Triton kernel updates"
    if asked == "apex" and (lack := _lack_of_apex(flags)):
        way_out = f" ({INSTALL})" if on_cuda(flags) else ""
        yield f"{_FLAG} apex changes nothing: {lack}{way_out}; {there}"
    elif asked == "local" and own:
        yield f"{_FLAG} local changes nothing: {own}; {there}"
    elif asked == "torch" and not on_cuda(flags):
        yield f"{_FLAG} torch changes nothing: {there} on CPUs anyway"


def _neither_is_here(flags: Flags) -> Iterator[str]:
    """Say what ``auto`` takes on GPUs where no kernel updates in one pass."""
    is_auto = flags[OptimizerFlags].optimizer_impl == "auto" and _updates(flags)
    if not is_auto or not on_cuda(flags) or (own := _lack_of_own(flags)) is None:
        return
    apex = "it takes no 16 bits" if _is_narrow(flags) else _lack_of_apex(flags)
    if apex is None:
        yield f"{_FLAG} auto takes apex's FusedAdam: the Triton kernel is not here ({own})"
    else:
        yield (
            f"{_FLAG} auto takes PyTorch's AdamW: neither the Triton kernel is here ({own}) nor "
            f"apex's FusedAdam ({apex})"
        )


IMPLEMENTATION_RULES: Final[tuple[Rule, ...]] = (_narrow_types,)
"""The mistakes that they find make a run impossible."""

IMPLEMENTATION_NOTES: Final[tuple[Rule, ...]] = (_predicted_as_one_pass,)
"""The flags that they find change nothing beside the others."""

IMPLEMENTATION_OF_MACHINE: Final = (_taken_instead, _neither_is_here)
"""Notes on what this machine has."""
