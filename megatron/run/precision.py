"""fp16 with its loss scale, and the dtypes of gradients and of Adam's moments."""

from dataclasses import dataclass
from typing import Final, Literal

import torch

from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.optimizer.settings import LossScaleSettings, OptimizerSettings, Precision

NEEDS_16_BITS: Final = "--dry-run counts FLOPs and bytes of 16-bit numbers: add --bf16 or --fp16"
"""The mistake of a dry run in fp32."""

NARROW_SUMS: Final = "--use-precision-aware-optimizer --main-grads-dtype bf16"
"""The flags with which the gradients of an iteration add up in bf16."""


@dataclass(frozen=True)
class PrecisionSettings:
    """Types of activations, gradients and the residual stream."""

    # fmt: off
    bf16: bool = flag(False,
        "Parameters and activations in bf16, not fp32; master weights and gradients stay fp32.")
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

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        if self.fp16:
            return torch.float16
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype in which the gradients of an iteration add up."""
        return torch.bfloat16 if self.main_grads_dtype == "bf16" else torch.float32


def loss_scale_of(flags: Flags) -> LossScaleSettings | None:
    """Return the loss scale of fp16; ``None``: another dtype, which needs no loss scale."""
    return flags[LossScaleSettings] if flags[PrecisionSettings].fp16 else None


def narrow_types(flags: Flags) -> list[str]:
    """Return the flags that ask for gradients or moments of 16 bits, each with its value."""
    optimizer = flags[OptimizerSettings]
    types = {
        "--main-grads-dtype": flags[PrecisionSettings].main_grads_dtype,
        "--exp-avg-dtype": optimizer.exp_avg_dtype,
        "--exp-avg-sq-dtype": optimizer.exp_avg_sq_dtype,
    }
    return [f"{option} {kind}" for option, kind in types.items() if kind != "fp32"]
