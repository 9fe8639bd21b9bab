"""The optimizer, its learning rate and its weight decay: flags, rules, and spans of the rate."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from megatron.config.train import TrainFlags, batch_sizes, iterations
from megatron.flags.declare import flag, option_of
from megatron.flags.groups import Flags
from megatron.flags.ranges import NOT_NEGATIVE, SAMPLES, SAMPLES_OR_NONE, SHARE, Range
from megatron.flags.rules import notes, refuses
from megatron.optimizer.settings import OptimizerSettings

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
class RateSpanFlags:
    """Spans of the learning rate; a run counts all of them in samples."""

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
    lr_wsd_decay_iters: int | None = flag(None,
        "Iterations at the end of the decay span in which the learning rate falls, with "
        "--lr-decay-style WSD.", NOT_NEGATIVE,
        unset="required with --lr-decay-style WSD", idle_without=_WSD,
        excludes="--lr-wsd-decay-samples")
    lr_wsd_decay_samples: int | None = flag(None,
        "Samples at the end of the decay span in which the learning rate falls, with "
        "--lr-decay-style WSD and --train-samples.",
        SAMPLES_OR_NONE, unset="by --lr-wsd-decay-iters", idle_without=_WSD)
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


def learning_rate_spans(flags: RateSpanFlags, train: TrainFlags) -> Spans:
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
    optimizer = flags[OptimizerSettings]
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}: lower it"
    if optimizer.lr_warmup_init > optimizer.lr:
        yield f"--lr-warmup-init {optimizer.lr_warmup_init} is above --lr {optimizer.lr}: lower it"


@refuses
def _decoupled_rate(flags: Flags) -> Iterator[str]:
    optimizer = flags[OptimizerSettings]
    peak, floor = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if peak is None:
        return
    if floor is not None and floor > peak:
        yield f"--decoupled-min-lr {floor} is above --decoupled-lr {peak}: lower it"
    elif floor is None and optimizer.min_lr > peak:
        yield (
            f"--decoupled-lr {peak} is below --min-lr {optimizer.min_lr}, to which it "
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
            f"{flag} {getattr(flags[RateSpanFlags], name)} does not go with --train-{wanted}: use "
            f"{flag.replace(unit, wanted)}, or --train-{unit}"
        )


def _units_of_spans(flags: Flags) -> tuple[str, str]:
    """Return the wrong and the right unit of the learning rate's spans, as flags name them."""
    in_samples = flags[TrainFlags].train_samples is not None
    return ("iters", "samples") if in_samples else ("samples", "iters")


def _in_wrong_unit(flags: Flags) -> list[str]:
    unit, _ = _units_of_spans(flags)
    names = (f"lr_decay_{unit}", f"lr_warmup_{unit}", f"lr_wsd_decay_{unit}")
    return [name for name in names if getattr(flags[RateSpanFlags], name)]


@refuses
def _warmup(flags: Flags) -> Iterator[str]:
    if _in_wrong_unit(flags):
        return  # the rule of the units reports it; spans of two units cannot be compared
    decay, warmup, _ = learning_rate_spans(flags[RateSpanFlags], flags[TrainFlags])
    names = ("lr_warmup_fraction", "lr_warmup_samples", "lr_warmup_iters")
    given = next((name for name in names if getattr(flags[RateSpanFlags], name)), None)
    if given is not None and decay and warmup >= decay:
        yield (
            f"{option_of(given)} {getattr(flags[RateSpanFlags], given)}: the warm-up of "
            f"{warmup:g} "
            f"samples is not shorter than the {decay} samples of the decay: shorten it, or "
            "lengthen --lr-decay-iters or --lr-decay-samples"
        )


@refuses
def _annealing(flags: Flags) -> Iterator[str]:
    optimizer, train = flags[RateSpanFlags], flags[TrainFlags]
    if flags[OptimizerSettings].lr_decay_style != "WSD" or _in_wrong_unit(flags):
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
    optimizer = flags[OptimizerSettings]
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
    spans = flags[RateSpanFlags]
    if flags[OptimizerSettings].lr_decay_style != "constant" or spans.lr_warmup_fraction:
        return  # a constant rate needs the decay span only if the warm-up is a share of it
    for name in ("lr_decay_iters", "lr_decay_samples"):
        if value := getattr(spans, name):
            yield f"{option_of(name)} {value} changes nothing with --lr-decay-style constant"


@notes
def _idle_ends(flags: Flags) -> Iterator[str]:
    optimizer = flags[OptimizerSettings]
    if optimizer.weight_decay_incr_style == "constant":
        for name in _ENDS:
            if getattr(optimizer, name) == optimizer.weight_decay:
                yield (
                    f"{option_of(name)} {optimizer.weight_decay} changes nothing: it is the "
                    "constant --weight-decay"
                )
