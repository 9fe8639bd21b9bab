"""An overflow skips a step on every rank of every layout, and leaves no trace but another scale."""

from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate
from typing import Any

import pytest
import torch
from checkpoint.test_layouts import everything
from correctness.rank_runs import CPU, Batches, ListLoader, Pieces
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.optimizer.settings import LossScaleSettings
from megatron.parallel.groups import make_groups
from megatron.run.run_config import RunConfig
from megatron.training.iteration import run_iteration
from megatron.training.post_validated_step import make_train_step
from megatron.training.setup import TrainState, build_train_state
from megatron.training.step import Finished

JOB = Job(
    GPTOptions(num_layers=4, vocab_size=37, tie_embeddings=False),
    microbatches=4,
    iterations=9,
    warmup=2,
)
TIED = replace(JOB, options=replace(JOB.options, tie_embeddings=True))
TOO_HIGH = 2.0**21
"""A scale with which gradients overflow for some iterations."""


@dataclass
class ScaledRun:
    """What one rank saw of a run.

    Attributes:
        finished: all iterations.
        kept: what the rank held after every iteration, where steps are taken at once.
        steps: that the optimizer has counted.
        final: what the rank held at the end.
    """

    finished: list[Finished] = field(default_factory=list)
    kept: list[Pieces] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    final: Pieces = field(default_factory=dict)

    def note(self, finished: Finished | None) -> None:
        if finished is not None:
            self.finished.append(finished)

    @property
    def skipped(self) -> list[int]:
        return [one.number for one in self.finished if one.is_skipped]

    @property
    def scales(self) -> list[float | None]:
        return [one.loss_scale for one in self.finished]


def train_scaled(
    rank: int,
    world_size: int,
    *,
    config: RunConfig,
    batches: Batches,
    spoilt: tuple[int, int] | None = None,
    watched: bool = False,
) -> ScaledRun:
    """Train; ``spoilt`` is a rank and an iteration after whose backward a gradient is infinite."""
    groups = make_groups(config.parallel.grid, CPU, timedelta(seconds=60))
    state = build_train_state(config, groups)
    if spoilt is not None and rank == spoilt[0]:
        spoil(state, spoilt[1])
    loader = ListLoader(batches, (groups.data.rank, groups.data.size))
    step, run = make_train_step(config.optimizer, state, config.log), ScaledRun()
    for number in range(len(batches)):
        run.note(run_iteration(step, config.optimizer, loader, groups, number))
        if watched:
            run.note(step.settle())
            run.kept.append(everything(state))
            run.steps.append(state.optimizer.steps)
    run.note(step.settle())
    run.final = everything(state)
    assert not len(state.pipeline.store)
    state.pipeline.close()
    return run


def spoil(state: TrainState, when: int) -> None:
    train, spoilt = state.pipeline.train, list[int]()

    def with_infinity(batch: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        loss = train(batch, iteration, *args, **kwargs)
        if loss is not None and iteration == when:
            state.counted[-1].gradient.view(-1)[-1] = torch.inf
            spoilt.append(iteration)
        return loss

    vars(state.pipeline)["train"] = with_infinity


def run(
    ranks: RankPool,
    layout: Layout,
    scale: LossScaleSettings,
    *,
    job: Job = JOB,
    batches: Batches | None = None,
    post_validation: bool = False,
    clip_grad: float = 0.5,
    **options: object,
) -> list[ScaledRun]:
    config = job.config(layout, torch.float16)
    optimizer = replace(
        config.optimizer,
        loss_scale=scale,
        post_validation=post_validation,
        clip_grad=clip_grad,
    )
    runs: list[ScaledRun] = ranks.run(
        train_scaled,
        layout.world_size,
        config=replace(config, optimizer=optimizer),
        batches=job.batches() if batches is None else batches,
        **options,
    )
    for own in runs:
        assert repr(own.finished) == repr(runs[0].finished)  # NaN is not equal to NaN
    return runs


def assert_same(one: list[ScaledRun], other: list[ScaledRun]) -> None:
    for a, b in zip(one, other, strict=True):
        assert_equal(a.final, b.final)


def assert_equal(one: Pieces, other: Pieces) -> None:
    assert one.keys() == other.keys()
    for name, (_, parts) in one.items():
        for (_, value), (_, same) in zip(parts, other[name][1], strict=True):
            assert torch.equal(value, same), name


LAYOUTS = [
    full(Layout(1, "none")),
    full(Layout(2, "vocab-2")),
    full(Layout(2, "none", "zb-h1")),
    full(Layout(3, "vocab-1")),
    full(Layout(1, "none", replicas=2)),
    full(Layout(1, "vocab-2", replicas=2, sharded=True)),
    Layout(2, "vocab-1", replicas=2, overlap=True, sharded=True),
    full(Layout(2, "vocab-2", tensor=2, sequence=True)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_first_steps_that_overflow_leave_no_trace(layout: Layout, ranks: RankPool) -> None:
    """The others are those of a run that begins with the right scale on the samples after them."""
    found = run(
        ranks, layout, LossScaleSettings(initial_loss_scale=TOO_HIGH, hysteresis=1), watched=True
    )
    skipped, scale = found[0].skipped, TOO_HIGH
    first = next(number for number in range(JOB.iterations) if number not in skipped)
    assert first >= 2
    assert len(skipped) < JOB.iterations - 2
    for number, after in enumerate(found[0].scales):
        scale *= 0.5 if number in skipped else 1.0
        assert after == scale
    for own in found:
        taken = [number not in skipped for number in range(JOB.iterations)]
        assert own.steps == list(accumulate(taken))
        for number in skipped[1:]:
            assert_equal(own.kept[number - 1], own.kept[number])
    later = run(
        ranks,
        layout,
        LossScaleSettings(initial_loss_scale=TOO_HIGH * 0.5**first, hysteresis=1),
        batches=JOB.batches()[first:],
    )
    assert [first + number for number in later[0].skipped] == skipped[first:]
    assert_same(found, later)
    ours = [(one.loss, one.grad_norm) for one in found[0].finished[first:]]
    assert repr(ours) == repr([(one.loss, one.grad_norm) for one in later[0].finished])


@pytest.mark.parametrize("clip_grad", [pytest.param(0.5, id="clipped"), full(1e6, id="unclipped")])
@pytest.mark.parametrize(
    ("layout", "job"),
    [
        full(Layout(2, "vocab-2"), JOB),
        full(Layout(3, "none", "zb-h1"), TIED),
        (Layout(2, "vocab-1", replicas=2, sharded=True), JOB),
    ],
    ids=str,
)
def test_steps_on_a_guess_end_as_those_that_waited(
    layout: Layout, job: Job, clip_grad: float, ranks: RankPool
) -> None:
    """With overflows, and scales that grow while the next iteration has begun."""
    scale = LossScaleSettings(initial_loss_scale=TOO_HIGH, hysteresis=1, loss_scale_window=1)
    waited, guessed = (
        run(ranks, layout, scale, job=job, clip_grad=clip_grad, post_validation=guess)
        for guess in (False, True)
    )
    assert len(waited[0].skipped) > 3, "the scale grows until it overflows again"
    assert len(waited[0].skipped) < job.iterations - 2
    assert guessed[0].scales == waited[0].scales
    alike = [replace(one, step_redone=False) for one in guessed[0].finished]
    assert repr(alike) == repr(waited[0].finished)
    assert_same(guessed, waited)


REPLICAS = Layout(2, "vocab-2", replicas=2)
SHARDED = replace(REPLICAS, sharded=True)
SHARING = Layout(2, "vocab-2", tensor=2, sequence=True)


@pytest.mark.parametrize(
    ("layout", "rank", "post_validation"),
    [
        full(REPLICAS, 3, True),
        (SHARDED, 0, True),
        full(SHARDED, 3, False),
        full(SHARING, 0, True),
        full(SHARING, 3, False),
        pytest.param(REPLICAS, 0, False, marks=pytest.mark.full),
        pytest.param(REPLICAS, 0, True, marks=pytest.mark.full),
        pytest.param(REPLICAS, 3, False, marks=pytest.mark.full),
        pytest.param(SHARDED, 0, False, marks=pytest.mark.full),
        pytest.param(SHARDED, 3, True, marks=pytest.mark.full),
        pytest.param(SHARING, 1, True, marks=pytest.mark.full),
        pytest.param(SHARING, 2, False, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_skips_one_step_everywhere(
    layout: Layout, rank: int, post_validation: bool, ranks: RankPool
) -> None:
    """It ends as a run without the samples of that iteration."""
    scale, batches = LossScaleSettings(initial_loss_scale=2.0**12), JOB.batches()[:5]
    spoilt = run(
        ranks,
        layout,
        scale,
        batches=batches,
        spoilt=(rank, 2),
        post_validation=post_validation,
    )
    assert spoilt[0].skipped == [2]
    assert set(spoilt[0].scales) == {2.0**12}
    without = run(ranks, layout, scale, batches=[*batches[:2], *batches[3:]])
    assert not without[0].skipped
    assert_same(spoilt, without)


def test_a_scale_rounds_nothing_but_what_is_subnormal(ranks: RankPool) -> None:
    """Runs with two scales differ by what the smaller one loses; a loss holds no scale."""
    low, high = (
        run(ranks, Layout(2, "vocab-2"), LossScaleSettings(loss_scale=2.0**exponent))
        for exponent in (10, 14)
    )
    for ours, theirs in zip(low[0].finished, high[0].finished, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=2e-4)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-3)


def test_an_overflow_of_a_constant_scale_ends_the_run(ranks: RankPool) -> None:
    """As in Megatron, unless --no-check-for-nan-in-loss-and-grad is given."""
    config = JOB.config(Layout(1, "none"), torch.float16)
    optimizer = replace(config.optimizer, loss_scale=LossScaleSettings(loss_scale=2.0**40))
    with pytest.raises(Exception, match="the gradient is not, on rank 0"):
        ranks.run(
            train_scaled,
            1,
            config=replace(config, optimizer=optimizer),
            batches=JOB.batches(),
        )
