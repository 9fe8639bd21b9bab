"""fp16 with its loss scale, and the dtypes of gradients and of Adam's moments."""

from dataclasses import dataclass
from typing import Final, Literal

import torch

from megatron.config.train import TrainFlags
from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.optimizer.settings import LossScaleSettings, OptimizerSettings, Precision

NEEDS_16_BITS: Final = "--dry-run counts FLOPs and bytes of 16-bit numbers: add --bf16 or --fp16"
"""The mistake of a dry run in fp32."""

NARROW_SUMS: Final = "--use-precision-aware-optimizer --main-grads-dtype bf16"
"""The flags with which the gradients of an iteration add up in bf16."""


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class PrecisionFlags:
    """fp16, and types of gradients and of the residual stream."""

    fp16: bool = flag(False,
        "Parameters and activations in fp16, with a loss scale; master weights and gradients stay "
        "fp32.", excludes="--bf16")
    use_precision_aware_optimizer: bool = flag(False,
        "Allow --main-grads-dtype, --exp-avg-dtype and --exp-avg-sq-dtype, with --optimizer adam.")
    main_grads_dtype: Literal["fp32", "bf16"] = flag("fp32",
        "Type in which the gradients of an iteration add up and are reduced.")
    fp32_matmul_precision: Precision = flag("highest",
        "Precision of products of fp32 on GPUs. highest: fp32; high: TF32; medium: bf16 where "
        "PyTorch has it. TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which NVIDIA's images set, has no "
        "effect.")
    fp32_residual_connection: bool = flag(False,
        "Keep the residual stream, and the tensors between stages, in fp32.",
        idle_without="--bf16 or --fp16")
# fmt: on


def activation_dtype(flags: Flags) -> torch.dtype:
    """Return the dtype of parameters and activations."""
    if flags[PrecisionFlags].fp16:
        return torch.float16
    return torch.bfloat16 if flags[TrainFlags].bf16 else torch.float32


def gradient_dtype(flags: PrecisionFlags) -> torch.dtype:
    """Return the dtype in which the gradients of an iteration add up."""
    return torch.bfloat16 if flags.main_grads_dtype == "bf16" else torch.float32


def loss_scale_of(flags: Flags) -> LossScaleSettings | None:
    """Return the loss scale of fp16; ``None``: another dtype, which needs no loss scale."""
    return flags[LossScaleSettings] if flags[PrecisionFlags].fp16 else None


def narrow_types(flags: Flags) -> list[str]:
    """Return the flags that ask for gradients or moments of 16 bits, each with its value."""
    optimizer = flags[OptimizerSettings]
    types = {
        "--main-grads-dtype": flags[PrecisionFlags].main_grads_dtype,
        "--exp-avg-dtype": optimizer.exp_avg_dtype,
        "--exp-avg-sq-dtype": optimizer.exp_avg_sq_dtype,
    }
    return [f"{option} {kind}" for option, kind in types.items() if kind != "fp32"]
