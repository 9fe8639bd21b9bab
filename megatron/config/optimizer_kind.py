"""The optimizer of a run, and its AdamW: the project's own, apex's or PyTorch's.

Flags choose the AdamW, if this machine has its package.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Final

from megatron.config.dry_run import DryRunSettings
from megatron.config.expert_ranks import sizes_of_experts
from megatron.config.experts import is_mixture
from megatron.config.optimizer import RateSpanFlags, learning_rate_spans
from megatron.config.parallelism import ParallelFlags, on_cuda
from megatron.config.precision import PrecisionFlags, loss_scale_of, narrow_types
from megatron.config.train import TrainFlags, iterations
from megatron.flags.groups import Flags
from megatron.flags.rules import notes, notes_in, refuses
from megatron.optimizer.apex_adamw import load_fused_adam
from megatron.optimizer.newton_schulz import coefficients
from megatron.optimizer.settings import Implementation, MuonSettings, OptimizerSettings

_FLAG: Final = "--optimizer-impl"
INSTALL: Final = "build it from github.com/NVIDIA/apex with its CUDA extensions"


def optimizer_config(flags: Flags) -> OptimizerSettings:
    """Return the optimizer's configuration, with the spans of its rates in samples."""
    train = flags[TrainFlags]
    spans = learning_rate_spans(flags[RateSpanFlags], train)
    return replace(
        flags[OptimizerSettings],
        lr_decay_samples=spans.decay,
        lr_warmup_samples=spans.warmup,
        lr_wsd_decay_samples=spans.annealing,
        weight_decay_samples=train.train_samples or iterations(train).samples,
        muon=flags[MuonSettings],
        loss_scale=loss_scale_of(flags),
        implementation=implementation_of(flags),
    )


def implementation_of(flags: Flags) -> Implementation:
    """Return the AdamW that updates; ``local``: the Triton kernel, or PyTorch's without Triton."""
    asked = flags[OptimizerSettings].optimizer_impl
    if not _updates(flags) or flags[DryRunSettings].dry_run:
        return "local"
    if asked == "auto":
        needs = _lack_of_own(flags) is not None and not _is_narrow(flags)
        return "apex" if needs and _lack_of_apex(flags) is None else "local"
    if asked == "apex":
        return "apex" if _lack_of_apex(flags) is None else "local"
    return asked


def _updates(flags: Flags) -> bool:
    """Return whether Adam updates any weights."""
    return flags[OptimizerSettings].optimizer != "sgd" and not flags[TrainFlags].skip_train


def _is_narrow(flags: Flags) -> bool:
    return bool(narrow_types(flags))


def _lack_of_own(flags: Flags) -> str | None:
    """Return the reason why this machine cannot run the Triton kernel; ``None``: it can."""
    if not on_cuda(flags):
        return "it is for GPUs only"
    return None if find_spec("triton") else "Triton is not installed"


def _lack_of_apex(flags: Flags) -> str | None:
    """Return the reason why this machine cannot run apex's AdamW; ``None``: it can."""
    if not on_cuda(flags):
        return "it is for GPUs only"
    try:
        load_fused_adam()
    except ValueError as error:
        return str(error)
    return None


@refuses
def _narrow_types(flags: Flags) -> Iterator[str]:
    if flags[OptimizerSettings].optimizer_impl != "apex" or not _updates(flags):
        return
    for given in narrow_types(flags):
        yield (
            f"{given} does not go with {_FLAG} apex, whose gradients and moments are fp32 as the "
            f"master weights are: use fp32, or leave {_FLAG} out"
        )


@refuses
def _states(flags: Flags) -> Iterator[str]:
    precision, kind = flags[PrecisionFlags], flags[OptimizerSettings].optimizer
    narrow = narrow_types(flags)
    if narrow and precision.use_precision_aware_optimizer and kind != "adam":
        yield (
            f"{narrow[0]} does not go with --optimizer {kind}, whose states are "
            "fp32: use fp32, or --optimizer adam"
        )


@notes
def _predicted_as_one_pass(flags: Flags) -> Iterator[str]:
    asked = flags[OptimizerSettings].optimizer_impl
    if flags[DryRunSettings].dry_run and asked != "auto" and _updates(flags):
        yield (
            f"{_FLAG} {asked} changes nothing in a dry run, which counts the bytes of a step that "
            "moves each of them once"
        )


@notes_in("real")
def _taken_instead(flags: Flags) -> Iterator[str]:
    """Note a flag for an AdamW that is missing, or that the run would take without the flag."""
    asked = flags[OptimizerSettings].optimizer_impl
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


@notes_in("real")
def _neither_is_here(flags: Flags) -> Iterator[str]:
    """Note which AdamW ``auto`` takes on GPUs if the Triton kernel cannot run."""
    is_auto = flags[OptimizerSettings].optimizer_impl == "auto" and _updates(flags)
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


@refuses
def _newton_schulz(flags: Flags) -> Iterator[str]:
    if flags[OptimizerSettings].optimizer == "muon":
        muon = flags[MuonSettings]
        try:
            coefficients(muon.muon_coefficient_type, muon.muon_num_ns_steps)
        except ValueError as error:
            yield f"--muon-num-ns-steps {muon.muon_num_ns_steps}: {error}"


@refuses
def _experts(flags: Flags) -> Iterator[str]:
    (size, tensor), layers = sizes_of_experts(flags), flags[ParallelFlags]
    is_spread = (size, tensor) != (1, layers.tensor_model_parallel_size)
    has_experts = is_mixture(flags)
    if flags[OptimizerSettings].optimizer == "muon" and has_experts and is_spread and tensor > 1:
        yield (
            f"--optimizer muon with --expert-tensor-parallel-size {tensor} and "
            f"--expert-model-parallel-size {size}: Muon needs whole matrices, and gathers those of "
            "experts only where they are with their layer; take --expert-tensor-parallel-size 1"
        )


@notes
def _predicted_without_products(flags: Flags) -> Iterator[str]:
    if flags[DryRunSettings].dry_run and flags[OptimizerSettings].optimizer == "muon":
        yield (
            "--optimizer muon changes nothing in the time of a dry run but the bytes that a step "
            "moves: its products are not counted"
        )
