"""A wrong guess leaves no trace, and all ranks agree on what was wrong."""

import math
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import pytest
import torch
from harness.rank_pool import RankPool
from hypothesis import given
from hypothesis import strategies as st
from optimizer.entries import entries, optimizer_of, rates_of
from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.layers.main_grad import main_grad_of
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.global_state import GlobalState, add_up
from megatron.optimizer.post_validation import PostValidatedStep
from megatron.optimizer.settings import OptimizerSettings
from megatron.parallel.grid import Grid
from megatron.parallel.groups import make_groups, single_rank

CPU = torch.device("cpu")
CONFIG = OptimizerSettings(lr=0.1, weight_decay=0.3, clip_grad=1.0)
RATES = rates_of(CONFIG, 0.1)
SHAPES = {"table": (9, 4), "decoder.layers.0.mlp.linear_fc1.weight": (6, 4), "norm": (5,)}
OPTIMIZERS: list[Literal["adam", "sgd", "muon"]] = ["adam", "sgd", "muon"]
NAN, INF = float("nan"), float("inf")


class Replica:
    """The same few parameters and the same gradients for everyone who makes one."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        optimizer: Literal["adam", "sgd", "muon"] = "adam",
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.parameters = entries(
            (name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
            for name, shape in SHAPES.items()
        )
        self.bucket = Bucket(self.parameters, kernels_for(CPU, dtype))
        self.optimizer = optimizer_of(replace(CONFIG, optimizer=optimizer), self.parameters)

    def draw_gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for entry in self.parameters:
            main_grad_of(entry.parameter).normal_(generator=generator)

    def values(self) -> list[torch.Tensor]:
        return [entry.parameter.detach().clone() for entry in self.parameters]


def assert_equal(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, ours, expected))


# (norm of the guess, norm of the model): the first step, and runs of right and wrong guesses.
WRONG, RIGHT = (0.5, 3.0), (0.7, 0.7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "steps",
    [
        [WRONG],
        [WRONG, WRONG, RIGHT, RIGHT],
        [RIGHT, WRONG, RIGHT, WRONG, WRONG, RIGHT],
        [RIGHT, RIGHT, RIGHT],
    ],
)
def test_restore_undoes_steps_to_the_last_bit(
    steps: list[tuple[float, float]],
    dtype: torch.dtype,
    optimizer: Literal["adam", "sgd", "muon"],
) -> None:
    guessing, waiting = Replica(dtype, optimizer), Replica(dtype, optimizer)
    for number, (guess, norm) in enumerate(steps):
        for replica in (guessing, waiting):
            replica.draw_gradients(number)
        before = guessing.values()
        guessing.optimizer.save()
        guessing.optimizer.step(RATES, guess)
        assert not torch.equal(guessing.values()[0], before[0])
        if guess != norm:
            guessing.optimizer.restore()
            assert_equal(guessing.values(), before)
            guessing.optimizer.step(RATES, norm)
        waiting.optimizer.step(RATES, norm)
        assert_equal(guessing.values(), waiting.values())
    # What is left of the moments and counts shows in the next step.
    for replica in (guessing, waiting):
        replica.draw_gradients(99)
        replica.optimizer.step(RATES, 0.5)
    assert_equal(guessing.values(), waiting.values())


def test_several_steps_are_undone_at_once() -> None:
    replica = Replica()
    replica.draw_gradients(0)
    before = replica.values()
    replica.optimizer.save()
    for _ in range(3):
        replica.optimizer.step(RATES, 0.5)
    replica.optimizer.restore()
    assert_equal(replica.values(), before)


@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=20))
def test_sums_over_more_ranks_are_not_smaller(squares: list[float]) -> None:
    """On this rests that ranks may judge each other's guesses by the whole sum alone."""
    total = GlobalState(0.0, 0.0)
    for own in squares:
        larger = total + GlobalState(0.0, own)
        assert larger.grad_norm >= total.grad_norm
        total = larger


@pytest.mark.parametrize(
    ("loss", "squares", "finite"),
    [(1.0, 2.0, True), (NAN, 2.0, False), (-INF, 2.0, False), (1.0, INF, False), (1.0, NAN, False)],
)
def test_a_state_is_finite_if_all_of_it_is(loss: float, squares: float, finite: bool) -> None:
    assert GlobalState(loss, squares).is_finite == finite
    assert (GlobalState(1.0, 1.0) + GlobalState(loss, squares)).is_finite == finite


def test_one_rank_is_its_own_sum() -> None:
    totals = torch.tensor([0.1, 0.7, 8, 6], dtype=torch.float64)
    assert add_up(totals, single_rank(CPU).pipeline) == GlobalState(0.1, 0.7, 8, 6)


def test_what_does_not_count_is_left_out_of_the_mean() -> None:
    state = GlobalState(weighted_loss=3.0, sum_of_squares=4.0, tokens=8, valid_tokens=6)
    assert [state.loss, state.grad_norm] == pytest.approx([4, 8 / 3])
    nothing = GlobalState(0.0, 0.0, 8, 0)
    assert (nothing.loss, nothing.grad_norm, nothing.factor) == (0.0, 0.0, 1.0)
    parts = GlobalState(1.0, 3.0, 0, 0) + GlobalState(2.0, 1.0, 8, 6)
    assert parts == state


def test_losses_of_further_tokens_add_up_beside_that_of_the_next() -> None:
    state = GlobalState.of([1.0, 3.0, 0, 0, 4.0, 7.0]) + GlobalState.of([2.0, 1.0, 8, 6, 2.0, 5.0])
    assert state == GlobalState(3.0, 4.0, 8, 6, (6.0, 12.0))
    assert state.loss == 4.0
    assert GlobalState.of(state.values) == state
    assert not GlobalState(1.0, 1.0, 8, 6, (1.0, NAN)).is_finite


@dataclass(frozen=True)
class Verdict:
    """What one rank saw of a step.

    Attributes:
        full: sums over all ranks, as validated.
        waited_for: the same by ``add_up``.
        right: whether every rank's step was right.
        guessed: whether weights changed before the validation.
        final: weights after the step, if it was taken.
        expected: those of an optimizer that waited.
    """

    full: GlobalState
    waited_for: GlobalState
    right: bool
    guessed: bool
    final: list[torch.Tensor]
    expected: list[torch.Tensor]


def steps_on_rank(rank: int, world_size: int, *, steps: list[list[float]]) -> list[Verdict]:
    """Take steps whose sums of squares are given for every rank."""
    groups = make_groups(Grid(pipeline_size=world_size), CPU, timedelta(seconds=60))
    guessing, waiting = Replica(), Replica()
    step = PostValidatedStep(guessing.optimizer, CONFIG.clip_grad, groups.pipeline_hosts)
    verdicts = []
    for number, squares in enumerate(steps):
        for replica in (guessing, waiting):
            replica.draw_gradients(number)
        tokens = (9.0, 7.0) if rank == 0 else (0.0, 0.0)
        own, before = GlobalState(0.1 * rank, squares[rank], *tokens), guessing.values()
        step.guess(RATES, own)
        guessed = not torch.equal(guessing.values()[0], before[0])
        full, right = step.validate()
        if not right:
            step.correct(full)
        waited_for = add_up(torch.tensor(own.values, dtype=torch.float64), groups.pipeline)
        if full.is_finite:
            waiting.optimizer.step(RATES, full.grad_norm, full.factor)
        verdicts.append(
            Verdict(full, waited_for, right, guessed, guessing.values(), waiting.values())
        )
    return verdicts


THIRDS = 1 / 3
STEPS = [  # squares by rank, which ranks step before they know, whether all of them were right
    ([0.2, 0.1, 0.2, 0.1], [True, True, True, True], True),
    ([2.0, 0.1, THIRDS, 0.1], [False, False, False, True], False),
    ([0.2, 0.1, 2.0, 0.1], [True, True, False, True], False),
    ([0.2, 0.1, 0.2, 2.0], [True, True, True, True], False),
    ([0.0, 4.0, 0.0, 0.0], [True, False, False, True], False),
    ([NAN, 0.1, THIRDS, 0.1], [False, False, False, False], False),
    ([0.2, 0.1, INF, 0.1], [True, True, False, False], False),
    ([0.2, 0.1, 0.2, 0.1], [True, True, True, True], True),
]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_agree_and_end_as_if_they_had_waited(size: int, ranks: RankPool) -> None:
    by_rank = ranks.run(steps_on_rank, size, steps=[squares for squares, *_ in STEPS])
    for number, (squares, guessed, _) in enumerate(STEPS):
        verdicts = [own[number] for own in by_rank]
        total = 0.0
        for square in squares[:size]:
            total += square
        clipped = not 9 / 7 * math.sqrt(total) < CONFIG.clip_grad
        for verdict in verdicts:
            assert verdict.right == (not clipped)
            assert_equal(verdict.final, verdict.expected)
            assert math.isnan(total) or verdict.full == verdict.waited_for
            assert math.isnan(total) or verdict.full.sum_of_squares == total
        assert [v.guessed for v in verdicts[:-1]] == guessed[: size - 1]
        assert verdicts[-1].guessed == math.isfinite(total)
    if size == 4:
        assert [v.right for v in by_rank[0]] == [right for *_, right in STEPS]
