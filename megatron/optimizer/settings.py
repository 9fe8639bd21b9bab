"""The settings of optimizers and of their rates. A class declares flags and holds their values."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from megatron.flags.declare import flag, option_of, required, spelled, spells
from megatron.flags.groups import Flags
from megatron.flags.ranges import (
    EPSILON,
    FACTOR,
    INTERVAL,
    MEMORY,
    PROBABILITY,
    SHARE,
    WEIGHT,
    Range,
    up_to,
)
from megatron.flags.rules import notes, refuses

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
"""How the learning rate falls after the warm-up; WSD: constant, then a decay at the end only."""

AnnealingStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
"""How the learning rate falls in the last phase of WSD."""

IncreaseStyle = Literal["constant", "linear", "cosine"]
"""How the weight decay goes from its start to its end."""

ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]
"""The rule for the length of a Muon update, by the shape of its matrix."""

Coefficients = Literal["simple", "quintic", "polar_express", "aol"]
"""A set of coefficients for the Newton-Schulz iteration."""

Precision = Literal["medium", "high", "highest"]
"""Precision of matrix products in PyTorch's words: bf16, TF32 if the device has it, or fp32."""

SharedMatrices = Literal["duplicated", "distributed", "blockwise"]
"""How Muon updates matrices that tensor-parallel ranks share, in Megatron's words."""


MomentType = Literal["fp32", "bf16"]
"""A dtype of moments; a string, because checkpoints store it."""


Implementation = Literal["local", "apex", "torch"]
"""Which AdamW is used: ``local`` is the kernels' own, or PyTorch's if the kernels have none."""


_QUERY_OR_KEY_NORM: Final = re.compile(r"\.[qk]_layernorm\.")
"""In the names of the parameters of norms of queries and keys.

In multi-latent attention these are norms of the queries' narrow vectors; those of keys have another
name, in Megatron-LM too."""

_ENDS: Final = {"start_weight_decay": "first step", "end_weight_decay": "last step"}
_PEAK: Final = Range(1e-12, 1000)
_SCALE: Final = Range(2.0**-10, 1 << 40)
"""Loss scales lift small gradients into the range of fp16, and a scale below 1 lowers large ones. A
larger one would only overflow, a smaller one lose all gradients."""

_FP16: Final = "--fp16"
_CONSTANT: Final = "--loss-scale"
_WSD: Final = "--lr-decay-style WSD"
_MUON: Final = "--optimizer muon"
_SGD: Final = "--optimizer sgd"
_NO_ADAM: Final = "--optimizer sgd or --skip-train"
STATES: Final = "--optimizer-cpu-offload"
_INCREASE: Final = "--weight-decay-incr-style linear or --weight-decay-incr-style cosine"


@dataclass(frozen=True)
class MuonSettings:
    """Muon, for all matrices but those of the vocabulary."""

    # fmt: off
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
    muon_split_qkv: bool = spelled(True, spells("--muon-no-split-qkv", False,
        "Let Muon treat the queries, keys and values of a layer as one matrix, not three.",
        idle_without=_MUON))
    muon_tp_mode: SharedMatrices = flag("duplicated",
        "How Muon updates matrices that tensor-parallel ranks share. duplicated: every rank "
        "gathers the whole matrix and forms the whole update. distributed: every rank works on "
        "its slice, and small products are summed over the ranks; the same update but for "
        "rounding. blockwise: every rank takes its slice for a matrix of its own, so the update "
        "depends on the number of ranks.", idle_without=_MUON)
    # fmt: on


@dataclass(frozen=True)
class LossScaleSettings:
    """The loss scale of fp16."""

    # fmt: off
    loss_scale: float | None = flag(None, "A loss scale that never changes.", _SCALE,
        unset="a scale that changes", idle_without=_FP16)
    initial_loss_scale: float = flag(2.0**32, "The first loss scale.", _SCALE,
        idle_without=_FP16, idle_with=_CONSTANT)
    min_loss_scale: float = flag(1.0, "The least loss scale.", _SCALE, idle_without=_FP16,
        idle_with=_CONSTANT)
    loss_scale_window: int = flag(1000,
        "Steps without an overflow after which the loss scale is doubled.", INTERVAL,
        idle_without=_FP16, idle_with=_CONSTANT)
    hysteresis: int = flag(2,
        "Overflows after which the loss scale is halved for the first time. Until it is doubled "
        "again, each further overflow halves it.", up_to(1000),
        idle_without=_FP16, idle_with=_CONSTANT)
    # fmt: on


@dataclass(frozen=True)
class HostStateSettings:
    """States of the optimizer on the host."""

    # fmt: off
    optimizer_cpu_offload: bool = flag(False,
        "Keep master weights and moments in the host's memory, and update them on the CPU.",
        idle_with="--skip-train")
    optimizer_offload_fraction: float = flag(1.0,
        "Share of a rank's parameters whose states are on the host. Whole parameters are chosen, "
        "so it may be a little more.", PROBABILITY, idle_without=STATES)
    overlap_cpu_optimizer_d2h_h2d: bool = flag(False,
        "Copy gradients to the host and weights to the device while the CPU updates other "
        "parameters.", idle_without=STATES)
    pins_gradients: bool = spelled(True, spells("--no-pin-cpu-grads", False,
        "Do not pin the host's memory for gradients. Copies then hold up the host, and are slower.",
        idle_without=STATES))
    pins_weights: bool = spelled(True, spells("--no-pin-cpu-params", False,
        "Do not pin the host's memory for weights. Copies then hold up the host, and are slower.",
        idle_without=STATES))
    # fmt: on


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer, clipping, learning rate and weight decay.

    Attributes:
        lr_decay_samples: samples until the final rate is reached, with the warm-up.
        lr_warmup_samples: samples of linear warm-up; may be a fraction, if the user gives the
            warm-up as a share of the decay.
        lr_wsd_decay_samples: samples at the end of the decay in which the rate falls with WSD.
        weight_decay_samples: samples from the start of the weight decay to its end.
        muon: settings of Muon.
        loss_scale: the loss scale for fp16; ``None``: losses are not scaled.
        implementation: of AdamW, chosen by ``optimizer_impl`` and the machine.
        width_mult: the width multiplier of the maximal update parametrisation; 1 without it.
    """

    # fmt: off
    lr: float = required("Peak learning rate.", _PEAK)
    min_lr: float = flag(0.0, "Final learning rate.", WEIGHT,
        idle_with="--lr-decay-style constant")
    lr_decay_style: DecayStyle = flag("linear",
        "How the learning rate falls after the warm-up. WSD: it stays at its peak, and falls only "
        "at the end of the decay span.")
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.", WEIGHT,
        idle_without="--lr-warmup-iters or --lr-warmup-samples or --lr-warmup-fraction")
    lr_wsd_decay_style: AnnealingStyle = flag("exponential",
        "How the learning rate falls at the end, with --lr-decay-style WSD.",
        idle_without=_WSD)
    decoupled_lr: float | None = flag(None,
        "Peak learning rate of the input and the output layer.", _PEAK, unset="--lr")
    decoupled_min_lr: float | None = flag(None,
        "Final learning rate of the input and the output layer.", WEIGHT,
        unset="--min-lr", idle_without="--decoupled-lr", idle_with="--lr-decay-style constant")
    weight_decay: float = flag(0.01,
        "Weight decay of matrices; biases and other vectors have none. It is decoupled from the "
        "gradient, except with SGD.", WEIGHT,
        idle_with=_INCREASE)
    apply_wd_to_qk_layernorm: bool = flag(False,
        "Let the norms of queries and keys decay too, as in Qwen3-Next.",
        idle_without="--qk-layernorm")
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
    clip_grad: float = flag(1.0, "Limit of the global gradient norm; 0: off.",
        Range(1e-6, 1e12, or_zero=True))
    post_validation: bool = spelled(False, spells("--enable-optimizer-post-validation", True,
        "Step before all gradient norms are known, and take a step back that proves wrong."))
    exp_avg_dtype: MomentType = flag("fp32",
        "Type in which Adam's first moment is kept; it is updated in fp32.")
    exp_avg_sq_dtype: MomentType = flag("fp32",
        "Type in which Adam's second moment is kept; it is updated in fp32. bf16 cannot resolve "
        "the changes that the default --adam-beta2 makes.")
    # fmt: on

    lr_decay_samples: int = 1
    lr_warmup_samples: float = 0
    lr_wsd_decay_samples: int = 0
    weight_decay_samples: int = 1
    muon: MuonSettings = field(default_factory=MuonSettings)
    loss_scale: LossScaleSettings | None = None
    implementation: Implementation = "local"
    width_mult: float = 1.0

    @property
    def takes_whole_matrices(self) -> bool:
        """Whether some updates need a whole matrix, and not each element by itself."""
        return self.optimizer == "muon"

    def decays(self, name: str, dimensions: int) -> bool:
        """Return whether a parameter decays.

        By Megatron's rule matrices decay, embeddings included; biases and vectors (norms) do not.
        With ``apply_wd_to_qk_layernorm`` weights and biases of norms of queries and keys decay too.

        Args:
            name: of the parameter in the whole model.
            dimensions: of the parameter.
        """
        if self.apply_wd_to_qk_layernorm and _QUERY_OR_KEY_NORM.search(name):
            return True
        return dimensions > 1 and not name.endswith(".bias")


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
def _idle_ends(flags: Flags) -> Iterator[str]:
    optimizer = flags[OptimizerSettings]
    if optimizer.weight_decay_incr_style == "constant":
        for name in _ENDS:
            if getattr(optimizer, name) == optimizer.weight_decay:
                yield (
                    f"{option_of(name)} {optimizer.weight_decay} changes nothing: it is the "
                    "constant --weight-decay"
                )


@notes
def _no_share(flags: Flags) -> Iterator[str]:
    own = flags[HostStateSettings]
    if own.optimizer_cpu_offload and own.optimizer_offload_fraction == 0:
        yield f"{STATES} changes nothing with --optimizer-offload-fraction 0"
