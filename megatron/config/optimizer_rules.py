"""The rules about the optimizer and its rates, and notes on those of its flags that are idle."""

from collections.abc import Iterator
from typing import Final

from megatron.config.declare import Flags, Rule, option_of
from megatron.config.flags import LogFlags, TrainFlags
from megatron.config.optimizer_flags import OptimizerFlags
from megatron.config.resolve_optimizer import learning_rate_spans
from megatron.optimizer.newton_schulz import coefficients

_ENDS: Final = {"start_weight_decay": "first step", "end_weight_decay": "last step"}


def _learning_rates(flags: Flags) -> Iterator[str]:
    optimizer = flags[OptimizerFlags]
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}: lower it"
    if optimizer.lr_warmup_init > optimizer.lr:
        yield f"--lr-warmup-init {optimizer.lr_warmup_init} is above --lr {optimizer.lr}: lower it"


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


def _units(flags: Flags) -> Iterator[str]:
    """The decay and the warm-up must be counted as the training is, in samples or iterations."""
    unit, wanted = _units_of_spans(flags)
    for name in _in_wrong_unit(flags):
        flag = option_of(name)
        yield (
            f"{flag} {getattr(flags[OptimizerFlags], name)} does not go with --train-{wanted}: use "
            f"{flag.replace(unit, wanted)}, or --train-{unit}"
        )


def _units_of_spans(flags: Flags) -> tuple[str, str]:
    """The unit that no span of the learning rate may have, and that which it must."""
    in_samples = flags[TrainFlags].train_samples is not None
    return ("iters", "samples") if in_samples else ("samples", "iters")


def _in_wrong_unit(flags: Flags) -> list[str]:
    unit, _ = _units_of_spans(flags)
    names = (f"lr_decay_{unit}", f"lr_warmup_{unit}", f"lr_wsd_decay_{unit}")
    return [name for name in names if getattr(flags[OptimizerFlags], name)]


def _warmup(flags: Flags) -> Iterator[str]:
    if _in_wrong_unit(flags):
        return  # told by the rule of the units; spans of two units cannot be compared
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


def _annealing(flags: Flags) -> Iterator[str]:
    optimizer = flags[OptimizerFlags]
    spans = (optimizer.lr_wsd_decay_iters, optimizer.lr_wsd_decay_samples)
    if optimizer.lr_decay_style == "WSD" and spans == (None, None):
        _, unit = _units_of_spans(flags)
        yield (
            f"--lr-decay-style WSD needs the span at the end in which the rate falls: give "
            f"--lr-wsd-decay-{unit}"
        )


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


def _newton_schulz(flags: Flags) -> Iterator[str]:
    optimizer = flags[OptimizerFlags]
    if optimizer.optimizer == "muon":
        try:
            coefficients(optimizer.muon_coefficient_type, optimizer.muon_num_ns_steps)
        except ValueError as error:
            yield f"--muon-num-ns-steps {optimizer.muon_num_ns_steps}: {error}"


def _idle_decay(flags: Flags) -> Iterator[str]:
    optimizer = flags[OptimizerFlags]
    if optimizer.lr_decay_style != "constant" or optimizer.lr_warmup_fraction:
        return  # a constant rate needs the decay span only if the warm-up is a share of it
    for name in ("lr_decay_iters", "lr_decay_samples"):
        if value := getattr(optimizer, name):
            yield f"{option_of(name)} {value} changes nothing with --lr-decay-style constant"


def _idle_ends(flags: Flags) -> Iterator[str]:
    optimizer = flags[OptimizerFlags]
    if optimizer.weight_decay_incr_style == "constant":
        for name in _ENDS:
            if getattr(optimizer, name) == optimizer.weight_decay:
                yield (
                    f"{option_of(name)} {optimizer.weight_decay} changes nothing: it is the "
                    "constant --weight-decay"
                )


def _predicted_without_products(flags: Flags) -> Iterator[str]:
    if flags[LogFlags].dry_run and flags[OptimizerFlags].optimizer == "muon":
        yield (
            "--optimizer muon changes nothing in the time of a dry run but the bytes that a step "
            "moves: its products are not counted"
        )


OPTIMIZER_RULES: Final[tuple[Rule, ...]] = (
    _learning_rates,
    _decoupled_rate,
    _units,
    _warmup,
    _annealing,
    _weight_decay,
    _newton_schulz,
)
"""The mistakes that they find make a run impossible."""

OPTIMIZER_NOTES: Final[tuple[Rule, ...]] = (
    _idle_decay,
    _idle_ends,
    _predicted_without_products,
)
"""The flags that they find change nothing beside the others."""
