"""What ``Kernels`` promises of the output layer: S, C1, E, T over shards are autograd on the whole.

Every implementation works in memory that it asks for itself. Exact are autograd's results in
float64 of the same, already rounded, numbers.

Shapes: n tokens, h hidden size, v vocabulary entries.
"""

import itertools
from collections.abc import Sequence
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernels.implementations import HALF_UNIT, IMPLEMENTATIONS, Implementation
from layers.vocabulary.sharded_output import (
    ALGORITHM_1,
    ALGORITHM_2,
    NAIVE,
    Answer,
    Problem,
    by_autograd,
    by_shards,
    draw,
    error,
)

from megatron.kernels.softmax import LossOptions, ShardState
from megatron.schedules.treatments import Treatment

EACH_IMPLEMENTATION = pytest.mark.parametrize("tried", IMPLEMENTATIONS, ids=str)
IN_BF16 = [each for each in IMPLEMENTATIONS if each.dtype == torch.bfloat16]
EACH_MEMORY = pytest.mark.parametrize("recompute", [False, True], ids=["kept", "again"])
EACH_TREATMENT = pytest.mark.parametrize(
    "treatment", [ALGORITHM_2, ALGORITHM_1, NAIVE], ids=attrgetter("name")
)
LOSSES = list(itertools.product([0.0, 0.1], [0.0, 1e-2], [0.0, 4.0]))
PLAIN, EVERYTHING = LOSSES[0], LOSSES[-1]
"""Label smoothing, z-loss, soft-capping: none, and all together."""

SHAPES = [
    pytest.param(7, 5, 3, 4, id="three rows, one for each shard and an empty one"),
    pytest.param(1, 3, 2, 1, id="one token"),
]
"""Tokens, hidden size, vocabulary entries, shards."""

LARGE = (130, 9, 1037, 2)
"""Odd, and more than a block of everything."""

HALF_UNITS = {torch.bfloat16: HALF_UNIT, torch.float16: HALF_UNIT / 8}
"""Most by which a rounding changes a number, relative to it."""

EXACT = {torch.float64: 1e-11, torch.float32: 2e-5}
"""Error of a result; the smallest is of a loss whose terms cancel."""


def assert_as_exact_as_autograd(tried: Implementation, problem: Problem, answer: Answer) -> None:
    """With 16 bits the errors are those of a plain implementation in that type, or little more.

    More are the roundings of exponentials and of every shard's part, relative to what the targets
    cancel of them.
    """
    wide = problem.to(torch.float64)
    exact, plain = by_autograd(wide), None
    if tried.dtype not in EXACT:
        plain = by_autograd(problem)
    for name in ("losses_n", "x_gradient_nh", "weight_gradient_vh"):
        own = error(getattr(answer, name), getattr(exact, name))
        usual = EXACT.get(tried.dtype, 0.0)
        if plain is not None:
            rounding = (1 + tried.cuts_off) * HALF_UNITS[tried.dtype]
            usual = 1.5 * error(getattr(plain, name), getattr(exact, name))
            usual += rounding * (1 + terms(wide, name) / float(getattr(exact, name).norm()))
        assert own < usual, f"{name}: {own}, not {usual}"


def terms(problem: Problem, name: str) -> float:
    """Norm of what the targets subtract from a gradient."""
    if name == "losses_n":
        return 0.0
    weight_n1 = problem.weight_n.unsqueeze(1)
    if name == "x_gradient_nh":
        return float((weight_n1 * problem.weight_vh[problem.targets_n]).norm())
    gradient_vh = torch.zeros_like(problem.weight_vh)
    return float(gradient_vh.index_add_(0, problem.targets_n, weight_n1 * problem.x_nh).norm())


def on(tried: Implementation, problem: Problem) -> Problem:
    """The problem in the implementation's type, on its device."""
    moved = problem.to(tried.dtype)
    return Problem(
        moved.x_nh.to(tried.device),
        moved.weight_vh.to(tried.device),
        moved.targets_n.to(tried.device),
        moved.weight_n.to(tried.device),
        moved.options,
    )


def hold_for(
    tried: Implementation,
    treatment: Treatment,
    recompute: bool,
    forms: Sequence[tuple[float, float, float]],
) -> None:
    for losses in forms:
        problem = on(tried, draw(7, 8, 19, LossOptions(19, *losses), magnitude=3.0))
        answer = by_shards(problem, 3, treatment, None, tried.kernels, recompute=recompute)
        assert_as_exact_as_autograd(tried, problem, answer)


@pytest.mark.one_in(5)
@EACH_IMPLEMENTATION
@EACH_TREATMENT
@EACH_MEMORY
def test_plain_losses_and_those_with_everything(
    tried: Implementation, treatment: Treatment, recompute: bool
) -> None:
    hold_for(tried, treatment, recompute, (PLAIN, EVERYTHING))


@pytest.mark.one_in(5)
@EACH_MEMORY
@pytest.mark.parametrize("treatment", [ALGORITHM_2, ALGORITHM_1], ids=attrgetter("name"))
@pytest.mark.parametrize("tried", IN_BF16, ids=str)
def test_every_form_of_the_loss(
    tried: Implementation, treatment: Treatment, recompute: bool
) -> None:
    hold_for(tried, treatment, recompute, LOSSES[1:-1])


@pytest.mark.pairwise
@pytest.mark.full
@EACH_MEMORY
@EACH_TREATMENT
@EACH_IMPLEMENTATION
def test_every_form_of_the_loss_in_every_type(
    tried: Implementation, treatment: Treatment, recompute: bool
) -> None:
    hold_for(tried, treatment, recompute, LOSSES[1:-1])


def hold_for_shape(
    tried: Implementation, treatment: Treatment, n: int, h: int, v: int, shards: int
) -> None:
    for recompute, losses in ((False, EVERYTHING), (True, EVERYTHING), (False, PLAIN)):
        # Larger logits would let a single token's target cancel its gradient up to rounding.
        drawn = draw(n, h, v, LossOptions(v, *losses), magnitude=0.5)
        drawn.weight_n[0] = 1.0  # or a single token could count for nothing
        problem = on(tried, drawn)
        answer = by_shards(problem, shards, treatment, None, tried.kernels, recompute=recompute)
        assert_as_exact_as_autograd(tried, problem, answer)


@pytest.mark.pairwise
@pytest.mark.one_in(3)
@EACH_IMPLEMENTATION
@EACH_TREATMENT
@pytest.mark.parametrize(("n", "h", "v", "shards"), SHAPES)
def test_small_shapes(
    tried: Implementation, treatment: Treatment, n: int, h: int, v: int, shards: int
) -> None:
    hold_for_shape(tried, treatment, n, h, v, shards)


@pytest.mark.parametrize("tried", IN_BF16, ids=str)
def test_a_large_shape(tried: Implementation) -> None:
    hold_for_shape(tried, ALGORITHM_2, *LARGE)


@pytest.mark.full
@EACH_IMPLEMENTATION
@EACH_TREATMENT
def test_a_large_shape_in_every_type(tried: Implementation, treatment: Treatment) -> None:
    hold_for_shape(tried, treatment, *LARGE)


@EACH_IMPLEMENTATION
@EACH_MEMORY
def test_logits_of_any_size(tried: Implementation, recompute: bool) -> None:
    """Exponentials of such logits are infinite: only differences to the maximum may be taken."""
    if tried.dtype == torch.float16:
        pytest.skip("fp16 has no such logits")
    problem = on(tried, draw(17, 8, 37, LossOptions(37), magnitude=1e3))
    # Rounded to 16 bits, logits are multiples of 4 or more, and a plain loss has such errors.
    treatment = ALGORITHM_1 if recompute else ALGORITHM_2
    answer = by_shards(problem, 4, treatment, None, tried.kernels, recompute=recompute)
    assert answer.losses_n.isfinite().all()
    assert_as_exact_as_autograd(tried, problem, answer)


@EACH_IMPLEMENTATION
@EACH_MEMORY
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_the_loss(
    tried: Implementation, value: float, recompute: bool
) -> None:
    problem = on(tried, draw(6, 8, 20, LossOptions(20)))
    problem.x_nh[2, 3] = value
    answer = by_shards(problem, 4, ALGORITHM_1, None, tried.kernels, recompute=recompute)
    losses_n = answer.losses_n
    assert losses_n.isfinite().tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize(
    "tried", [each for each in IMPLEMENTATIONS if each.name == "cuda"], ids=str
)
def test_without_atomic_additions_targets_are_subtracted_as_exactly(tried: Implementation) -> None:
    """Of a vocabulary of few entries, so that tokens share targets."""
    from megatron.kernels.cuda import operators  # no CPU needs Triton

    torch.use_deterministic_algorithms(True)
    try:
        with patch.object(operators, "subtract_targets_", side_effect=AssertionError):
            hold_for(tried, ALGORITHM_2, False, (PLAIN, EVERYTHING))
            hold_for_shape(tried, ALGORITHM_1, 30, 5, 3, 2)
    finally:
        torch.use_deterministic_algorithms(False)
    with (
        patch.object(operators, "subtract_targets_", side_effect=ZeroDivisionError),
        pytest.raises(ZeroDivisionError),
    ):
        hold_for(tried, ALGORITHM_2, False, (PLAIN,))


@EACH_IMPLEMENTATION
@EACH_MEMORY
def test_t_adds_to_a_sum_or_begins_it(tried: Implementation, recompute: bool) -> None:
    weight_vh, options, kernels = tried.activation(3, 8, seed=1), LossOptions(3, 0.1), tried.kernels
    x_nh, weight_n = tried.activation(5, 8), tried.statistic(5, seed=2)
    targets_n = torch.tensor([0, 2, 2, 1, 0], device=tried.device)
    room = kernels.scratch_room(x_nh, 3, again=True) if recompute else None
    s_room = kernels.kept_room(x_nh, 3) if room is None else room
    state = kernels.output_s(
        x_nh, weight_vh, targets_n, 0, options, s_room, form_gradient=False, keep=not recompute
    )
    merged, none = kernels.merge(state.statistics_4n[None], state, weight_vh, weight_n, options)
    assert none is None
    before = tried.statistic(3, 8, seed=3)
    begun, added, again = torch.full_like(before, torch.nan), before.clone(), before.clone()
    for total, begins in ((begun, True), (added, False), (again, False)):
        arguments = (state, weight_vh, total, merged, weight_n, options, room)
        assert kernels.output_t(*arguments, form_gradient=False, begins=begins) is None
    tried.assert_close(added, before.double() + begun.double())
    x_gradients_nh = [
        kernels.output_t(
            state, weight_vh, total, merged, weight_n, options, room, form_gradient=True
        )
        for total in (again, None)
    ]
    assert x_gradients_nh[0] is not None
    assert x_gradients_nh[1] is not None
    assert torch.equal(x_gradients_nh[0], x_gradients_nh[1])
    tried.assert_close(again, before.double() + 2 * begun.double())


def s_of(tried: Implementation, weight_vh: torch.Tensor, **options: Any) -> ShardState:
    """S of a shard whose first row is the vocabulary's fifth, for tokens of ones."""
    x_nh = torch.ones(6, weight_vh.shape[1], dtype=tried.dtype, device=tried.device)
    targets_n = torch.tensor([0, 4, 5, 6, 7, 9], device=tried.device)
    kernels, rows = tried.kernels, len(weight_vh)
    arguments = (x_nh, weight_vh, targets_n, 4, LossOptions(50, **options))
    room = kernels.kept_room(x_nh, rows)
    return kernels.output_s(*arguments, room, form_gradient=True, keep=True)


@EACH_IMPLEMENTATION
def test_statistics_are_those_of_the_shard(tried: Implementation) -> None:
    weight_vh = tried.activation(3, 2)
    logits_v = weight_vh.double().sum(1).to(tried.dtype)
    state = s_of(tried, weight_vh, label_smoothing=0.1)
    maximum_n, sum_n, target_n, logit_sum_n = state.statistics_4n.double()
    expected = logits_v.double()
    tried.assert_close(maximum_n, expected.amax().expand(6))
    tried.assert_close(sum_n, (expected - expected.amax()).exp().sum().expand(6))
    tried.assert_close(logit_sum_n, expected.sum().expand(6))
    own = [0, expected[0], expected[1], expected[2], 0, 0]
    tried.assert_close(target_n, torch.tensor(own, device=tried.device).double())


@EACH_IMPLEMENTATION
def test_a_shard_of_padding_only_counts_for_nothing(tried: Implementation) -> None:
    state = s_of(tried, tried.activation(0, 2))
    maximum_n, *others = state.statistics_4n
    assert (maximum_n == -torch.inf).all()
    assert not any(other_n.any() for other_n in others)
    assert state.raw_gradient_nh is not None
    assert not state.raw_gradient_nh.any()


def test_logits_that_are_all_minus_infinity_count_for_nothing_on_a_gpu() -> None:
    """As those of a shard of padding only: the other shards decide."""
    tried = next((each for each in IMPLEMENTATIONS if each.name == "cuda"), None)
    if tried is None:
        pytest.skip("needs Triton")
    state = s_of(tried, torch.full((3, 2), -torch.inf, dtype=tried.dtype, device=tried.device))
    maximum_n, sum_n, *_ = state.statistics_4n
    assert (maximum_n == -torch.inf).all()
    assert not sum_n.any()
    assert not state.exp_tiles[0].any()
