"""Types of a run's numbers, by the type of its parameters."""

from dataclasses import replace

import torch

from megatron.run.precision import PrecisionSettings


class InFloat64(PrecisionSettings):
    """Parameters and activations in float64, which no flag asks for."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        return torch.float64


def precision(dtype: torch.dtype, *, narrow_gradients: bool = False) -> PrecisionSettings:
    """Return the types of a run with parameters and activations of a type.

    ``narrow_gradients``: the gradients of an iteration add up in bf16.
    """
    kind = InFloat64 if dtype == torch.float64 else PrecisionSettings
    made = kind(bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    assert made.dtype == dtype, f"no run computes in {dtype}"
    return replace(made, main_grads_dtype="bf16") if narrow_gradients else made
