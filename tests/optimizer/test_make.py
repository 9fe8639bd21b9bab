"""The optimizer of a run that only evaluates."""

import pytest
import torch
from optimizer.entries import entries
from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.make import make_idle_optimizer
from megatron.optimizer.parameters import ParameterPart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_idle_optimizer_holds_weights_alone_and_passes_on_what_is_loaded(
    dtype: torch.dtype,
) -> None:
    parameter = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    [entry] = entries([("weight", parameter)])
    Bucket([entry], kernels_for(torch.device("cpu"), dtype))
    optimizer = make_idle_optimizer([ParameterPart.whole(entry)])
    [(kind, weight)] = optimizer.tensors_of("weight").items()
    assert (kind, weight.dtype) == ("weight", torch.float32)
    weight.detach().copy_(torch.arange(6.0).view(3, 2))
    optimizer.loaded(0)
    assert torch.equal(parameter.detach().float(), weight)
