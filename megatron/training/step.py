"""From gradients to new weights, in one of two ways.

Either all ranks wait for the global gradient norm and then step together, or each rank steps on the
norm that it knows and the step is checked later (optimizer post-validation, arXiv 2401.10241).
Both ways do the same arithmetic in the same order. Losses and weights are therefore equal bit for
bit wherever a repeated run is, as on CPUs. (On CUDA, atomic additions to rows of the vocabulary's
gradients come in any order.) The second way reports an iteration one iteration late, because only
then it is known whether the step stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch

from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.global_state import GlobalState, add_up, over_replicas, own_totals
from megatron.optimizer.grad_norm import local_sum_of_squares
from megatron.optimizer.post_validation import PostValidatedStep
from megatron.runtime.batch import DeviceMicrobatch, token_counts
from megatron.runtime.observer import Observer
from megatron.training.setup import TrainState


@dataclass(frozen=True)
class Iteration:
    """The inputs of a training iteration.

    Attributes:
        number: counted from 0.
        batch: its microbatches.
        lr: learning rate of its step.
        consumed_samples: samples of all iterations up to and with this one.
    """

    number: int
    batch: Sequence[DeviceMicrobatch]
    lr: float
    consumed_samples: int


@dataclass(frozen=True)
class Finished:
    """An iteration whose step stands.

    Attributes:
        number: counted from 0.
        loss: mean over the valid tokens.
        grad_norm: of the whole model, before clipping.
        consumed_samples: samples of all iterations up to and with this one.
        step_redone: whether its step was a wrong guess and was taken again.
        num_zeros: zero elements of the model's gradient; ``None``: they are not counted.
        params_norm: norm of the model's weights after its step; ``None``: it is not asked for.
    """

    number: int
    loss: float
    grad_norm: float
    consumed_samples: int
    step_redone: bool = False
    num_zeros: int | None = None
    params_norm: float | None = None


class TrainStep(Protocol):
    """A way to train an iteration; every rank uses the same way."""

    def train(self, iteration: Iteration, observer: Observer | None = None) -> Finished | None:
        """Run the forward, the backward and the optimizer's step of an iteration.

        Args:
            iteration: its inputs.
            observer: is told of passes and communication. It is told twice if the iteration must
                run twice; a call of ``settle`` right before prevents a second run.

        Returns:
            The iteration that this call has made final, if any.

        Raises:
            FloatingPointError: the loss or the gradient of the iteration that would have become
                final is infinite or NaN; it has changed no weight.
        """
        ...

    def settle(self) -> Finished | None:
        """Make the last iteration final and return it, if ``train`` has not done so.

        Call it before anything but ``train`` reads weights. Raises as ``train`` does.
        """
        ...


def make_train_step(config: OptimizerConfig, state: TrainState) -> TrainStep:
    """Return the way that ``config`` asks for; a single rank gains nothing from a guess."""
    if config.post_validation and state.groups.pipeline.size > 1:
        return PostValidatedTrainStep(state, config.clip_grad)
    return SynchronousTrainStep(state)


class SynchronousTrainStep:
    """Waits for loss and gradient norm of the whole model, then steps.

    Args:
        state: this rank.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state

    def train(self, iteration: Iteration, observer: Observer | None = None) -> Finished:
        """As in ``TrainStep``; the iteration returned is always this one."""
        state = self._state
        loss = state.pipeline.train(iteration.batch, iteration.number, observer)
        assert loss is not None, "nothing stops the iteration"
        full = add_up(_own_totals(state, iteration, loss), state.groups.pipeline)
        if not full.is_finite:
            _report_not_finite(state, iteration, full)
        state.optimizer.step(iteration.lr, full.grad_norm, full.factor)
        state.gradients.zero()
        return _finished(iteration, full)

    def settle(self) -> None:
        """Do nothing: ``train`` makes every iteration final."""


class PostValidatedTrainStep:
    """Steps on a guess of the global norm, and checks it before the next iteration's first B.

    The next iteration's first forwards run before the check; a wrong guess makes them run again.

    Args:
        state: this rank, one of two or more.
        clip_grad: limit of the global gradient norm; 0 switches clipping off.
    """

    def __init__(self, state: TrainState, clip_grad: float) -> None:
        self._state = state
        self._step = PostValidatedStep(state.optimizer, clip_grad, state.groups.pipeline_hosts)
        self._open: Iteration | None = None
        self._verdict: tuple[GlobalState, bool] | None = None

    def train(self, iteration: Iteration, observer: Observer | None = None) -> Finished | None:
        """As in ``TrainStep``; the iteration returned is the one before."""
        state, finished = self._state, None
        if self._open is None:
            loss = state.pipeline.train(iteration.batch, iteration.number, observer)
        else:
            loss = state.pipeline.train(
                iteration.batch, iteration.number, observer, gate=self._stands
            )
            finished = self._close()
            if loss is None:  # the forwards had wrong weights
                loss = state.pipeline.train(iteration.batch, iteration.number, observer)
        assert loss is not None, "nothing stops an iteration with the right weights"
        own = _own_totals(state, iteration, loss).tolist()
        self._step.guess(iteration.lr, GlobalState(*own))
        self._open = iteration
        return finished

    def settle(self) -> Finished | None:
        """As in ``TrainStep``."""
        if self._open is None:
            return None
        self._stands()
        return self._close()

    def _stands(self) -> bool:
        """Whether the last step was right on every rank, so that the next gradients may add up."""
        self._verdict = self._step.validate()
        _, right = self._verdict
        if right:
            self._state.gradients.zero()
        return right

    def _close(self) -> Finished:
        """Make the last step final, correcting it if it does not stand."""
        assert self._open is not None
        assert self._verdict is not None
        (full, right), iteration = self._verdict, self._open
        self._verdict = self._open = None
        if not right:
            self._step.correct(full)
            if not full.is_finite:
                _report_not_finite(self._state, iteration, full)
            self._state.gradients.zero()
        return _finished(iteration, full, step_redone=not right)


def _own_totals(state: TrainState, iteration: Iteration, loss: torch.Tensor) -> torch.Tensor:
    """Return the sums over this rank and its replicas; pipeline rank 0 has the tokens."""
    groups = state.groups
    tokens = token_counts(iteration.batch) if groups.pipeline.rank == 0 else (0.0, 0.0)
    return over_replicas(own_totals(loss, state.parameters, tokens), groups.data)


def _finished(iteration: Iteration, full: GlobalState, step_redone: bool = False) -> Finished:
    return Finished(
        iteration.number, full.loss, full.grad_norm, iteration.consumed_samples, step_redone
    )


def _report_not_finite(state: TrainState, iteration: Iteration, full: GlobalState) -> NoReturn:
    """Find the origin of an infinity or NaN, and end the run; weights and gradients do not change.

    Raises:
        FloatingPointError: always.
    """
    where = state.pipeline.first_not_finite(iteration.batch)
    if where is not None:
        microbatch, rank, what = where
        found = f"rank {rank} saw it first, in {what}, microbatch {microbatch}"
    else:
        own = bool(torch.isfinite(local_sum_of_squares(state.parameters)))
        finite = state.groups.world.all_gather_object(own)
        ranks = [rank for rank, is_finite in enumerate(finite) if not is_finite]
        found = f"the forward is finite, the gradient is not, on rank {', '.join(map(str, ranks))}"
    raise FloatingPointError(
        f"iteration {iteration.number + 1}: lm loss is {full.loss}: {found}; lower --lr or look at "
        "the data of this iteration"
    )
