"""A mixture by the kernels of a GPU, in Triton's interpreter, against PyTorch's operations."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from harness.mixtures import mixture
from kernels.implementations import of_a_gpu, relative_error
from torch import Tensor

from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.main_grad import main_grad_of
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.model.ownership import owned_by
from megatron.optimizer.bucket import Bucket

WHERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def trained(kernels: Kernels, *, splits: bool) -> list[Tensor]:
    """The output, and the gradients of the input and of all weights after two microbatches."""
    site = Site(WHERE, torch.float32, given_kernels=kernels)
    shared: dict[str, Any] = {
        "moe_shared_expert_intermediate_size": 4,
        "moe_shared_expert_gate": True,
    }
    made = mixture(5, 2, moe_ffn_hidden_size=6, **shared).layer(8, site)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    Bucket(list(owned_by(made, "x.")), kernels)
    work: list[object] = []
    defer_weight_gradients(made, work.append if splits else None)
    found = []
    for _ in range(2):
        x_buh = torch.randn(2, 5, 8, generator=generator).to(WHERE).requires_grad_()
        y_buh = made(x_buh)
        y_buh.square().sum().backward()
        assert x_buh.grad is not None
        found += [y_buh, x_buh.grad]
    for each in work:
        assert callable(each)
        each()
    return [*found, *map(main_grad_of, made.parameters())]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
def test_a_mixture_is_the_same(splits: bool) -> None:
    wanted = trained(ReferenceKernels(), splits=splits)
    for own, want in zip(
        trained(of_a_gpu(WHERE, torch.float32), splits=splits), wanted, strict=True
    ):
        assert relative_error(own, want) < 1e-5
