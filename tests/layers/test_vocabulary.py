"""S and T over any shards equal autograd on the whole matrix; the shards here share one process.

Shapes: n tokens, h hidden size, v vocabulary entries, t rows of a tile.
"""

import itertools
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from hypothesis import example, given
from torch import Tensor

from megatron.layers.kernels import Kernels, TorchKernels, make_kernels
from megatron.layers.shard import VocabularyShard
from megatron.layers.vocabulary import (
    LossOptions,
    Merged,
    ShardState,
    WeightGradientPart,
    add_weight_gradient,
    input_gradient_from_s,
    input_gradient_in_t,
    merge_statistics,
    output_s,
    statistics_dtype,
    subtract_target_gradient,
    tile_factors,
    tile_heights,
    token_losses,
)


@dataclass(frozen=True)
class Problem:
    """Inputs of an output layer.

    Attributes:
        x_nh: input.
        weight_vh: the whole matrix.
        targets_n: target ids.
        weight_n: weight of every token's loss, in the dtype of statistics.
        options: form of the loss.
    """

    x_nh: Tensor
    weight_vh: Tensor
    targets_n: Tensor
    weight_n: Tensor
    options: LossOptions

    def to(self, dtype: torch.dtype) -> "Problem":
        return Problem(
            self.x_nh.to(dtype),
            self.weight_vh.to(dtype),
            self.targets_n,
            self.weight_n.to(statistics_dtype(dtype)),
            self.options,
        )


@dataclass(frozen=True)
class Answer:
    """Loss of every token and the gradients of their weighted sum."""

    losses_n: Tensor
    x_gradient_nh: Tensor
    weight_gradient_vh: Tensor


def draw(
    n: int, h: int, v: int, options: LossOptions, magnitude: float = 1.0, seed: int = 0
) -> Problem:
    """A float64 problem whose logits are around ``magnitude``, with some tokens masked out."""
    generator = torch.Generator().manual_seed(seed)
    x_nh = torch.randn(n, h, generator=generator, dtype=torch.float64) * magnitude / h**0.5
    weight_vh = torch.randn(v, h, generator=generator, dtype=torch.float64)
    targets_n = torch.randint(v, (n,), generator=generator)
    weight_n = torch.rand(n, generator=generator, dtype=torch.float64) / n
    weight_n[torch.rand(n, generator=generator) < 0.2] = 0
    return Problem(x_nh, weight_vh, targets_n, weight_n, options)


def by_autograd(problem: Problem) -> Answer:
    """The textbook's way: capped logits in the problem's dtype, their loss in fp32 or better."""
    options = problem.options
    x_nh = problem.x_nh.detach().requires_grad_()
    weight_vh = problem.weight_vh.detach().requires_grad_()
    logits_nv = x_nh @ weight_vh.T
    if options.logit_softcap:
        logits_nv = options.logit_softcap * torch.tanh(logits_nv / options.logit_softcap)
    logits_nv = logits_nv.to(problem.weight_n.dtype)
    losses_n = F.cross_entropy(
        logits_nv,
        problem.targets_n,
        reduction="none",
        label_smoothing=options.label_smoothing,
    )
    losses_n = losses_n + options.z_loss_coeff * torch.logsumexp(logits_nv, dim=1).square()
    gradients = torch.autograd.grad((losses_n * problem.weight_n).sum(), (x_nh, weight_vh))
    return Answer(losses_n.detach(), *gradients)


def by_shards(
    problem: Problem,
    shards: int,
    barriers: int,
    tile_rows: int,
    kernels: Kernels | None = None,
) -> Answer:
    """The paper's way: S on every shard, C1, T on every shard, with C2 for two barriers."""
    kernels = kernels or TorchKernels()
    v, options = len(problem.weight_vh), problem.options
    padded = -(-v // shards) * shards
    parts = [VocabularyShard.of(v, padded, index, shards) for index in range(shards)]
    weights = [problem.weight_vh[p.first_row : p.first_row + p.real_rows] for p in parts]
    states = [
        output_s(
            problem.x_nh,
            weight_vh,
            problem.targets_n,
            part.first_row,
            options,
            [
                problem.x_nh.new_empty(height, len(problem.x_nh))
                for height in tile_heights(part.real_rows, tile_rows)
            ],
            form_gradient=barriers == 1,
            kernels=kernels,
        )
        for part, weight_vh in zip(parts, weights, strict=True)
    ]
    merged = merge_statistics(torch.stack([state.statistics_4n for state in states]))
    x_gradients = [
        input_gradient_from_s(state, merged, problem.weight_n, options)
        if barriers == 1
        else input_gradient_in_t(state, weight_vh, merged, problem.weight_n, options, kernels)
        for state, weight_vh in zip(states, weights, strict=True)
    ]
    weight_gradients = [
        weight_gradient(state, weight_vh, merged, problem, kernels)
        for state, weight_vh in zip(states, weights, strict=True)
    ]
    return Answer(
        token_losses(merged, options),
        torch.stack(x_gradients).sum(0),
        torch.cat(weight_gradients),
    )


def weight_gradient(
    state: ShardState, weight_vh: Tensor, merged: Merged, problem: Problem, kernels: Kernels
) -> Tensor:
    """What T adds to a gradient of zero."""
    gradient_vh = torch.zeros_like(weight_vh, dtype=problem.weight_n.dtype)
    subtract_target_gradient(gradient_vh, state, problem.weight_n, problem.options)
    factor_kn = tile_factors(state, merged, problem.weight_n, problem.options)
    part = WeightGradientPart(state.exp_tiles, state.x_nh, factor_kn)
    add_weight_gradient(gradient_vh, [part], kernels)
    return gradient_vh


def error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to the norm of what is expected."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def assert_equal(actual: Answer, expected: Answer, tolerance: float) -> None:
    assert error(actual.losses_n, expected.losses_n) < tolerance
    assert error(actual.x_gradient_nh, expected.x_gradient_nh) < tolerance
    assert error(actual.weight_gradient_vh, expected.weight_gradient_vh) < tolerance


LOSSES = list(itertools.product([0.0, 0.1], [0.0, 1e-2], [0.0, 2.0]))


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("losses", LOSSES, ids=lambda x: "smoothing {}, z {}, cap {}".format(*x))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str
)
def test_every_form_of_the_loss(
    losses: tuple[float, float, float],
    shards: int,
    barriers: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    problem = draw(13, 8, 29, LossOptions(29, *losses))
    answer = by_shards(problem.to(dtype), shards, barriers, tile_rows=3)
    assert_equal(answer, by_autograd(problem), tolerance)


@given(
    n=st.integers(1, 9),
    h=st.integers(1, 6),
    v=st.integers(2, 40),
    shards=st.integers(1, 6),
    barriers=st.sampled_from([1, 2]),
    tile_rows=st.integers(1, 50),
    losses=st.sampled_from(LOSSES),
    magnitude=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
@example(3, 4, 2, 6, 1, 1, LOSSES[-1], 1.0, 0)  # most shards are padding only
@example(3, 4, 2, 6, 2, 1, LOSSES[-1], 1.0, 0)
def test_every_shape_of_shards_and_tiles(
    n: int,
    h: int,
    v: int,
    shards: int,
    barriers: int,
    tile_rows: int,
    losses: tuple[float, float, float],
    magnitude: float,
    seed: int,
) -> None:
    problem = draw(n, h, v, LossOptions(v, *losses), magnitude, seed)
    if not problem.weight_n.any():
        problem.weight_n[0] = 1
    expected, answer = by_autograd(problem), by_shards(problem, shards, barriers, tile_rows)
    # A certain token's gradient is the difference of two near-equal vectors: errors are measured
    # against what is subtracted.
    size = max(1.0, float(problem.x_nh.norm()))
    torch.testing.assert_close(answer.losses_n, expected.losses_n, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(answer.x_gradient_nh, expected.x_gradient_nh, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        answer.weight_gradient_vh, expected.weight_gradient_vh, rtol=1e-10, atol=1e-10 * size
    )


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("magnitude", [1e3, 1e5])
@pytest.mark.parametrize("losses", [LOSSES[0], LOSSES[2], LOSSES[5]])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=str
)
def test_large_logits_do_not_overflow(
    losses: tuple[float, float, float],
    magnitude: float,
    barriers: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Exp of such logits is infinite in fp32; only differences to the maximum may be taken."""
    problem = draw(17, 8, 37, LossOptions(37, *losses), magnitude).to(dtype)
    # Rounding a logit of 1e5 to fp32 shifts its softmax: the reference starts from fp32, too.
    expected = by_autograd(problem)
    answer = by_shards(problem, 4, barriers, tile_rows=4)
    assert answer.losses_n.isfinite().all()
    assert_equal(answer, expected, tolerance if magnitude < 1e4 else tolerance * 300)


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_maximum_in_any_tile(order: str, barriers: int) -> None:
    """Each tile's exponentials are relative to another maximum when logits keep rising."""
    problem = draw(5, 6, 32, LossOptions(32, 0.1))
    column = torch.linspace(-40, 40, 32, dtype=torch.float64)
    problem.weight_vh[:, 0] = column if order == "ascending" else -column
    problem.x_nh[:, 0] = 1
    assert_equal(by_shards(problem, 2, barriers, tile_rows=2), by_autograd(problem), 1e-10)


def test_shards_and_tiles_change_nothing_but_rounding() -> None:
    problem = draw(7, 8, 50, LossOptions(50, 0.1, 1e-2))
    first = by_shards(problem, 1, 1, tile_rows=50)
    for shards, barriers, rows in itertools.product((2, 3, 5), (1, 2), (1, 7)):
        assert_equal(by_shards(problem, shards, barriers, rows), first, 1e-13)


def bf16_kernels() -> list[Kernels]:
    """PyTorch's, and the compiled ones where a compiler is at hand (else the same twice)."""
    return [TorchKernels(), make_kernels(torch.device("cpu"), torch.bfloat16)]


@pytest.mark.parametrize("kernels", bf16_kernels(), ids=lambda kernels: type(kernels).__name__)
@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("losses", LOSSES, ids=lambda x: "smoothing {}, z {}, cap {}".format(*x))
def test_bf16_is_as_exact_as_a_plain_implementation(
    losses: tuple[float, float, float], barriers: int, kernels: Kernels
) -> None:
    problem = draw(150, 64, 1000, LossOptions(1000, *losses), magnitude=3.0).to(torch.bfloat16)
    exact = by_autograd(problem.to(torch.float64))
    plain = by_autograd(problem)
    answer = by_shards(problem, 4, barriers, tile_rows=100, kernels=kernels)
    for name in ("losses_n", "x_gradient_nh", "weight_gradient_vh"):
        own, usual = (error(getattr(a, name), getattr(exact, name)) for a in (answer, plain))
        assert own < 1.5 * usual, f"{name}: {own} where a plain implementation has {usual}"


@pytest.mark.parametrize("kernels", bf16_kernels(), ids=lambda kernels: type(kernels).__name__)
def test_bf16_loss_of_a_certain_token_is_not_negative(kernels: Kernels) -> None:
    """The target's logit and the maximum must be rounded alike, or their difference is noise."""
    problem = draw(300, 64, 500, LossOptions(500))
    x_nh = 3 * problem.weight_vh[problem.targets_n]
    certain = Problem(
        x_nh, problem.weight_vh, problem.targets_n, problem.weight_n, problem.options
    ).to(torch.bfloat16)
    losses_n = by_shards(certain, 2, 1, tile_rows=100, kernels=kernels).losses_n
    assert float(losses_n.min()) >= 0
    assert float(losses_n.max()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_in_one_shard_reaches_the_loss(dtype: torch.dtype) -> None:
    problem = draw(6, 8, 20, LossOptions(20)).to(dtype)
    problem.weight_vh[13] = torch.nan
    kernels = make_kernels(torch.device("cpu"), dtype)
    assert by_shards(problem, 4, 1, tile_rows=3, kernels=kernels).losses_n.isnan().all()


@given(rows=st.integers(0, 10_000), at_most=st.integers(1, 3000))
def test_tiles_are_nearly_equal_and_as_few_as_can_be(rows: int, at_most: int) -> None:
    heights = tile_heights(rows, at_most)
    assert sum(heights) == rows
    assert len(heights) == -(-rows // at_most)
    assert max(heights, default=0) <= at_most
    assert max(heights, default=0) - min(heights, default=0) <= 1


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA: the kernels there are others"
)
@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "factor"),
    [(torch.float64, 0.0), (torch.float32, 0.0), (torch.bfloat16, 1.5)],
    ids=str,
)
def test_shards_on_cuda(dtype: torch.dtype, factor: float, barriers: int) -> None:
    """To 1e-10 and 1e-5 of float64; in bf16 as exact as a plain implementation on the device."""
    drawn = draw(150, 64, 1000, LossOptions(1000, 0.1, 1e-2, 2.0), magnitude=3.0).to(dtype)
    moved = [t.cuda() for t in (drawn.x_nh, drawn.weight_vh, drawn.targets_n, drawn.weight_n)]
    problem = Problem(*moved, drawn.options)
    exact, plain = by_autograd(problem.to(torch.float64)), by_autograd(problem)
    answer = by_shards(problem, 4, barriers, 100, kernels=make_kernels(problem.x_nh.device, dtype))
    for name in ("losses_n", "x_gradient_nh", "weight_gradient_vh"):
        own, usual = (error(getattr(a, name), getattr(exact, name)) for a in (answer, plain))
        assert own < max(factor * usual, 1e-10 if dtype == torch.float64 else 1e-5)
