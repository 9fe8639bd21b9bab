"""Turns checked flags into the optimizer's configuration: its rates, moments and loss scale."""

from typing import NamedTuple

from megatron.config.copied import copied
from megatron.config.declare import Flags
from megatron.config.flags import TrainFlags
from megatron.config.lengths import iterations
from megatron.config.optimizer_flags import OptimizerFlags
from megatron.config.optimizer_impl import implementation_of
from megatron.config.precision_flags import PrecisionFlags
from megatron.optimizer.config import LossScaleConfig, MuonConfig, OptimizerConfig


class Spans(NamedTuple):
    """The spans of the learning rate, in samples.

    Attributes:
        decay: until the final rate is reached, warm-up included.
        warmup: of the warm-up; a share of the decay need not be whole.
        annealing: at the end of the decay in which the rate of WSD falls.
    """

    decay: int
    warmup: float
    annealing: int


def learning_rate_spans(flags: OptimizerFlags, train: TrainFlags) -> Spans:
    """Return the spans of the learning rate, given in iterations or in samples."""
    length = iterations(train)
    batch = length.batch
    decay = flags.lr_decay_samples or (flags.lr_decay_iters or 0) * batch
    decay = decay or train.train_samples or length.samples
    warmup: float = flags.lr_warmup_samples or flags.lr_warmup_iters * batch
    if flags.lr_warmup_fraction:
        warmup = flags.lr_warmup_fraction * decay
    annealing = flags.lr_wsd_decay_samples or (flags.lr_wsd_decay_iters or 0) * batch
    return Spans(decay, warmup, annealing)


def optimizer_config(flags: Flags) -> OptimizerConfig:
    """The optimizer and its rates, their spans in samples."""
    optimizer, train = flags[OptimizerFlags], flags[TrainFlags]
    spans = learning_rate_spans(optimizer, train)
    return copied(
        OptimizerConfig,
        optimizer,
        lr_decay_samples=spans.decay,
        lr_warmup_samples=spans.warmup,
        lr_wsd_decay_samples=spans.annealing,
        weight_decay_samples=train.train_samples or iterations(train).samples,
        muon=muon_config(optimizer),
        post_validation=optimizer.enable_optimizer_post_validation,
        loss_scale=loss_scale_config(flags[PrecisionFlags]),
        implementation=implementation_of(flags),
        exp_avg_dtype=flags[PrecisionFlags].exp_avg_dtype,
        exp_avg_sq_dtype=flags[PrecisionFlags].exp_avg_sq_dtype,
    )


def muon_config(flags: OptimizerFlags) -> MuonConfig:
    """Muon's settings: its flags without their common beginning."""
    prefix = "muon_"
    same = {
        name.removeprefix(prefix): value
        for name, value in vars(flags).items()
        if name.startswith(prefix) and name != "muon_no_split_qkv"
    }
    return MuonConfig(split_qkv=not flags.muon_no_split_qkv, **same)


def loss_scale_config(flags: PrecisionFlags) -> LossScaleConfig | None:
    """The loss scale, which only fp16 has."""
    if not flags.fp16:
        return None
    return LossScaleConfig(
        constant=flags.loss_scale,
        initial=flags.initial_loss_scale,
        minimum=flags.min_loss_scale,
        window=flags.loss_scale_window,
        hysteresis=flags.hysteresis,
    )
