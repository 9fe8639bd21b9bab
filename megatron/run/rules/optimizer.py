"""Rules about the optimizer: spans of its rates, types of its states, packages that update."""

from collections.abc import Iterator

from megatron.flags.declare import option_of
from megatron.flags.groups import Flags
from megatron.flags.rules import notes, notes_in, refuses
from megatron.optimizer.newton_schulz import coefficients
from megatron.optimizer.rate_span_settings import RateSpanSettings
from megatron.optimizer.settings import STATES, HostStateSettings, MuonSettings, OptimizerSettings
from megatron.parallel.settings import TensorRankSettings
from megatron.run.dry_run import DryRunSettings
from megatron.run.expert_ranks import sizes_of_experts
from megatron.run.experts import is_mixture
from megatron.run.offload_states import host_states
from megatron.run.optimizer_kind import (
    ADAMW,
    INSTALL,
    is_narrow,
    lack_of_apex,
    lack_of_own,
    rate_spans,
    updates,
)
from megatron.run.parallelism import on_cuda
from megatron.run.precision import PrecisionSettings, narrow_types
from megatron.run.train import TrainSettings


@refuses
def _units(flags: Flags) -> Iterator[str]:
    """Refuse spans of the learning rate in another unit than the length of the training.

    The units are samples and iterations.
    """
    unit, wanted = _units_of_spans(flags)
    for name in _in_wrong_unit(flags):
        flag, value = option_of(name), getattr(flags[RateSpanSettings], name)
        yield (
            f"{flag} {value} does not go with --train-{wanted}: use "
            f"{flag.replace(unit, wanted)}, or --train-{unit}"
        )


def _units_of_spans(flags: Flags) -> tuple[str, str]:
    """Return the wrong and the right unit of the learning rate's spans, as flags name them."""
    in_samples = flags[TrainSettings].train_samples is not None
    return ("iters", "samples") if in_samples else ("samples", "iters")


def _in_wrong_unit(flags: Flags) -> list[str]:
    unit, _ = _units_of_spans(flags)
    names = (f"lr_decay_{unit}", f"lr_warmup_{unit}", f"lr_wsd_decay_{unit}")
    return [name for name in names if getattr(flags[RateSpanSettings], name)]


@refuses
def _warmup(flags: Flags) -> Iterator[str]:
    if _in_wrong_unit(flags):
        return  # the rule of the units reports it; spans of two units cannot be compared
    decay, warmup, _ = rate_spans(flags)
    names = ("lr_warmup_fraction", "lr_warmup_samples", "lr_warmup_iters")
    given = next((name for name in names if getattr(flags[RateSpanSettings], name)), None)
    if given is not None and decay and warmup >= decay:
        yield (
            f"{option_of(given)} {getattr(flags[RateSpanSettings], given)}: the warm-up of "
            f"{warmup:g} "
            f"samples is not shorter than the {decay} samples of the decay: shorten it, or "
            "lengthen --lr-decay-iters or --lr-decay-samples"
        )


@refuses
def _annealing(flags: Flags) -> Iterator[str]:
    optimizer, train = flags[RateSpanSettings], flags[TrainSettings]
    if flags[OptimizerSettings].lr_decay_style != "WSD" or _in_wrong_unit(flags):
        return
    spans = (optimizer.lr_wsd_decay_iters, optimizer.lr_wsd_decay_samples)
    _, unit = _units_of_spans(flags)
    if spans == (None, None):
        yield (
            f"--lr-decay-style WSD needs the span at the end in which the rate falls: give "
            f"--lr-wsd-decay-{unit}"
        )
    decay: int | None = optimizer.lr_decay_iters or train.train_iters
    words = "iterations"
    if unit == "samples":
        decay, words = optimizer.lr_decay_samples or train.train_samples, "samples"
    annealing = spans[unit == "samples"] or 0
    if decay is not None and annealing > decay:
        yield (
            f"--lr-wsd-decay-{unit} {annealing} is longer than the decay of {decay} {words}: "
            f"shorten it, or lengthen --lr-decay-{unit}"
        )


@refuses
def _narrow_types(flags: Flags) -> Iterator[str]:
    if flags[OptimizerSettings].optimizer_impl != "apex" or not updates(flags):
        return
    for given in narrow_types(flags):
        yield (
            f"{given} does not go with {ADAMW} apex, whose gradients and moments are fp32 as the "
            f"master weights are: use fp32, or leave {ADAMW} out"
        )


@refuses
def _states(flags: Flags) -> Iterator[str]:
    precision, kind = flags[PrecisionSettings], flags[OptimizerSettings].optimizer
    narrow = narrow_types(flags)
    if narrow and precision.use_precision_aware_optimizer and kind != "adam":
        yield (
            f"{narrow[0]} does not go with --optimizer {kind}, whose states are "
            "fp32: use fp32, or --optimizer adam"
        )


@notes
def _predicted_as_one_pass(flags: Flags) -> Iterator[str]:
    asked = flags[OptimizerSettings].optimizer_impl
    if flags[DryRunSettings].dry_run and asked != "auto" and updates(flags):
        yield (
            f"{ADAMW} {asked} changes nothing in a dry run, which counts the bytes of a step that "
            "moves each of them once"
        )


@notes_in("real")
def _taken_instead(flags: Flags) -> Iterator[str]:
    """Note a flag for an AdamW that is missing, or that the run would take without the flag."""
    asked = flags[OptimizerSettings].optimizer_impl
    if not updates(flags) or asked == "auto":
        return
    own = lack_of_own(flags)
    there = "PyTorch's AdamW updates" if own else "the Triton kernel updates"
    if asked == "apex" and (lack := lack_of_apex(flags)):
        way_out = f" ({INSTALL})" if on_cuda(flags) else ""
        yield f"{ADAMW} apex changes nothing: {lack}{way_out}; {there}"
    elif asked == "local" and own:
        yield f"{ADAMW} local changes nothing: {own}; {there}"
    elif asked == "torch" and not on_cuda(flags):
        yield f"{ADAMW} torch changes nothing: {there} on CPUs anyway"


@notes_in("real")
def _neither_is_here(flags: Flags) -> Iterator[str]:
    """Note which AdamW ``auto`` takes on GPUs if the Triton kernel cannot run."""
    is_auto = flags[OptimizerSettings].optimizer_impl == "auto" and updates(flags)
    if not is_auto or not on_cuda(flags) or (own := lack_of_own(flags)) is None:
        return
    apex = "it takes no 16 bits" if is_narrow(flags) else lack_of_apex(flags)
    if apex is None:
        yield f"{ADAMW} auto takes apex's FusedAdam: the Triton kernel is not here ({own})"
    else:
        yield (
            f"{ADAMW} auto takes PyTorch's AdamW: neither the Triton kernel is here ({own}) nor "
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
    size, tensor = sizes_of_experts(flags)
    is_spread = (size, tensor) != (1, flags[TensorRankSettings].size)
    has_experts = is_mixture(flags)
    if flags[OptimizerSettings].optimizer == "muon" and has_experts and is_spread and tensor > 1:
        yield (
            f"--optimizer muon with --expert-tensor-parallel-size {tensor} and "
            f"--expert-model-parallel-size {size}: Muon needs whole matrices, and updates those of "
            "experts that ranks share only where all experts are with their layer; take "
            "--expert-tensor-parallel-size 1"
        )


@notes
def _muon_without_shared_matrices(flags: Flags) -> Iterator[str]:
    mode = flags[MuonSettings].muon_tp_mode
    is_muon = flags[OptimizerSettings].optimizer == "muon"
    if is_muon and mode != "duplicated" and flags[TensorRankSettings].size == 1:
        yield (
            f"--muon-tp-mode {mode} changes nothing at --tensor-model-parallel-size 1: every rank "
            "has whole matrices"
        )


@notes
def _predicted_in_16_bits(flags: Flags) -> Iterator[str]:
    precision = flags[MuonSettings].muon_fp32_matmul_prec
    is_muon = flags[OptimizerSettings].optimizer == "muon"
    if flags[DryRunSettings].dry_run and is_muon and precision != "medium":
        yield (
            f"--muon-fp32-matmul-prec {precision} changes only the bytes in the time of a dry run: "
            "it takes Muon's products for as fast as in bf16, and a GPU takes longer for them"
        )


@refuses
def _muon_on_the_host(flags: Flags) -> Iterator[str]:
    if host_states(flags) is not None and flags[OptimizerSettings].optimizer == "muon":
        yield (
            f"{STATES} beside --optimizer muon: the matrix products of Muon's updates would run on "
            "the CPU; take --optimizer adam or sgd, or leave it out"
        )


@notes_in("real")
def _unpinned(flags: Flags) -> Iterator[str]:
    own = flags[HostStateSettings]
    if host_states(flags) is None or on_cuda(flags):
        return
    for name, pins in (
        ("--no-pin-cpu-grads", own.pins_gradients),
        ("--no-pin-cpu-params", own.pins_weights),
    ):
        if not pins:
            yield f"{name} changes nothing: only memory that a GPU copies from or to is pinned"
