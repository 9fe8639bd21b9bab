"""S, E and T over any shards equal autograd on the whole matrix; the shards share one process."""

import itertools
from operator import attrgetter

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from layers.vocabulary.sharded_output import (
    ALGORITHM_1,
    ALGORITHM_2,
    NAIVE,
    Problem,
    assert_equal,
    by_autograd,
    by_shards,
    draw,
    error,
)

from megatron.kernels.choose import kernels_for
from megatron.kernels.cuda.kernels import CudaKernels
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.softmax import LossOptions
from megatron.kernels.tiled.output_s import tile_heights
from megatron.schedules.treatments import Treatment

LOSSES = list(itertools.product([0.0, 0.1], [0.0, 1e-2], [0.0, 2.0]))


@pytest.mark.parametrize("treatment", [ALGORITHM_2, ALGORITHM_1, NAIVE], ids=attrgetter("name"))
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("losses", LOSSES, ids=lambda x: "smoothing {}, z {}, cap {}".format(*x))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str
)
def test_every_form_of_the_loss(
    losses: tuple[float, float, float],
    shards: int,
    treatment: Treatment,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    problem = draw(13, 8, 29, LossOptions(29, *losses))
    answer = by_shards(problem.to(dtype), shards, treatment, tile_rows=3)
    assert_equal(answer, by_autograd(problem), tolerance)


@given(
    n=st.integers(1, 9),
    h=st.integers(1, 6),
    v=st.integers(2, 40),
    shards=st.integers(1, 6),
    treatment=st.sampled_from([ALGORITHM_2, ALGORITHM_1, NAIVE]),
    tile_rows=st.integers(1, 50),
    losses=st.sampled_from(LOSSES),
    magnitude=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
    recompute=st.booleans(),
)
@example(3, 4, 2, 6, ALGORITHM_2, 1, LOSSES[-1], 1.0, 0, False)  # most shards are padding only
@example(3, 4, 2, 6, ALGORITHM_1, 1, LOSSES[-1], 1.0, 0, False)
@example(3, 4, 2, 6, NAIVE, 1, LOSSES[-1], 1.0, 0, False)
@example(3, 4, 2, 6, ALGORITHM_2, 1, LOSSES[-1], 1.0, 0, True)
@example(3, 4, 2, 6, ALGORITHM_1, 1, LOSSES[-1], 1.0, 0, True)
@example(3, 4, 2, 6, NAIVE, 1, LOSSES[-1], 1.0, 0, True)
def test_every_shape_of_shards_and_tiles(
    n: int,
    h: int,
    v: int,
    shards: int,
    treatment: Treatment,
    tile_rows: int,
    losses: tuple[float, float, float],
    magnitude: float,
    seed: int,
    recompute: bool,
) -> None:
    problem = draw(n, h, v, LossOptions(v, *losses), magnitude, seed)
    if not problem.weight_n.any():
        problem.weight_n[0] = 1
    expected = by_autograd(problem)
    answer = by_shards(problem, shards, treatment, tile_rows, recompute=recompute)
    # A certain token's gradient is the difference of two near-equal vectors: errors are measured
    # against what is subtracted.
    size = max(1.0, float(problem.x_nh.norm()))
    torch.testing.assert_close(answer.losses_n, expected.losses_n, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(answer.x_gradient_nh, expected.x_gradient_nh, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        answer.weight_gradient_vh, expected.weight_gradient_vh, rtol=1e-10, atol=1e-10 * size
    )


@pytest.mark.parametrize("treatment", [ALGORITHM_2, ALGORITHM_1, NAIVE], ids=attrgetter("name"))
@pytest.mark.parametrize("magnitude", [1e3, 1e5])
@pytest.mark.parametrize("losses", [LOSSES[0], LOSSES[2], LOSSES[5]])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=str
)
def test_large_logits_do_not_overflow(
    losses: tuple[float, float, float],
    magnitude: float,
    treatment: Treatment,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Exp of such logits is infinite in fp32; only differences to the maximum may be taken."""
    problem = draw(17, 8, 37, LossOptions(37, *losses), magnitude).to(dtype)
    # Rounding a logit of 1e5 to fp32 shifts its softmax: the reference starts from fp32, too.
    expected = by_autograd(problem)
    answer = by_shards(problem, 4, treatment, tile_rows=4)
    assert answer.losses_n.isfinite().all()
    assert_equal(answer, expected, tolerance if magnitude < 1e4 else tolerance * 300)


@pytest.mark.parametrize("treatment", [ALGORITHM_2, ALGORITHM_1, NAIVE], ids=attrgetter("name"))
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_maximum_in_any_tile(order: str, treatment: Treatment) -> None:
    """Each tile's exponentials are relative to another maximum when logits keep rising."""
    problem = draw(5, 6, 32, LossOptions(32, 0.1))
    column = torch.linspace(-40, 40, 32, dtype=torch.float64)
    problem.weight_vh[:, 0] = column if order == "ascending" else -column
    problem.x_nh[:, 0] = 1
    assert_equal(by_shards(problem, 2, treatment, tile_rows=2), by_autograd(problem), 1e-10)


def test_shards_and_tiles_change_nothing_but_rounding() -> None:
    problem = draw(7, 8, 50, LossOptions(50, 0.1, 1e-2))
    first = by_shards(problem, 1, ALGORITHM_2, tile_rows=50)
    treatments = (ALGORITHM_2, ALGORITHM_1, NAIVE)
    for shards, treatment, rows in itertools.product((2, 3, 5), treatments, (1, 7)):
        assert_equal(by_shards(problem, shards, treatment, rows), first, 1e-13)


def bf16_kernels() -> list[Kernels]:
    """PyTorch's, and the compiled ones where a compiler is at hand (else the same twice)."""
    return [ReferenceKernels(), kernels_for(torch.device("cpu"), torch.bfloat16)]


@pytest.mark.parametrize("kernels", bf16_kernels(), ids=lambda kernels: type(kernels).__name__)
@pytest.mark.parametrize("treatment", [ALGORITHM_2, ALGORITHM_1, NAIVE], ids=attrgetter("name"))
@pytest.mark.parametrize("losses", LOSSES, ids=lambda x: "smoothing {}, z {}, cap {}".format(*x))
def test_bf16_is_as_exact_as_a_plain_implementation(
    losses: tuple[float, float, float], treatment: Treatment, kernels: Kernels
) -> None:
    problem = draw(150, 64, 1000, LossOptions(1000, *losses), magnitude=3.0).to(torch.bfloat16)
    exact = by_autograd(problem.to(torch.float64))
    plain = by_autograd(problem)
    answer = by_shards(problem, 4, treatment, tile_rows=100, kernels=kernels)
    for name in ("losses_n", "x_gradient_nh", "weight_gradient_vh"):
        own, usual = (error(getattr(a, name), getattr(exact, name)) for a in (answer, plain))
        assert own < 1.5 * usual, f"{name}: {own} where a plain implementation has {usual}"


@pytest.mark.parametrize("kernels", bf16_kernels(), ids=lambda kernels: type(kernels).__name__)
@pytest.mark.parametrize("treatment", [ALGORITHM_1, NAIVE], ids=attrgetter("name"))
def test_bf16_loss_of_a_certain_token_is_not_negative(
    treatment: Treatment, kernels: Kernels
) -> None:
    """The target's logit and the maximum must be rounded alike, or their difference is noise."""
    problem = draw(300, 64, 500, LossOptions(500))
    x_nh = 3 * problem.weight_vh[problem.targets_n]
    certain = Problem(
        x_nh, problem.weight_vh, problem.targets_n, problem.weight_n, problem.options
    ).to(torch.bfloat16)
    losses_n = by_shards(certain, 2, treatment, tile_rows=100, kernels=kernels).losses_n
    assert float(losses_n.min()) >= 0
    assert float(losses_n.max()) < 1e-6


@pytest.mark.parametrize("treatment", [ALGORITHM_1, NAIVE], ids=attrgetter("name"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_in_one_shard_reaches_the_loss(dtype: torch.dtype, treatment: Treatment) -> None:
    problem = draw(6, 8, 20, LossOptions(20)).to(dtype)
    problem.weight_vh[13] = torch.nan
    kernels = kernels_for(torch.device("cpu"), dtype)
    assert by_shards(problem, 4, treatment, tile_rows=3, kernels=kernels).losses_n.isnan().all()


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
@pytest.mark.parametrize("treatment", [ALGORITHM_2, ALGORITHM_1, NAIVE], ids=attrgetter("name"))
@pytest.mark.parametrize(
    ("dtype", "factor"),
    [(torch.float64, 0.0), (torch.float32, 0.0), (torch.bfloat16, 1.5)],
    ids=str,
)
def test_shards_on_cuda(dtype: torch.dtype, factor: float, treatment: Treatment) -> None:
    """To 1e-10 and 1e-5 of float64; in bf16 as exact as a plain implementation on the device."""
    drawn = draw(150, 64, 1000, LossOptions(1000, 0.1, 1e-2, 2.0), magnitude=3.0).to(dtype)
    drawn_tensors = (drawn.x_nh, drawn.weight_vh, drawn.targets_n, drawn.weight_n)
    x_nh, weight_vh, targets_n, weight_n = (t.cuda() for t in drawn_tensors)
    problem = Problem(x_nh, weight_vh, targets_n, weight_n, drawn.options)
    exact, plain = by_autograd(problem.to(torch.float64)), by_autograd(problem)
    kernels = kernels_for(problem.x_nh.device, dtype)
    tile_rows = None if isinstance(kernels, CudaKernels) else 100  # those of a GPU have no tiles
    answer = by_shards(problem, 4, treatment, tile_rows, kernels=kernels)
    for name in ("losses_n", "x_gradient_nh", "weight_gradient_vh"):
        own, usual = (error(getattr(a, name), getattr(exact, name)) for a in (answer, plain))
        assert own < max(factor * usual, 1e-10 if dtype == torch.float64 else 1e-5)
