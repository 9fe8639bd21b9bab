"""Any part may leave weight gradients for W: it says so, and buckets and passes believe it."""

from collections.abc import Callable

import pytest
import torch
from model.mixture import Mixture
from model.shared_stage import GPT, MIDDLE
from optimizer.entries import entries
from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.layers.main_grad import main_grad_of
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients, deferring_parts
from megatron.model.stage import RankModel
from megatron.model.transformer_layer import TransformerLayer
from megatron.optimizer.bucket import Bucket
from megatron.runtime.buckets import touches
from megatron.schedules.make_plan import make_plan

CPU = torch.device("cpu")
SIZE = 6


def mixture() -> Mixture:
    part = Mixture(SIZE, Site(CPU, torch.float64))
    generator = torch.Generator().manual_seed(1)
    for parameter in part.parameters():
        nn.init.normal_(parameter, generator=generator)
    return part


def test_a_part_that_says_so_leaves_its_product_for_later() -> None:
    split, plain = mixture(), mixture()
    Bucket(entries(split.named_parameters()), kernels_for(CPU, torch.float64))
    later: list[Callable[[], None]] = []
    defer_weight_gradients(split, later.append)
    x = torch.randn(2, 5, SIZE, dtype=torch.float64)
    for part in (split, plain):
        part(x).square().sum().backward()
    assert not main_grad_of(split.weight).any(), "its gradient waits"
    [work] = later
    work()
    for own, other in zip(split.parameters(), plain.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(main_grad_of(own), other.grad)


def test_a_part_without_the_protocol_is_left_alone() -> None:
    plain, part = nn.Linear(3, 3), mixture()
    assert list(deferring_parts(nn.ModuleList((plain, part)))) == [part]
    defer_weight_gradients(plain, lambda work: pytest.fail("it never defers"))
    plain(torch.ones(3)).sum().backward()
    assert plain.weight.grad is not None


@pytest.mark.parametrize(("schedule", "products"), [("1f1b", "B"), ("zb-h1", "W")])
def test_buckets_wait_for_the_pass_that_forms_a_gradient(schedule: str, products: str) -> None:
    model = RankModel(GPT, MIDDLE, Site(CPU, torch.float32))
    layer = model.chunks[0].get_submodule("0")
    assert isinstance(layer, TransformerLayer)
    part = layer.mlp = Mixture(GPT.hidden_size, Site(CPU, torch.float32))
    touched = touches(model, make_plan(schedule, "none", 1, 2))
    assert touched[id(part.weight)] == {(products, 0)}
    assert touched[id(part.router.weight)] == {("B", 0)}
    assert touched[id(layer.input_layernorm.weight)] == {("B", 0)}
