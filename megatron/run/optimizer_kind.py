"""The optimizer of a run, and its AdamW: the project's own, apex's or PyTorch's.

Flags choose the AdamW, if this machine has its package.
"""

from dataclasses import replace
from importlib.util import find_spec
from typing import Final

from megatron.flags.groups import Flags
from megatron.model.settings import ShapeSettings
from megatron.model.width_settings import WidthSettings
from megatron.optimizer.apex_adamw import load_fused_adam
from megatron.optimizer.rate_span_settings import RateSpanSettings, Spans
from megatron.optimizer.settings import Implementation, MuonSettings, OptimizerSettings
from megatron.run.dry_run import DryRunSettings
from megatron.run.parallelism import on_cuda
from megatron.run.precision import loss_scale_of, narrow_types
from megatron.run.train import TrainSettings, batch_sizes, iterations

ADAMW: Final = "--optimizer-impl"
INSTALL: Final = "build it from github.com/NVIDIA/apex with its CUDA extensions"


def optimizer_config(flags: Flags) -> OptimizerSettings:
    """Return the optimizer's configuration, with the spans of its rates in samples."""
    train, spans = flags[TrainSettings], rate_spans(flags)
    hidden_size = flags[ShapeSettings].hidden_size
    return replace(
        flags[OptimizerSettings],
        lr_decay_samples=spans.decay,
        lr_warmup_samples=spans.warmup,
        lr_wsd_decay_samples=spans.annealing,
        weight_decay_samples=train.train_samples or iterations(train).samples,
        muon=flags[MuonSettings],
        loss_scale=loss_scale_of(flags),
        implementation=implementation_of(flags),
        width_mult=flags[WidthSettings].width(hidden_size),
    )


def rate_spans(flags: Flags) -> Spans:
    """Return the spans of the learning rate in samples."""
    train = flags[TrainSettings]
    length, sizes = iterations(train), batch_sizes(train)
    samples = train.train_samples or length.samples
    return flags[RateSpanSettings].in_samples(length.total, samples, sizes.samples_of)


def implementation_of(flags: Flags) -> Implementation:
    """Return the AdamW that updates; ``local``: the Triton kernel, or PyTorch's without Triton."""
    asked = flags[OptimizerSettings].optimizer_impl
    if not updates(flags) or flags[DryRunSettings].dry_run:
        return "local"
    if asked == "auto":
        needs = lack_of_own(flags) is not None and not is_narrow(flags)
        return "apex" if needs and lack_of_apex(flags) is None else "local"
    if asked == "apex":
        return "apex" if lack_of_apex(flags) is None else "local"
    return asked


def updates(flags: Flags) -> bool:
    """Return whether Adam updates any weights."""
    return flags[OptimizerSettings].optimizer != "sgd" and not flags[TrainSettings].skip_train


def is_narrow(flags: Flags) -> bool:
    """Return whether gradients or moments have 16 bits."""
    return bool(narrow_types(flags))


def lack_of_own(flags: Flags) -> str | None:
    """Return the reason why this machine cannot run the Triton kernel; ``None``: it can."""
    if not on_cuda(flags):
        return "it is for GPUs only"
    return None if find_spec("triton") else "Triton is not installed"


def lack_of_apex(flags: Flags) -> str | None:
    """Return the reason why this machine cannot run apex's AdamW; ``None``: it can."""
    if not on_cuda(flags):
        return "it is for GPUs only"
    try:
        load_fused_adam()
    except ValueError as error:
        return str(error)
    return None
