"""The spans of the learning rate: flags give them in iterations, in samples or as a share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from megatron.flags.declare import flag, option_of
from megatron.flags.groups import Flags
from megatron.flags.ranges import NOT_NEGATIVE, SAMPLES, SAMPLES_OR_NONE, SHARE
from megatron.flags.rules import notes
from megatron.optimizer.settings import OptimizerSettings

_WSD: Final = "--lr-decay-style WSD"


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


@dataclass(frozen=True)
class RateSpanSettings:
    """Spans of the learning rate; a run counts all of them in samples."""

    # fmt: off
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

    def in_samples(self, iterations: int, samples: int, samples_of: Callable[[int], int]) -> Spans:
        """Return the spans of a run in samples.

        A span in iterations ends where these iterations end. Batches may grow, so their samples are
        added up batch by batch.

        Args:
            iterations: iterations of the run.
            samples: samples of the run.
            samples_of: function from a number of iterations to the samples of the first of them.
        """
        decay_iterations = self.lr_decay_iters or iterations
        decay = self.lr_decay_samples or samples_of(self.lr_decay_iters or 0) or samples
        warmup: float = self.lr_warmup_samples or samples_of(self.lr_warmup_iters)
        if self.lr_warmup_fraction:
            warmup = self.lr_warmup_fraction * decay
        annealing = self.lr_wsd_decay_samples or 0
        if self.lr_wsd_decay_iters:
            before = max(0, decay_iterations - self.lr_wsd_decay_iters)
            annealing = samples_of(decay_iterations) - samples_of(before)
        return Spans(decay, warmup, annealing)


@notes
def _idle_decay(flags: Flags) -> Iterator[str]:
    spans = flags[RateSpanSettings]
    if flags[OptimizerSettings].lr_decay_style != "constant" or spans.lr_warmup_fraction:
        return  # a constant rate needs the decay span only if the warm-up is a share of it
    for name in ("lr_decay_iters", "lr_decay_samples"):
        if value := getattr(spans, name):
            yield f"{option_of(name)} {value} changes nothing with --lr-decay-style constant"
