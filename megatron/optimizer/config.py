"""Optimizer and learning-rate settings, resolved once at the entrypoint."""

from dataclasses import dataclass, field
from typing import Literal

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


MomentType = Literal["fp32", "bf16"]
"""A dtype of moments; a string, because checkpoints store it."""


Implementation = Literal["local", "apex", "torch"]
"""Which AdamW is used: ``local`` is the kernels' own, or PyTorch's if the kernels have none."""


@dataclass(frozen=True)
class MuonConfig:
    """Muon, for all matrices but those of the vocabulary.

    The names are Megatron's, behind ``--muon-``.

    Attributes:
        momentum: decay of the running mean of gradients in a step.
        nesterov: mix the gradient with the new mean once more (Nesterov momentum).
        num_ns_steps: number of Newton-Schulz steps.
        coefficient_type: coefficients of the Newton-Schulz steps.
        scale_mode: rule for the length of an update.
        extra_scale_factor: further factor of the length.
        fp32_matmul_prec: precision of the products in the Newton-Schulz iteration.
        split_qkv: whether queries, keys and values are matrices of their own.
    """

    momentum: float = 0.95
    nesterov: bool = False
    num_ns_steps: int = 5
    coefficient_type: Coefficients = "quintic"
    scale_mode: ScaleMode = "spectral"
    extra_scale_factor: float = 1.0
    fp32_matmul_prec: Precision = "medium"
    split_qkv: bool = True


@dataclass(frozen=True)
class LossScaleConfig:
    """The loss scale of fp16 (``megatron.optimizer.loss_scaler``); names are Megatron's.

    Attributes:
        constant: a scale that never changes; ``None``: the scale changes.
        initial: the first scale.
        minimum: the smallest scale.
        window: number of steps without an overflow after which the scale is doubled.
        hysteresis: number of overflows after which the scale is halved.
    """

    constant: float | None = None
    initial: float = 2.0**32
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2


@dataclass(frozen=True)
class HostStates:
    """Masters and moments that are kept on the host, which updates them.

    Attributes:
        fraction: share of the elements of the parameters, from 0 to 1.
        overlap: whether gradients and weights are copied while the CPU updates.
        pins_gradients: whether the host's memory for gradients is pinned.
        pins_weights: whether the host's memory for weights is pinned.
    """

    fraction: float = 1.0
    overlap: bool = False
    pins_gradients: bool = True
    pins_weights: bool = True


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, clipping, and the schedules of its rates; steps are counted in samples.

    Attributes:
        lr: peak learning rate.
        min_lr: final learning rate.
        lr_decay_style: how the learning rate falls after the warm-up.
        lr_decay_samples: samples over which the rate decays (warm-up included).
        lr_warmup_samples: samples of linear warm-up; may be a fraction, if the user gives the
            warm-up as a share of the decay.
        lr_warmup_init: learning rate at step 0.
        lr_wsd_decay_style: how the rate falls in the last phase of WSD.
        lr_wsd_decay_samples: length of that phase: the last samples of the decay.
        decoupled_lr: peak learning rate of the input and the output layer; ``None``: ``lr``.
        decoupled_min_lr: final learning rate of the input and the output layer; ``None``:
            ``min_lr``.
        weight_decay: not applied to biases and one-dimensional parameters; decoupled, except for
            SGD.
        start_weight_decay: weight decay at step 0, if it is not constant.
        end_weight_decay: weight decay at the end, if it is not constant.
        weight_decay_incr_style: how the weight decay goes from its start to its end.
        weight_decay_samples: samples from the start of the weight decay to its end.
        optimizer: the optimizer. Muon updates matrices of layers and learned positions, and AdamW
            all other parameters.
        adam_beta1: first-moment decay.
        adam_beta2: second-moment decay.
        adam_eps: added to the root of the second moment.
        sgd_momentum: decay of the running sum of gradients in a step of SGD.
        muon: settings of Muon.
        clip_grad: limit of the global gradient norm; 0 switches clipping off.
        post_validation: a rank steps before it knows the norm over all ranks, and steps again if
            the norm requires it (``megatron.optimizer.post_validation``).
        loss_scale: the loss scale for fp16; ``None``: losses are not scaled.
        implementation: of AdamW.
        exp_avg_dtype: of Adam's first moment in memory; updates are computed in fp32.
        exp_avg_sq_dtype: of Adam's second moment in memory.
    """

    lr: float
    min_lr: float = 0.0
    lr_decay_style: DecayStyle = "linear"
    lr_decay_samples: int = 1
    lr_warmup_samples: float = 0
    lr_warmup_init: float = 0.0
    lr_wsd_decay_style: AnnealingStyle = "exponential"
    lr_wsd_decay_samples: int = 0
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    weight_decay: float = 0.01
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    weight_decay_incr_style: IncreaseStyle = "constant"
    weight_decay_samples: int = 1
    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    muon: MuonConfig = field(default_factory=MuonConfig)
    clip_grad: float = 1.0
    post_validation: bool = False
    loss_scale: LossScaleConfig | None = None
    implementation: Implementation = "local"
    exp_avg_dtype: MomentType = "fp32"
    exp_avg_sq_dtype: MomentType = "fp32"
