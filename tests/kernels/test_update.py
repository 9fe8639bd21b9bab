"""What ``Kernels`` promises of sums of squares and of AdamW, of every implementation.

Exact are the formulas of arXiv 1711.05101 in float64, from the tensors as they were.
"""

from dataclasses import replace

import pytest
import torch
from kernels.implementations import HALF_UNIT, IMPLEMENTATIONS, Implementation
from torch import Tensor

from megatron.kernels.adamw import AdamWStep, AdamWTensors
from megatron.kernels.cuda import update_operators

EACH_IMPLEMENTATION = pytest.mark.parametrize("tried", IMPLEMENTATIONS, ids=str)

SHAPES = [(3,), (1,), (37, 5), (1024,), (5, 211)]
NARROW = [
    pytest.param(torch.float32, torch.bfloat16, torch.float32, id="first moment"),
    pytest.param(torch.bfloat16, torch.float32, torch.bfloat16, id="gradient, second moment"),
    pytest.param(torch.bfloat16, torch.bfloat16, torch.bfloat16, id="all"),
]
STEP = AdamWStep(
    divisors=(),
    keeps_quotients=False,
    lr=0.1,
    vocabulary_lr=0.03,
    weight_decay=0.3,
    betas=(0.9, 0.95),
    epsilon=1e-3,
    number=3,
)


def drawn(tried: Implementation, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Tensors side by side in one, not all of which begin where 16 bytes do."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    flat = tried.statistic(sum(sizes), seed=seed).to(dtype)
    return [part.view(shape) for part, shape in zip(flat.split(sizes), SHAPES, strict=True)]


def tensors_of(
    tried: Implementation, gradient: torch.dtype, moment: torch.dtype, square: torch.dtype
) -> AdamWTensors:
    wide = tried.statistics
    rounds = tried.dtype != wide
    return AdamWTensors(
        gradients=drawn(tried, gradient, 0),
        masters=drawn(tried, wide, 1),
        moments=drawn(tried, moment, 2),
        squares=[each.square_() for each in drawn(tried, square, 3)],
        weights=drawn(tried, tried.dtype, 4) if rounds else [],
        decays=[True, False, True, False, True],
        in_vocabulary=[False, False, True, True, False],
    )


def assert_taken(tried: Implementation, tensors: AdamWTensors, step: AdamWStep) -> None:
    """Take the step, and compare all that it writes."""
    before = [
        [t.double().clone() for t in column]
        for column in (tensors.gradients, tensors.masters, tensors.moments, tensors.squares)
    ]
    kept = [t.clone() for t in tensors.gradients]
    tried.kernels.adamw_(tensors, step)
    beta1, beta2 = step.betas
    for index, (gradient, master, moment, square) in enumerate(zip(*before, strict=True)):
        quotient = gradient / (step.both_divisors[0] * step.both_divisors[1])
        lr = step.vocabulary_lr if tensors.in_vocabulary[index] else step.lr
        decay = step.weight_decay if tensors.decays[index] else 0.0
        moment = beta1 * moment + (1 - beta1) * quotient
        square = beta2 * square + (1 - beta2) * quotient**2
        root = (square / (1 - beta2**step.number)).sqrt() + step.epsilon
        master = master * (1 - lr * decay) - lr * moment / (1 - beta1**step.number) / root
        narrow = tensors.gradients[index].dtype
        loose = 0.0 if narrow == tried.statistics else 0.02  # the quotients are rounded, once each
        for own, exact in (
            (tensors.masters[index], master),
            (tensors.moments[index], moment),
            (tensors.squares[index], square),
        ):
            unit = 2 * HALF_UNIT if own.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(own.double(), exact, rtol=unit + loose, atol=1e-5 + loose)
        if step.keeps_quotients:
            torch.testing.assert_close(
                tensors.gradients[index].double(), quotient, rtol=1e-6 + loose, atol=0
            )
        else:
            assert torch.equal(tensors.gradients[index], kept[index])
        if tensors.weights:
            unit = 2 * HALF_UNIT if tried.cuts_off else 0.0
            torch.testing.assert_close(
                tensors.weights[index],
                tensors.masters[index].to(tried.dtype),
                rtol=unit,
                atol=0,
            )


@EACH_IMPLEMENTATION
@pytest.mark.parametrize("divisors", [(), (4.0,), (3.0, 0.7)], ids=str)
@pytest.mark.parametrize("keeps", [False, True], ids=["left", "scaled"])
def test_a_step_of_adamw(tried: Implementation, divisors: tuple[float, ...], keeps: bool) -> None:
    wide = tried.statistics
    step = replace(STEP, divisors=divisors, keeps_quotients=keeps)
    assert_taken(tried, tensors_of(tried, wide, wide, wide), step)


@EACH_IMPLEMENTATION
@pytest.mark.parametrize(("gradient", "moment", "square"), NARROW)
def test_narrow_gradients_and_moments(
    tried: Implementation, gradient: torch.dtype, moment: torch.dtype, square: torch.dtype
) -> None:
    step = replace(STEP, divisors=(3.0, 0.7), keeps_quotients=True)
    assert_taken(tried, tensors_of(tried, gradient, moment, square), step)


@EACH_IMPLEMENTATION
def test_two_divisions_at_once_are_those_of_two_steps(tried: Implementation) -> None:
    """So that a step that was taken on a guess, undone and taken again has the same bits."""
    at_once, again = (tensors_of(tried, *[tried.statistics] * 3) for _ in range(2))
    tried.kernels.adamw_(at_once, replace(STEP, divisors=(3.0, 0.7)))
    masters, moments, squares = (
        [t.clone() for t in column] for column in (again.masters, again.moments, again.squares)
    )
    tried.kernels.adamw_(again, replace(STEP, divisors=(3.0,), keeps_quotients=True))
    undone = replace(again, masters=masters, moments=moments, squares=squares)
    tried.kernels.adamw_(undone, replace(STEP, divisors=(0.7,)))
    for own, expected in zip(undone.masters, at_once.masters, strict=True):
        assert torch.equal(own, expected)


@EACH_IMPLEMENTATION
def test_a_sum_of_squares(tried: Implementation) -> None:
    tensors = [1e-3 * t for t in drawn(tried, tried.dtype, 0)]
    expected = torch.stack([t.double().square().sum() for t in tensors]).sum()
    total = tried.kernels.sum_of_squares(tensors)
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)


@EACH_IMPLEMENTATION
@pytest.mark.parametrize("size", [4096, 8192 + 3])
def test_a_sum_of_squares_of_many_elements(tried: Implementation, size: int) -> None:
    """A GPU's program reads whole blocks of a tensor otherwise than its last block."""
    tensors = [1e-3 * tried.activation(size), 1e-3 * tried.activation(size, seed=1)]
    expected = torch.stack([t.double().square().sum() for t in tensors]).sum()
    torch.testing.assert_close(tried.kernels.sum_of_squares(tensors), expected, rtol=5e-6, atol=0)


@EACH_IMPLEMENTATION
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_element_reaches_the_sum(tried: Implementation, bad: float) -> None:
    tensors = drawn(tried, tried.dtype, 0)
    tensors[2][7, 1] = bad
    assert not torch.isfinite(tried.kernels.sum_of_squares(tensors))


def test_a_table_has_the_tensor_of_every_block_in_4_bytes() -> None:
    """Tensors of equal sizes share it, whatever their addresses."""
    sizes = 3, 600, 512, 1025
    gradients, masters = ([torch.ones(size) for size in sizes] for _ in range(2))
    kinds, device = (0,) * len(sizes), torch.device("cpu")
    (table_tc, tensor_k), (_, again_k) = (
        update_operators._tables(update_operators._rows(*columns), kinds, 512, device)
        for columns in ((gradients, masters), (masters,))
    )
    assert again_k is tensor_k
    assert tensor_k.dtype == torch.int32
    assert tensor_k.tolist() == [0, 1, 1, 2, 3, 3, 3]
    assert [row[7] for row in table_tc.tolist()] == [0, 1, 3, 4]
