"""Buckets: how they are cut, what autograd leaves in them, and what memory they share."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer.entries import entries
from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.layers.main_grad import main_grad_of
from megatron.optimizer.bucket import VECTOR, Bucket, lay_out, row_length, share_a_bucket
from megatron.optimizer.bucket_layouts import lay_out_whole
from megatron.optimizer.parameters import ParameterPart

CPU = torch.device("cpu")


def microbatches(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 8, generator=generator).to(dtype) for _ in range(3)]


def linear(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 4, dtype=dtype)


def backward_all(layer: nn.Linear, inputs: list[torch.Tensor]) -> None:
    for x_nh in inputs:
        layer(x_nh).square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_shares_the_gradient(dtype: torch.dtype) -> None:
    layer, reference = linear(dtype), linear(dtype)
    Bucket(entries(layer.named_parameters()), kernels_for(CPU, layer.weight.dtype))
    backward_all(layer, microbatches(dtype))
    backward_all(reference, microbatches(dtype))
    for ours, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert main_grad_of(ours).data_ptr() == ours.grad.data_ptr()
        assert main_grad_of(ours).dtype == dtype
        torch.testing.assert_close(main_grad_of(ours), theirs.grad, rtol=0, atol=0)


def test_bf16_sums_in_fp32_and_frees_the_bf16_gradient() -> None:
    layer = linear(torch.bfloat16)
    Bucket(entries(layer.named_parameters()), kernels_for(CPU, layer.weight.dtype))
    expected = [torch.zeros(p.shape) for p in layer.parameters()]
    for x_nh in microbatches(torch.bfloat16):
        reference = linear(torch.bfloat16)
        backward_all(reference, [x_nh])
        for total, parameter in zip(expected, reference.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad.float()
        backward_all(layer, [x_nh])
    for parameter, total in zip(layer.parameters(), expected, strict=True):
        assert parameter.grad is None
        assert main_grad_of(parameter).dtype == torch.float32
        torch.testing.assert_close(main_grad_of(parameter), total, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zero_starts_a_new_sum_in_the_same_memory(dtype: torch.dtype) -> None:
    layer = linear(dtype)
    bucket = Bucket(entries(layer.named_parameters()), kernels_for(CPU, layer.weight.dtype))
    address = main_grad_of(layer.weight).data_ptr()
    backward_all(layer, microbatches(dtype))
    first = main_grad_of(layer.weight).clone()
    bucket.gradients.zero_()
    assert main_grad_of(layer.weight).count_nonzero() == 0
    backward_all(layer, microbatches(dtype))
    torch.testing.assert_close(main_grad_of(layer.weight), first, rtol=0, atol=0)
    assert main_grad_of(layer.weight).data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_forgotten_is_overwritten_or_zero(dtype: torch.dtype) -> None:
    layer = linear(dtype)
    bucket = Bucket(entries(layer.named_parameters()), kernels_for(CPU, dtype))
    backward_all(layer, microbatches(dtype))
    first, memory = bucket.gradients.clone(), bucket.gradients
    bucket.forget_gradients()
    memory.fill_(torch.nan)
    layer.bias.requires_grad_(False)
    backward_all(layer, microbatches(dtype))
    assert bucket.gradients.data_ptr() == memory.data_ptr()
    weight, bias = bucket.gradients.split([32, 4])
    assert torch.equal(weight, first[:32])
    assert not bias.any()


SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 40)),
        st.tuples(st.integers(1, 12), st.sampled_from((3, 6, 24))),
        st.tuples(st.integers(1, 4), st.integers(1, 2), st.just(3)),
    ),
    min_size=1,
    max_size=6,
).filter(lambda shapes: share_a_bucket([row_length(shape) for shape in shapes]))


@given(shapes=SHAPES, shards=st.integers(1, 9))
def test_no_boundary_of_a_shard_cuts_a_row_or_a_vector(
    shapes: list[tuple[int, ...]], shards: int
) -> None:
    layout = lay_out(shapes, shards)
    covered = torch.zeros(layout.size, dtype=torch.int)
    for shape, start in zip(shapes, layout.starts, strict=True):
        size, row = torch.Size(shape).numel(), row_length(shape)
        covered[start : start + size] += 1
        for shard in range(1, shards):
            inside = layout.shard(shard).start - start
            assert not 0 < inside < size or inside % math.lcm(row, VECTOR) == 0
    total = sum(torch.Size(shape).numel() for shape in shapes)
    assert int(covered.max()) == 1
    assert int(covered.sum()) == total
    steps = [math.lcm(row_length(shape), VECTOR) for shape in shapes]
    assert layout.size - total < (shards * max(steps) + sum(steps) if shards > 1 else 1)


def test_nothing_is_padded_where_all_sizes_are_multiples_of_a_vector() -> None:
    shapes = [(48, 16), (48,), (16, 16), (16,), (64, 16), (64,)]
    assert lay_out(shapes, 2).size == sum(torch.Size(shape).numel() for shape in shapes)


def test_the_padding_of_a_usual_model_is_below_three_percent() -> None:
    h = 4096
    layer = [(3 * h, h), (3 * h,), (h, h), (h,), (4 * h, h), (4 * h,), (h, 4 * h), (h,)]
    layout = lay_out(layer, shards=64)
    assert layout.size < 1.03 * sum(torch.Size(shape).numel() for shape in layer)


@settings(deadline=None)
@given(
    shapes=SHAPES,
    shards=st.integers(1, 5),
    together=st.booleans(),
    bf16=st.booleans(),
    whole=st.booleans(),
)
def test_the_shards_hold_every_element_once(
    shapes: list[tuple[int, ...]], shards: int, together: bool, bf16: bool, whole: bool
) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float32
    parameters = {f"p{i}": nn.Parameter(torch.rand(s).to(dtype)) for i, s in enumerate(shapes)}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    layout = lay_out_whole(shapes, [0] * shards) if whole else lay_out(shapes, shards)
    bucket = Bucket(entries(parameters.items()), kernels_for(CPU, dtype), layout, together=together)
    assert all(torch.equal(parameters[name].detach(), before[name]) for name in before)
    for shard in range(shards):
        for part in bucket.parts(shard):
            assert part.weight.shape == part.gradient.shape
            assert not whole or part.weight.shape == parameters[part.name].shape
            for piece in part.pieces:
                there = part.weight[piece.local.slices]
                assert torch.equal(there, before[part.name][piece.box.slices])
            part.weight.zero_()
            part.gradient.add_(1)
    assert not any(parameter.detach().any() for parameter in parameters.values())
    assert all((main_grad_of(parameter) == 1).all() for parameter in parameters.values())
    if bucket.values is not None:
        assert bucket.values.numel() == bucket.gradients.numel()


def test_a_whole_parameter_is_one_part() -> None:
    parameter = nn.Parameter(torch.rand(5, 2))
    [entry] = entries([("weight", parameter)])
    Bucket([entry], kernels_for(CPU, parameter.dtype))
    part = ParameterPart.whole(entry)
    assert part.weight.data_ptr() == parameter.data_ptr()
    assert part.pieces == entry.pieces


def test_rows_that_do_not_fit_together_are_an_error() -> None:
    with pytest.raises(AssertionError, match=r"rows of \[4, 6\] elements"):
        lay_out([(2, 4), (2, 6)], shards=2)
