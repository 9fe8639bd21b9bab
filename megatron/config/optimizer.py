"""The optimizer, its learning rate and its weight decay: flags, rules, and spans of the rate."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from megatron.config.train import TrainFlags, batch_sizes, iterations
from megatron.flags.declare import (
    EPSILON,
    FACTOR,
    MEMORY,
    NOT_NEGATIVE,
    SAMPLES,
    SAMPLES_OR_NONE,
    SHARE,
    WEIGHT,
    Range,
    flag,
    option_of,
    required,
    up_to,
)
from megatron.flags.groups import Flags
from megatron.flags.rules import notes, refuses
from megatron.optimizer.config import (
    AnnealingStyle,
    Coefficients,
    DecayStyle,
    IncreaseStyle,
    Precision,
    ScaleMode,
)

_PEAK: Final = Range(1e-12, 1000)
_WSD: Final = "--lr-decay-style WSD"
_MUON: Final = "--optimizer muon"
_SGD: Final = "--optimizer sgd"
_NO_ADAM: Final = "--optimizer sgd or --skip-train"
_INCREASE: Final = "--weight-decay-incr-style linear or --weight-decay-incr-style cosine"
_ENDS: Final = {"start_weight_decay": "first step", "end_weight_decay": "last step"}


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class OptimizerFlags:
    """The optimizer, clipping, learning rate and weight decay."""

    lr: float = required("Peak learning rate.", _PEAK)
    min_lr: float = flag(0.0, "Final learning rate.", WEIGHT,
        idle_with="--lr-decay-style constant")
    lr_decay_style: DecayStyle = flag("linear",
        "How the learning rate falls after the warm-up. WSD: it stays at its peak, and falls only "
        "at the end of the decay span.")
    lr_decay_iters: int | None = flag(None, "Iterations until --min-lr is reached.", SAMPLES,
        unset="--train-iters", excludes="--lr-decay-samples")
    lr_decay_samples: int | None = flag(None,
        "Samples until --min-lr is reached, for --train-samples.", SAMPLES,
        unset="--train-samples")
    lr_warmup_iters: int = flag(0, "Iterations of linear warm-up.", NOT_NEGATIVE,
        excludes="--lr-warmup-samples or --lr-warmup-fraction")
    lr_warmup_samples: int = flag(0,
        "Samples of linear warm-up, for --train-samples.", SAMPLES_OR_NONE,
        excludes="--lr-warmup-fraction")
    lr_warmup_fraction: float | None = flag(None,
        "Share of the decay span that is linear warm-up.", SHARE,
        unset="by one of the above")
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.", WEIGHT,
        idle_without="--lr-warmup-iters or --lr-warmup-samples or --lr-warmup-fraction")
    lr_wsd_decay_style: AnnealingStyle = flag("exponential",
        "How the learning rate falls at the end, with --lr-decay-style WSD.",
        idle_without=_WSD)
    lr_wsd_decay_iters: int | None = flag(None,
        "Iterations at the end of the decay span in which the learning rate falls, with "
        "--lr-decay-style WSD.", NOT_NEGATIVE,
        unset="required with --lr-decay-style WSD", idle_without=_WSD,
        excludes="--lr-wsd-decay-samples")
    lr_wsd_decay_samples: int | None = flag(None,
        "Samples at the end of the decay span in which the learning rate falls, with "
        "--lr-decay-style WSD and --train-samples.",
        SAMPLES_OR_NONE, unset="by --lr-wsd-decay-iters", idle_without=_WSD)
    decoupled_lr: float | None = flag(None,
        "Peak learning rate of the input and the output layer.", _PEAK, unset="--lr")
    decoupled_min_lr: float | None = flag(None,
        "Final learning rate of the input and the output layer.", WEIGHT,
        unset="--min-lr", idle_without="--decoupled-lr", idle_with="--lr-decay-style constant")
    weight_decay: float = flag(0.01,
        "Weight decay of matrices; biases and other vectors have none. It is decoupled from the "
        "gradient, except with SGD.", WEIGHT,
        idle_with=_INCREASE)
    weight_decay_incr_style: IncreaseStyle = flag("constant",
        "How the weight decay goes from --start-weight-decay to --end-weight-decay over the run.")
    start_weight_decay: float | None = flag(None, "Weight decay of the first step.", WEIGHT,
        unset="required, except with --weight-decay-incr-style constant")
    end_weight_decay: float | None = flag(None, "Weight decay at the end.", WEIGHT,
        unset="required, except with --weight-decay-incr-style constant")
    optimizer: Literal["adam", "sgd", "muon"] = flag("adam",
        "adam: Adam with decoupled weight decay. sgd: SGD with momentum; the weight decay is "
        "added to the gradient. muon: Muon for the matrices of the layers and for learned "
        "positions, Adam for all other weights.")
    optimizer_impl: Literal["auto", "local", "apex", "torch"] = flag("auto",
        "Whose AdamW updates on GPUs. local: one Triton kernel of this project; apex: "
        "apex.optimizers.FusedAdam, if NVIDIA's package is installed; torch: PyTorch's. auto: the "
        "first of these that is there.", idle_with=_NO_ADAM)
    adam_beta1: float = flag(0.9, "First-moment decay.", MEMORY, idle_with=_SGD)
    adam_beta2: float = flag(0.999, "Second-moment decay.", MEMORY, idle_with=_SGD)
    adam_eps: float = flag(1e-8, "Added to the root of the second moment.", EPSILON,
        idle_with=_SGD)
    sgd_momentum: float = flag(0.9, "Share of the sum of gradients that a step of SGD keeps.",
        SHARE, idle_without=_SGD)
    muon_momentum: float = flag(0.95, "Share of the mean of gradients that a step of Muon keeps.",
        SHARE, idle_without=_MUON)
    muon_nesterov: bool = flag(False,
        "Nesterov's form: Muon's update mixes the gradient with the new mean of gradients.",
        idle_without=_MUON)
    muon_num_ns_steps: int = flag(5,
        "Newton-Schulz steps of an update of Muon.", up_to(100), idle_without=_MUON)
    muon_coefficient_type: Coefficients = flag("quintic",
        "Coefficients of Muon's Newton-Schulz steps. quintic and aol: sets for 5 and 4 steps, "
        "which further steps repeat; polar_express: a set for 8 steps or more.", idle_without=_MUON)
    muon_scale_mode: ScaleMode = flag("spectral",
        "Length of Muon's update of a matrix with m rows and n columns: the root of max(m, n), of "
        "m / n, or of max(1, m / n).", idle_without=_MUON)
    muon_extra_scale_factor: float = flag(1.0, "Further factor of Muon's update.", FACTOR,
        idle_without=_MUON)
    muon_fp32_matmul_prec: Precision = flag("medium",
        "Precision of the products of Muon's Newton-Schulz steps. medium: bf16; high: TF32 where "
        "there is TF32; highest: fp32.", idle_without=_MUON)
    muon_no_split_qkv: bool = flag(False,
        "Let Muon treat the queries, keys and values of a layer as one matrix, not three.",
        idle_without=_MUON)
    clip_grad: float = flag(1.0, "Limit of the global gradient norm; 0: off.",
        Range(1e-6, 1e12, or_zero=True))
    enable_optimizer_post_validation: bool = flag(False,
        "Step before all gradient norms are known, and take a step back that proves wrong.")
# fmt: on


class Spans(NamedTuple):
    """The spans of the learning rate, in samples.

    Attributes:
        decay: samples from the first one until the final rate is reached, with the warm-up.
        warmup: samples of the warm-up; not always a whole number, if given as a share of the decay.
        annealing: samples at the end of the decay in which the rate falls with the style WSD.
    """

    decay: int
    warmup: float
    annealing: int


def learning_rate_spans(flags: OptimizerFlags, train: TrainFlags) -> Spans:
    """Return the spans of the learning rate in samples; flags give samples or iterations.

    A span in iterations ends where these iterations end. Batches may grow, so their samples are
    added up batch by batch.
    """
    sizes, length = batch_sizes(train), iterations(train)
    decay_iterations = flags.lr_decay_iters or length.total
    decay = flags.lr_decay_samples or sizes.samples_of(flags.lr_decay_iters or 0)
    decay = decay or train.train_samples or length.samples
    warmup: float = flags.lr_warmup_samples or sizes.samples_of(flags.lr_warmup_iters)
    if flags.lr_warmup_fraction:
        warmup = flags.lr_warmup_fraction * decay
    annealing = flags.lr_wsd_decay_samples or 0
    if flags.lr_wsd_decay_iters:
        before = max(0, decay_iterations - flags.lr_wsd_decay_iters)
        annealing = sizes.samples_of(decay_iterations) - sizes.samples_of(before)
    return Spans(decay, warmup, annealing)


@refuses
def _learning_rates(flags: Flags) -> Iterator[str]:
    optimizer = flags[OptimizerFlags]
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}: lower it"
    if optimizer.lr_warmup_init > optimizer.lr:
        yield f"--lr-warmup-init {optimizer.lr_warmup_init} is above --lr {optimizer.lr}: lower it"


@refuses
def _decoupled_rate(flags: Flags) -> Iterator[str]:
    peak, floor = flags[OptimizerFlags].decoupled_lr, flags[OptimizerFlags].decoupled_min_lr
    if peak is None:
        return
    if floor is not None and floor > peak:
        yield f"--decoupled-min-lr {floor} is above --decoupled-lr {peak}: lower it"
    elif floor is None and flags[OptimizerFlags].min_lr > peak:
        yield (
            f"--decoupled-lr {peak} is below --min-lr {flags[OptimizerFlags].min_lr}, to which it "
            "would rise: give --decoupled-min-lr too"
        )


@refuses
def _units(flags: Flags) -> Iterator[str]:
    """Refuse spans of the learning rate in another unit than the length of the training.

    The units are samples and iterations.
    """
    unit, wanted = _units_of_spans(flags)
    for name in _in_wrong_unit(flags):
        flag = option_of(name)
        yield (
            f"{flag} {getattr(flags[OptimizerFlags], name)} does not go with --train-{wanted}: use "
            f"{flag.replace(unit, wanted)}, or --train-{unit}"
        )


def _units_of_spans(flags: Flags) -> tuple[str, str]:
    """Return the wrong and the right unit of the learning rate's spans, as flags name them."""
    in_samples = flags[TrainFlags].train_samples is not None
    return ("iters", "samples") if in_samples else ("samples", "iters")


def _in_wrong_unit(flags: Flags) -> list[str]:
    unit, _ = _units_of_spans(flags)
    names = (f"lr_decay_{unit}", f"lr_warmup_{unit}", f"lr_wsd_decay_{unit}")
    return [name for name in names if getattr(flags[OptimizerFlags], name)]


@refuses
def _warmup(flags: Flags) -> Iterator[str]:
    if _in_wrong_unit(flags):
        return  # the rule of the units reports it; spans of two units cannot be compared
    decay, warmup, _ = learning_rate_spans(flags[OptimizerFlags], flags[TrainFlags])
    names = ("lr_warmup_fraction", "lr_warmup_samples", "lr_warmup_iters")
    given = next((name for name in names if getattr(flags[OptimizerFlags], name)), None)
    if given is not None and decay and warmup >= decay:
        yield (
            f"{option_of(given)} {getattr(flags[OptimizerFlags], given)}: the warm-up of "
            f"{warmup:g} "
            f"samples is not shorter than the {decay} samples of the decay: shorten it, or "
            "lengthen --lr-decay-iters or --lr-decay-samples"
        )


@refuses
def _annealing(flags: Flags) -> Iterator[str]:
    optimizer, train = flags[OptimizerFlags], flags[TrainFlags]
    if optimizer.lr_decay_style != "WSD" or _in_wrong_unit(flags):
        return
    spans = (optimizer.lr_wsd_decay_iters, optimizer.lr_wsd_decay_samples)
    _, unit = _units_of_spans(flags)
    if spans == (None, None):
        yield (
            f"--lr-decay-style WSD needs the span at the end in which the rate falls: give "
            f"--lr-wsd-decay-{unit}"
        )
    decay, words = optimizer.lr_decay_iters or train.train_iters, "iterations"
    if unit == "samples":
        decay, words = optimizer.lr_decay_samples or train.train_samples, "samples"
    annealing = spans[unit == "samples"] or 0
    if decay is not None and annealing > decay:
        yield (
            f"--lr-wsd-decay-{unit} {annealing} is longer than the decay of {decay} {words}: "
            f"shorten it, or lengthen --lr-decay-{unit}"
        )


@refuses
def _weight_decay(flags: Flags) -> Iterator[str]:
    optimizer = flags[OptimizerFlags]
    style, start, end = (
        optimizer.weight_decay_incr_style,
        optimizer.start_weight_decay,
        optimizer.end_weight_decay,
    )
    for name, step in _ENDS.items():
        value = getattr(optimizer, name)
        if style == "constant" and value not in (None, optimizer.weight_decay):
            yield (
                f"{option_of(name)} {value} does not go with --weight-decay-incr-style constant: "
                "make that linear or cosine, or leave it out"
            )
        if style != "constant" and value is None:
            yield (
                f"--weight-decay-incr-style {style} needs the weight decay of the {step}: give "
                f"{option_of(name)}"
            )
    if style != "constant" and start is not None and end is not None and end < start:
        yield f"--end-weight-decay {end} is below --start-weight-decay {start}: raise it"


@notes
def _idle_decay(flags: Flags) -> Iterator[str]:
    optimizer = flags[OptimizerFlags]
    if optimizer.lr_decay_style != "constant" or optimizer.lr_warmup_fraction:
        return  # a constant rate needs the decay span only if the warm-up is a share of it
    for name in ("lr_decay_iters", "lr_decay_samples"):
        if value := getattr(optimizer, name):
            yield f"{option_of(name)} {value} changes nothing with --lr-decay-style constant"


@notes
def _idle_ends(flags: Flags) -> Iterator[str]:
    optimizer = flags[OptimizerFlags]
    if optimizer.weight_decay_incr_style == "constant":
        for name in _ENDS:
            if getattr(optimizer, name) == optimizer.weight_decay:
                yield (
                    f"{option_of(name)} {optimizer.weight_decay} changes nothing: it is the "
                    "constant --weight-decay"
                )
