"""The flags of the optimizer, and of the rates that change during a run."""

from dataclasses import dataclass
from typing import Final, Literal

from megatron.config.declare import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, flag, required
from megatron.optimizer.config import (
    AnnealingStyle,
    Coefficients,
    DecayStyle,
    IncreaseStyle,
    Precision,
    ScaleMode,
)

_WSD: Final = "--lr-decay-style WSD"
_MUON: Final = "--optimizer muon"
_SGD: Final = "--optimizer sgd"
_NO_ADAM: Final = "--optimizer sgd or --skip-train"
_INCREASE: Final = "--weight-decay-incr-style linear or --weight-decay-incr-style cosine"

# The formatter is off so that the flags read as a table.
# fmt: off


@dataclass(frozen=True)
class OptimizerFlags:
    """The optimizer, clipping, learning rate and weight decay."""

    lr: float = required("Peak learning rate.", POSITIVE)
    min_lr: float = flag(0.0, "Final learning rate.", NOT_NEGATIVE,
        idle_with="--lr-decay-style constant")
    lr_decay_style: DecayStyle = flag("linear",
        "How the rate falls after the warm-up. WSD: it stays, and falls at the end of the span "
        "only.")
    lr_decay_iters: int | None = flag(None, "Iterations until --min-lr is reached.", COUNT,
        unset="--train-iters", excludes="--lr-decay-samples")
    lr_decay_samples: int | None = flag(None, "The same in samples, for --train-samples.", COUNT,
        unset="--train-samples")
    lr_warmup_iters: int = flag(0, "Iterations of linear warm-up.", NOT_NEGATIVE,
        excludes="--lr-warmup-samples or --lr-warmup-fraction")
    lr_warmup_samples: int = flag(0, "The same in samples, for --train-samples.", NOT_NEGATIVE,
        excludes="--lr-warmup-fraction")
    lr_warmup_fraction: float | None = flag(None, "The same as a share of the decay span.", SHARE,
        unset="by one of the above")
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.", NOT_NEGATIVE,
        idle_without="--lr-warmup-iters or --lr-warmup-samples or --lr-warmup-fraction")
    lr_wsd_decay_style: AnnealingStyle = flag("exponential", "How WSD lets the rate fall.",
        idle_without=_WSD)
    lr_wsd_decay_iters: int | None = flag(None,
        "Iterations over which it falls, the last ones of the decay span.", NOT_NEGATIVE,
        unset="required with --lr-decay-style WSD", idle_without=_WSD,
        excludes="--lr-wsd-decay-samples")
    lr_wsd_decay_samples: int | None = flag(None, "The same in samples, for --train-samples.",
        NOT_NEGATIVE, unset="by --lr-wsd-decay-iters", idle_without=_WSD)
    decoupled_lr: float | None = flag(None,
        "Peak learning rate of the input and the output layer.", POSITIVE, unset="--lr")
    decoupled_min_lr: float | None = flag(None, "Their final learning rate.", NOT_NEGATIVE,
        unset="--min-lr", idle_without="--decoupled-lr", idle_with="--lr-decay-style constant")
    weight_decay: float = flag(0.01,
        "Not on biases and vectors; decoupled from the gradient, but for SGD.", NOT_NEGATIVE,
        idle_with=_INCREASE)
    weight_decay_incr_style: IncreaseStyle = flag("constant",
        "How the weight decay goes from its start to its end, over the whole run.")
    start_weight_decay: float | None = flag(None, "Weight decay of the first step.", NOT_NEGATIVE,
        unset="required if it is not constant")
    end_weight_decay: float | None = flag(None, "Weight decay at the end.", NOT_NEGATIVE,
        unset="required if it is not constant")
    optimizer: Literal["adam", "sgd", "muon"] = flag("adam",
        "adam: with decoupled weight decay; sgd: with momentum, and decay added to the gradient; "
        "muon: for the matrices of the layers, and Adam for all other weights.")
    optimizer_impl: Literal["auto", "local", "apex", "torch"] = flag("auto",
        "Whose AdamW updates on GPUs. local: one Triton kernel of this project; apex: "
        "apex.optimizers.FusedAdam, where NVIDIA's package is; torch: PyTorch's. auto: the first "
        "of them that is there.", idle_with=_NO_ADAM)
    adam_beta1: float = flag(0.9, "First-moment decay.", SHARE, idle_with=_SGD)
    adam_beta2: float = flag(0.999, "Second-moment decay.", SHARE, idle_with=_SGD)
    adam_eps: float = flag(1e-8, "Added to the root of the second moment.", POSITIVE,
        idle_with=_SGD)
    sgd_momentum: float = flag(0.9, "Share of the sum of gradients that a step of SGD keeps.",
        SHARE, idle_without=_SGD)
    muon_momentum: float = flag(0.95, "Share of the mean of gradients that a step of Muon keeps.",
        SHARE, idle_without=_MUON)
    muon_nesterov: bool = flag(False, "Mix the gradient with the new mean.", idle_without=_MUON)
    muon_num_ns_steps: int = flag(5, "Newton-Schulz steps.", COUNT, idle_without=_MUON)
    muon_coefficient_type: Coefficients = flag("quintic",
        "Their coefficients. quintic and aol are sets of 5 and 4, which the steps repeat; "
        "polar_express is one for 8 steps or more.", idle_without=_MUON)
    muon_scale_mode: ScaleMode = flag("spectral",
        "Length of an update of m rows and n columns: root of max(m, n), of m / n, or of "
        "max(1, m / n).", idle_without=_MUON)
    muon_extra_scale_factor: float = flag(1.0, "By which it is multiplied besides.", POSITIVE,
        idle_without=_MUON)
    muon_fp32_matmul_prec: Precision = flag("medium",
        "Precision of the products of Newton-Schulz steps. medium: bf16; high: TF32 where there "
        "is; highest: fp32.", idle_without=_MUON)
    muon_no_split_qkv: bool = flag(False,
        "Take queries, keys and values of a layer for one matrix, not three.", idle_without=_MUON)
    clip_grad: float = flag(1.0, "Limit of the global gradient norm; 0: off.", NOT_NEGATIVE)
    enable_optimizer_post_validation: bool = flag(False,
        "Step without waiting for the other ranks, and take back a step that proves wrong.")
