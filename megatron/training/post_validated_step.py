"""Iterations whose steps are taken on a guess and checked later, and the choice of the step.

Each rank steps on the norm that it knows (optimizer post-validation, arXiv 2401.10241). An
iteration is reported one iteration late, because only then it is known whether its step was right.
"""

from dataclasses import replace

from megatron.optimizer.global_state import GlobalState
from megatron.optimizer.post_validation import PostValidatedStep
from megatron.optimizer.settings import OptimizerSettings
from megatron.run.log import LogSettings
from megatron.runtime.batch import rescaled
from megatron.runtime.observer import Observer
from megatron.training.setup import TrainState
from megatron.training.step import (
    Figures,
    Finished,
    Iteration,
    SynchronousTrainStep,
    TrainStep,
    end_not_finite,
    finish,
    own_rates,
    sums_of_rank,
)


class PostValidatedTrainStep:
    """Steps on a guess of the global norm, and checks it before the next iteration's first B.

    The next iteration's first forwards run before the check; a wrong guess makes them run again.

    ``state`` belongs to a pipeline of two or more ranks. If ``clip_grad`` is 0, nothing is clipped.
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

    @property
    def loss_scale(self) -> float:
        """As in ``TrainStep``, on the guess that the gradients of the last iteration are finite.

        If this guess is wrong, the last step is wrong too, so the next iteration runs twice anyway.
        """
        scaler = self._state.loss_scaler
        state = scaler.state if self._open is None else scaler.after(finite=True, samples=0)
        return state.scale

    def train(self, iteration: Iteration, observer: Observer | None = None) -> Finished | None:
        """As in ``TrainStep``; the result is that of the iteration before."""
        state, finished = self._state, None
        if self._open is None:
            loss = state.pipeline.train(iteration.batch, iteration.number, observer)
        else:
            loss = state.pipeline.train(
                iteration.batch, iteration.number, observer, gate=self._stands
            )
            finished = self._close()
            if loss is None:  # the forwards had wrong weights, and maybe another loss scale
                iteration = self._with_loss_scale(iteration)
                loss = state.pipeline.train(iteration.batch, iteration.number, observer)
        assert loss is not None, "nothing stops an iteration with the right weights"
        sums, loads = sums_of_rank(state, iteration, loss)
        self._num_zeros = self._figures.num_zeros()
        self._step.guess(
            own_rates(state, iteration),
            GlobalState.of(sums.tolist(), by_microbatch=iteration.by_microbatch),
            iteration.loss_scale,
        )
        state.expert_biases.update(loads)
        self._open = iteration
        return finished

    def _with_loss_scale(self, iteration: Iteration) -> Iteration:
        """Return an iteration with the loss scale that is now known to be right."""
        scale = self._state.loss_scaler.state.scale
        if scale == iteration.loss_scale:
            return iteration
        batch = rescaled(iteration.batch, scale / iteration.loss_scale)
        return replace(iteration, batch=batch, loss_scale=scale)

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
            if not full.is_finite:
                self._state.expert_biases.undo()
            if self._ends_if_not_finite and not full.is_finite:
                end_not_finite(self._state, iteration, full)
            self._state.zero_gradients()
        figures = self._num_zeros, self._figures.params_norm()
        return finish(self._state, iteration, full, figures, step_redone=not right)


def make_train_step(
    config: OptimizerSettings,
    state: TrainState,
    log: LogSettings | None = None,
    *,
    ends_if_not_finite: bool = True,
) -> TrainStep:
    """Return the train step that ``config`` asks for; a single pipeline rank steps without a guess.

    Args:
        config: whether steps are post-validated.
        state: this rank.
        log: which figures of the model are logged; ``None``: only loss and gradient norm.
        ends_if_not_finite: whether an infinite or NaN loss or gradient norm ends the run; if not,
            the iteration takes no step. With a loss scale that changes, as in Megatron, the run
            never ends for this reason: overflows are the way to find the scale.
    """
    scaling = config.loss_scale
    ends_if_not_finite = ends_if_not_finite and (scaling is None or scaling.loss_scale is not None)
    figures = Figures(state)
    if log is not None:
        figures = Figures(state, log.log_num_zeros_in_grad, log.log_params_norm)
    if config.post_validation and state.groups.pipeline.size > 1:
        return PostValidatedTrainStep(state, config.clip_grad, figures, ends_if_not_finite)
    return SynchronousTrainStep(state, figures, ends_if_not_finite)
