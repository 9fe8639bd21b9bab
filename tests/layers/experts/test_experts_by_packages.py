"""Mixtures whose slots a package multiplies compute the same as a loop over the experts."""

from collections.abc import Callable

import pytest
import torch
from harness.mixtures import mixture
from kernels.grouped_stand_ins import installed
from torch import Tensor

from megatron.kernels.cuda.grouped_packages import PackageName, load_grouped_package
from megatron.kernels.grouped import GroupedKernels, product_by_group, weight_product_by_group
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.main_grad import main_grad_of
from megatron.layers.recompute import NO_RECOMPUTATION, Part, Recomputation
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.model.ownership import owned_by
from megatron.optimizer.bucket import Bucket

CPU, KERNELS = torch.device("cpu"), ReferenceKernels()


class Loop:
    """The specification: group by group; gradients are added in fp32.

    Args:
        rounds: gradients are rounded before they are added.
    """

    def __init__(self, *, rounds: bool) -> None:
        self._rounds = rounds

    def grouped_product(self, x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
        return product_by_group(x_si, weight_gio, ends_g)

    def grouped_weight_product(self, grad_so: Tensor, x_si: Tensor, ends_g: Tensor) -> Tensor:
        return weight_product_by_group(grad_so, x_si, ends_g)

    def accumulate_grouped_product_(
        self, total_goi: Tensor, grad_so: Tensor, x_si: Tensor, ends_g: Tensor, *, begins: bool
    ) -> None:
        factors = (grad_so, x_si) if self._rounds else (grad_so.float(), x_si.float())
        product_goi = weight_product_by_group(*factors, ends_g)
        total_goi.copy_(product_goi if begins else total_goi + product_goi)


def trained(
    multiplies: GroupedKernels, part: Part | None = None, *, splits: bool = False
) -> list[Tensor]:
    """Return outputs and gradients of two microbatches of a mixture, of 16 tokens and of one."""
    recomputation = NO_RECOMPUTATION if part is None else Recomputation(frozenset((part,)))
    site = Site(
        CPU,
        torch.bfloat16,
        given_kernels=KERNELS,
        recomputation=recomputation,
        grouped_package=multiplies,
    )
    made = mixture(4, 2, moe_ffn_hidden_size=16).layer(8, site, bias=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=generator)
    Bucket(list(owned_by(made, "x.")), KERNELS)
    work: list[Callable[[], None]] = []
    defer_weight_gradients(made, work.append if splits else None)
    found = []
    for tokens in (16, 1):
        x_buh = torch.randn(1, tokens, 8, generator=generator).bfloat16().requires_grad_()
        y_buh = made(x_buh)
        y_buh.float().square().sum().backward()
        while work:
            work.pop(0)()
        assert x_buh.grad is not None
        found += [y_buh.detach(), x_buh.grad]
    return [*found, *(main_grad_of(each).clone() for each in made.parameters())]


@pytest.mark.parametrize("part", [None, "moe", "moe_act"])
@pytest.mark.parametrize(
    ("name", "rounds"), [("transformer_engine", False), ("grouped_gemm", True)]
)
def test_packages_change_no_bit(name: PackageName, rounds: bool, part: Part | None) -> None:
    """With one token, two of the four experts have none."""
    wanted = trained(Loop(rounds=rounds))
    with installed() as calls:
        for splits in (False, True):
            found = trained(load_grouped_package(name), part, splits=splits)
            assert all(map(torch.equal, found, wanted))
    forwards = 2 if part != "moe" else 3
    assert len(calls) == 2 * 2 * (forwards + 4), "two microbatches, split and not"
