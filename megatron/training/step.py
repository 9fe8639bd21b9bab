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

from megatron.config.run_config import LogConfig
from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.global_state import GlobalState, add_up, over_ranks, own_totals
from megatron.optimizer.grad_norm import local_sum_of_squares
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.model_figures import norm_of_weights, zeros_in_gradient
from megatron.optimizer.post_validation import PostValidatedStep
from megatron.runtime.batch import DeviceMicrobatch, token_counts
from megatron.runtime.observer import Observer
from megatron.training.guard.words import ranks_in_words, samples_in_words
from megatron.training.setup import TrainState


@dataclass(frozen=True)
class Iteration:
    """The inputs of a training iteration.

    Attributes:
        number: counted from 0.
        batch: its microbatches.
        rates: of its step.
        consumed_samples: samples of all iterations up to and with this one.
    """

    number: int
    batch: Sequence[DeviceMicrobatch]
    rates: Rates
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
        samples: its samples, by their place in the order of training.
        is_skipped: whether it took no step.
    """

    number: int
    loss: float
    grad_norm: float
    consumed_samples: int
    step_redone: bool = False
    num_zeros: int | None = None
    params_norm: float | None = None
    samples: range = range(0)
    is_skipped: bool = False


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


@dataclass(frozen=True)
class Figures:
    """Finds figures of the whole model besides loss and gradient norm, if they are asked for.

    Every rank calls every method.

    Attributes:
        state: this rank.
        count_zeros: whether the zeros of the gradient are asked for.
        find_norm: whether the norm of the weights is.
    """

    state: TrainState
    count_zeros: bool = False
    find_norm: bool = False

    def num_zeros(self) -> int | None:
        """Count the zeros of reduced gradients, before the step."""
        groups = self.state.groups
        if not self.count_zeros:
            return None
        return zeros_in_gradient(self.state.counted, groups.world, groups.device)

    def params_norm(self) -> float | None:
        """Return the norm of the weights after the step, which a sharded optimizer takes now."""
        state, groups = self.state, self.state.groups
        if not self.find_norm:
            return None
        if state.sharded is not None:
            state.sharded.settle()
        return norm_of_weights(state.counted, groups.world, groups.device)


def make_train_step(
    config: OptimizerConfig,
    state: TrainState,
    log: LogConfig | None = None,
    *,
    ends_if_not_finite: bool = True,
) -> TrainStep:
    """Return the way that ``config`` asks for; a single rank gains nothing from a guess.

    Args:
        config: whether steps are post-validated.
        state: this rank.
        log: which figures of the model are logged; ``None``: no more than loss and norm.
        ends_if_not_finite: an iteration with a loss or gradient norm that is not finite ends the
            run; otherwise it takes no step.
    """
    figures = Figures(state)
    if log is not None:
        figures = Figures(state, log.log_num_zeros_in_grad, log.log_params_norm)
    if config.post_validation and state.groups.pipeline.size > 1:
        return PostValidatedTrainStep(state, config.clip_grad, figures, ends_if_not_finite)
    return SynchronousTrainStep(state, figures, ends_if_not_finite)


class SynchronousTrainStep:
    """Waits for loss and gradient norm of the whole model, then steps.

    Args:
        state: this rank.
        figures: that are logged of the model.
        ends_if_not_finite: see ``make_train_step``.
    """

    def __init__(
        self, state: TrainState, figures: Figures | None = None, ends_if_not_finite: bool = True
    ) -> None:
        self._state = state
        self._figures = figures or Figures(state)
        self._ends_if_not_finite = ends_if_not_finite

    def train(self, iteration: Iteration, observer: Observer | None = None) -> Finished:
        """As in ``TrainStep``; the iteration returned is always this one."""
        state = self._state
        loss = state.pipeline.train(iteration.batch, iteration.number, observer)
        assert loss is not None, "nothing stops the iteration"
        full = add_up(_own_totals(state, iteration, loss), state.groups.pipeline)
        if not full.is_finite:
            if self._ends_if_not_finite:
                _report_not_finite(state, iteration, full)
            state.zero_gradients()
            return _finished(state, iteration, full)
        num_zeros = self._figures.num_zeros()
        if state.sharded is not None:  # the next iteration takes the step, or settle does
            state.sharded.open(iteration.rates, full.grad_norm, full.factor)
        else:
            state.optimizer.step(iteration.rates, full.grad_norm, full.factor)
            state.zero_gradients()
        return _finished(state, iteration, full, (num_zeros, self._figures.params_norm()))

    def settle(self) -> None:
        """Take the step of a sharded optimizer; ``train`` has made every iteration final."""
        if self._state.sharded is not None:
            self._state.sharded.settle()


class PostValidatedTrainStep:
    """Steps on a guess of the global norm, and checks it before the next iteration's first B.

    The next iteration's first forwards run before the check; a wrong guess makes them run again.

    Args:
        state: this rank, one of two or more.
        clip_grad: limit of the global gradient norm; 0 switches clipping off.
        figures: that are logged of the model.
        ends_if_not_finite: see ``make_train_step``.
    """

    def __init__(
        self,
        state: TrainState,
        clip_grad: float,
        figures: Figures,
        ends_if_not_finite: bool = True,
    ) -> None:
        self._ends_if_not_finite = ends_if_not_finite
        self._state = state
        self._figures = figures
        self._num_zeros: int | None = None
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
        self._num_zeros = self._figures.num_zeros()
        self._step.guess(iteration.rates, GlobalState(*own))
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
            self._state.zero_gradients()
        return right

    def _close(self) -> Finished:
        """Make the last step final, correcting it if it does not stand."""
        assert self._open is not None
        assert self._verdict is not None
        (full, right), iteration = self._verdict, self._open
        self._verdict = self._open = None
        if not right:
            self._step.correct(full)
            if self._ends_if_not_finite and not full.is_finite:
                _report_not_finite(self._state, iteration, full)
            self._state.zero_gradients()
        figures = self._num_zeros, self._figures.params_norm()
        return _finished(self._state, iteration, full, figures, step_redone=not right)


def _own_totals(state: TrainState, iteration: Iteration, loss: torch.Tensor) -> torch.Tensor:
    """Return the sums over this rank, its replicas and the tensor-parallel ranks beside it.

    The first rank of a replica has the tokens.
    """
    groups = state.groups
    tokens = token_counts(iteration.batch) if groups.vocabulary.rank == 0 else (0.0, 0.0)
    totals = over_ranks(own_totals(loss, state.counted, tokens), groups.data)
    return over_ranks(totals, groups.tensor_sums)


def _finished(
    state: TrainState,
    iteration: Iteration,
    full: GlobalState,
    figures: tuple[int | None, float | None] = (None, None),
    *,
    step_redone: bool = False,
) -> Finished:
    return Finished(
        iteration.number,
        full.loss,
        full.grad_norm,
        iteration.consumed_samples,
        step_redone and full.is_finite,
        *figures,
        _samples(state, iteration),
        not full.is_finite,
    )


def _samples(state: TrainState, iteration: Iteration) -> range:
    """Return the samples of the global batch, by their place in the order of training."""
    own = sum(microbatch.samples for microbatch in iteration.batch)
    end = iteration.consumed_samples
    return range(end - own * state.groups.data.size, end)


def _report_not_finite(state: TrainState, iteration: Iteration, full: GlobalState) -> NoReturn:
    """Find the origin of an infinity or NaN, and end the run; weights and gradients do not change.

    Raises:
        FloatingPointError: always.
    """
    found = _where_not_finite(state, iteration)
    number, steps = iteration.number + 1, state.optimizer.steps
    advice = (
        "lower --lr, or look at these samples"
        if steps
        else "no step was taken before, so look at these samples and at the weights that the run "
        "begins with (--load, --init-method-std)"
    )
    raise FloatingPointError(
        f"iteration {number}: lm loss is {full.loss}: {found}: {advice}; --iterations-to-skip "
        f"{number} passes over them"
    )


def _where_not_finite(state: TrainState, iteration: Iteration) -> str:
    """Return on which rank and in which samples infinity or NaN comes first; all call it."""
    samples, where = _samples(state, iteration), state.pipeline.first_not_finite(iteration.batch)
    if where is not None:
        own_number, rank, what = where
        microbatch = own_number * state.groups.data.size + state.groups.grid.coordinates(rank).data
        size = iteration.batch[own_number].samples
        there = samples[microbatch * size : (microbatch + 1) * size]
        return (
            f"rank {rank} saw it first, in {what}, microbatch {microbatch} of the global batch, "
            f"{samples_in_words(there)}"
        )
    own = bool(torch.isfinite(local_sum_of_squares(state.counted, state.groups.device)))
    finite = state.groups.world.all_gather_object(own)
    ranks = ranks_in_words(rank for rank, is_finite in enumerate(finite) if not is_finite)
    return (
        f"the forward is finite, the gradient is not, on {ranks}; the global batch has "
        f"{samples_in_words(samples)}"
    )
