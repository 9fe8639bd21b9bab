"""The optimizer, its learning rate and its weight decay: flags on the spans of the rate."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from megatron.flags.declare import flag
from megatron.flags.ranges import NOT_NEGATIVE, SAMPLES, SAMPLES_OR_NONE, SHARE
from megatron.run.train import TrainFlags, batch_sizes, iterations

_WSD: Final = "--lr-decay-style WSD"


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
