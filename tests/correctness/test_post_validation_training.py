"""Post-validation changes no bit: losses, norms, weights and errors are the synchronous step's.

Whatever the guesses: gradients of single ranks are blown up so that clipping bites from there on,
or spoilt by infinity.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from correctness.rank_runs import (
    Batches,
    ListLoader,
    RankRun,
    make_pipeline_groups,
    parameter_values,
    pieces,
)
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.layers.main_grad import main_grad_of
from megatron.run.run_config import RunConfig
from megatron.training.iteration import evaluate, run_iteration
from megatron.training.post_validated_step import make_train_step
from megatron.training.setup import TrainState, build_train_state
from megatron.training.step import Finished

OPTIONS = GPTOptions(num_layers=6, vocab_size=37, tie_embeddings=False)
JOB = Job(OPTIONS, microbatches=5, iterations=6, warmup=1, dropout=0.1)
NEVER, SOMETIMES, ALWAYS = 1e9, 100.0, 1e-3
"""Limits of the gradient norm: beyond reach, between usual and blown-up gradients, below all."""


@dataclass(frozen=True)
class Spike:
    """A rank whose gradients are multiplied after the backward of some iterations."""

    rank: int = 0
    iterations: tuple[int, ...] = ()
    factor: float = 1e4


@dataclass
class SpikedRun(RankRun):
    """Also which steps were redone, and the error that ended the run.

    Attributes:
        redone: iterations whose step was a wrong guess.
        error: message of the error, if the run ended with one.
    """

    redone: list[int] = field(default_factory=list)
    error: str = ""

    def note(self, finished: Finished | None) -> None:
        super().note(finished)
        if finished is not None and finished.step_redone:
            self.redone.append(finished.number)


def train_spiked(
    rank: int,
    world_size: int,
    *,
    config: RunConfig,
    batches: Batches,
    spike: Spike,
    evaluation_batches: Batches = (),
    evaluate_after: tuple[int, ...] = (),
) -> SpikedRun:
    state = build_train_state(config, make_pipeline_groups())
    if rank == spike.rank:
        blow_up(state, spike)
    step, run = make_train_step(config.optimizer, state), SpikedRun()
    loader, evaluation_loader = ListLoader(batches), ListLoader(evaluation_batches)
    try:
        for iteration in range(len(batches)):
            run.note(run_iteration(step, config.optimizer, loader, state.groups, iteration))
            if iteration in evaluate_after:
                run.note(step.settle())
                run.evaluations.append(evaluate(state, evaluation_loader, config.train.eval_iters))
        run.note(step.settle())
    except FloatingPointError as error:
        run.error = str(error)
    run.final = pieces(state, parameter_values)
    run.left_in_store = len(state.pipeline.store)
    state.pipeline.close()
    return run


def blow_up(state: TrainState, spike: Spike) -> None:
    train = state.pipeline.train

    def spiked(batch: list[Any], iteration: int, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        loss = train(batch, iteration, *args, **kwargs)
        if loss is not None and iteration in spike.iterations:
            for entry in state.parameters:
                main_grad_of(entry.parameter).mul_(spike.factor)
        return loss

    vars(state.pipeline)["train"] = spiked


def run_both(
    ranks: RankPool,
    layout: Layout,
    clip_grad: float,
    spike: Spike = Spike(),
    job: Job = JOB,
    dtype: torch.dtype = torch.float32,
    **evaluation: object,
) -> list[SpikedRun]:
    """Run with and without post-validation, compare everything, and return the runs with it."""
    config = job.config(layout, dtype)
    off, on = (
        ranks.run(
            train_spiked,
            layout.ranks,
            config=dataclasses.replace(
                config,
                optimizer=dataclasses.replace(
                    config.optimizer, clip_grad=clip_grad, post_validation=post_validation
                ),
            ),
            batches=job.batches(),
            spike=spike,
            **evaluation,
        )
        for post_validation in (False, True)
    )
    for ours, expected in zip(on, off, strict=True):
        assert ours.losses == expected.losses
        assert ours.gradient_norms == expected.gradient_norms
        assert ours.evaluations == expected.evaluations
        assert ours.error == expected.error
        assert ours.left_in_store == 0
        for name, (_, parts) in expected.final.items():
            for (_, value), (_, other) in zip(parts, ours.final[name][1], strict=True):
                assert torch.equal(value, other), name
        assert not expected.redone
        assert ours.redone == on[0].redone
    return on


ALL = list(range(JOB.iterations))
LAYOUTS = [
    Layout(2, "vocab-2"),
    full(Layout(3, "vocab-1")),
    full(Layout(2, "none", "v-half")),
    full(Layout(4, "none")),
    full(Layout(4, "interlaced")),
    full(Layout(2, "naive", "zb-h1")),
    full(Layout(3, "vocab-2", "zb-v")),
    full(Layout(3, "vocab-1", "interleaved")),
]


@pytest.mark.parametrize(
    ("clip_grad", "redone"), [full(NEVER, []), (ALWAYS, ALL), full(0.0, [])], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_clipping_never_or_always(
    layout: Layout, clip_grad: float, redone: list[int], ranks: RankPool
) -> None:
    on = run_both(ranks, layout, clip_grad)
    assert on[0].redone == redone
    assert len(on[0].losses) == JOB.iterations


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("layout", "rank", "dtype"),
    [
        (Layout(2, "vocab-1", "zb-h1"), 1, FP32),
        full(Layout(3, "vocab-2"), 0, FP32),
        full(Layout(3, "none"), 1, BF16),
        full(Layout(3, "vocab-1"), 2, FP32),
        full(Layout(2, "vocab-2"), 0, BF16),
        full(Layout(3, "naive"), 0, BF16),
        full(Layout(3, "none"), 2, FP32),
        full(Layout(4, "interlaced"), 2, FP32),
        full(Layout(4, "vocab-2", "zb-h2"), 3, BF16),
    ],
    ids=str,
)
def test_clipping_bites_from_one_rank_on(
    layout: Layout, rank: int, dtype: torch.dtype, ranks: RankPool
) -> None:
    """In the first, in two neighbouring iterations and in the last."""
    spike = Spike(rank, (0, 2, 3, 5))
    assert run_both(ranks, layout, SOMETIMES, spike, dtype=dtype)[0].redone == [0, 2, 3, 5]


@pytest.mark.parametrize(
    ("rank", "iteration"),
    [(1, 2), full(2, 5), full(0, 0), full(0, 2), full(2, 2), full(0, 5), full(1, 0), full(2, 0)],
)
def test_infinity_on_one_rank_ends_the_run_alike(
    rank: int, iteration: int, ranks: RankPool
) -> None:
    """In the first iteration, in between, and in the last, which no other one follows."""
    spike = Spike(rank, (iteration,), factor=float("inf"))
    on = run_both(ranks, Layout(3, "vocab-2"), SOMETIMES, spike)
    assert len(on[0].losses) == iteration
    message = rf"^iteration {iteration + 1}: lm loss is \d.*the gradient is not, on rank {rank};"
    for own in on:
        with pytest.raises(FloatingPointError, match=message):
            raise FloatingPointError(own.error)


@pytest.mark.parametrize(
    ("vocabulary", "clip_grad", "tied"),
    [
        ("vocab-2", ALWAYS, True),
        full("none", NEVER, True),
        full("none", ALWAYS, True),
        full("vocab-1", NEVER, False),
        full("vocab-1", ALWAYS, False),
    ],
)
def test_evaluation_in_between(
    vocabulary: str, clip_grad: float, tied: bool, ranks: RankPool
) -> None:
    job = dataclasses.replace(JOB, options=dataclasses.replace(OPTIONS, tie_embeddings=tied))
    run = partial(run_both, evaluate_after=(1, 4), evaluation_batches=JOB.batches(seed=1))
    assert len(run(ranks, Layout(2, vocabulary), clip_grad, job=job)[0].evaluations) == 2


def test_a_single_rank_steps_at_once(ranks: RankPool) -> None:
    [on] = run_both(ranks, Layout(1, "vocab-2"), ALWAYS)
    assert not on.redone
    assert len(on.losses) == JOB.iterations
