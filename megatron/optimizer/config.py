"""Optimizer and learning-rate settings, resolved once at the entrypoint."""

from dataclasses import dataclass, field
from typing import Literal

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
"""How the learning rate falls after the warm-up; WSD: it stays, and is annealed at the end."""

AnnealingStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
"""How WSD anneals the learning rate."""

IncreaseStyle = Literal["constant", "linear", "cosine"]
"""How the weight decay goes from its start to its end."""

ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]
"""How long an update of Muon is, by the shape of its matrix."""

Coefficients = Literal["simple", "quintic", "polar_express", "aol"]
"""A set of coefficients for the Newton-Schulz iteration."""

Precision = Literal["medium", "high", "highest"]
"""Of matrix products in PyTorch's words: bf16, TF32 where there is, or fp32."""


MomentType = Literal["fp32", "bf16"]
"""A type in which moments are kept; a word, because checkpoints keep it."""


Implementation = Literal["local", "apex", "torch"]
"""Whose AdamW updates: the kernels' own where they have one, else PyTorch's; apex's; PyTorch's."""


@dataclass(frozen=True)
class MuonConfig:
    """Muon for the matrices of the layers; the names are Megatron's, behind ``--muon-``.

    Attributes:
        momentum: share of the mean of gradients that a step keeps.
        nesterov: look ahead by mixing the gradient with the new mean.
        num_ns_steps: Newton-Schulz steps.
        coefficient_type: their coefficients.
        scale_mode: length of an update.
        extra_scale_factor: by which updates are multiplied besides.
        fp32_matmul_prec: of the products of the iteration.
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
        constant: a scale that never changes; ``None``: it does.
        initial: the first scale.
        minimum: the least.
        window: steps without an overflow after which the scale is doubled.
        hysteresis: overflows after which it is halved.
    """

    constant: float | None = None
    initial: float = 2.0**32
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, clipping, and the schedules of its rates; steps are counted in samples.

    Attributes:
        lr: peak learning rate.
        min_lr: final learning rate.
        lr_decay_style: how it falls after the warm-up.
        lr_decay_samples: samples over which the rate decays (warm-up included).
        lr_warmup_samples: samples of linear warm-up; a share of the decay need not be whole.
        lr_warmup_init: learning rate at step 0.
        lr_wsd_decay_style: how WSD anneals the rate.
        lr_wsd_decay_samples: samples over which WSD does, the last ones of the decay.
        decoupled_lr: peak learning rate of the input and the output layer; ``None``: ``lr``.
        decoupled_min_lr: their final learning rate; ``None``: ``min_lr``.
        weight_decay: not applied to biases and one-dimensional parameters; decoupled but for SGD.
        start_weight_decay: weight decay at step 0, if it is not constant.
        end_weight_decay: weight decay at the end, if it is not constant.
        weight_decay_incr_style: how the weight decay goes from its start to its end.
        weight_decay_samples: samples over which it does.
        optimizer: the optimizer; with Muon, AdamW for all that is no matrix of a layer.
        adam_beta1: first-moment decay.
        adam_beta2: second-moment decay.
        adam_eps: added to the root of the second moment.
        sgd_momentum: share of the sum of gradients that a step of SGD keeps.
        muon: settings of Muon.
        clip_grad: limit of the global gradient norm; 0 switches clipping off.
        post_validation: step on the norm over the ranks up to this one, and step again if that
            turns out wrong (``megatron.optimizer.post_validation``).
        loss_scale: that fp16 needs; ``None``: losses are not scaled.
        implementation: of AdamW.
        exp_avg_dtype: of Adam's first moment, which is updated in fp32.
        exp_avg_sq_dtype: of its second moment.
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
