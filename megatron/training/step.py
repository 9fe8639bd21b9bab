"""An iteration of training: its inputs, its outcome, and the synchronous step.

In a synchronous step, all ranks wait for the gradient norm of the whole model, and then step
together. The step on a guess is in ``post_validated_step``, which also chooses between the two
steps. Both do the same arithmetic in the same order. So on CPUs, where a repeated run is equal bit
for bit, both give equal losses and weights. (On CUDA, atomic additions to rows of the vocabulary's
gradients come in any order.)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch

from megatron.optimizer.global_state import GlobalState, add_up, over_ranks, own_totals
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.model_figures import norm_of_weights, zeros_in_gradient
from megatron.runtime.batch import DeviceMicrobatch, token_counts
from megatron.runtime.observer import Observer
from megatron.training.layer_figures import NO_LAYERS, LayerReport, summed_loads
from megatron.training.not_finite import report_not_finite
from megatron.training.setup import TrainState


@dataclass(frozen=True)
class Iteration:
    """The inputs of a training iteration.

    Attributes:
        number: counted from 0.
        batch: its microbatches.
        rates: returns the rates of the step; its argument is the number of earlier samples that led
            to no step.
        consumed_samples: samples of this iteration and of all iterations before.
        loss_scale: factor that the weights of the losses contain.
    """

    number: int
    batch: Sequence[DeviceMicrobatch]
    rates: Callable[[int], Rates]
    consumed_samples: int
    loss_scale: float = 1.0

    @property
    def by_microbatch(self) -> bool:
        """Whether every microbatch has the same weight; otherwise every token that counts has."""
        return self.batch[0].loss_factor is not None


@dataclass(frozen=True)
class Finished:
    """An iteration whose step stands.

    Attributes:
        number: counted from 0.
        loss: mean over the valid tokens; of an iteration that was passed over, 0.
        grad_norm: norm of the whole model's gradient, before clipping; of an iteration that was
            passed over, NaN.
        consumed_samples: samples of this iteration and of all iterations before.
        step_redone: whether its step was a wrong guess and was taken again.
        num_zeros: zero elements of the model's gradient; ``None``: they are not counted.
        params_norm: norm of the model's weights after its step; ``None``: it is not asked for.
        samples: its samples, by their place in the order of training.
        is_skipped: whether it took no step.
        loss_scale: loss scale of the next iteration; ``None``: losses are not scaled.
        samples_without_step: samples of all iterations so far that took no step; rates do not
            count them.
        depth_losses: loss of every depth of multi-token prediction, mean over the tokens that count
            there; ``loss`` does not include them.
        layers: losses of layers and balance of experts; ``loss`` does not include them.
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
    loss_scale: float | None = None
    samples_without_step: int = 0
    depth_losses: tuple[float, ...] = ()
    layers: LayerReport = NO_LAYERS


class TrainStep(Protocol):
    """A way to train an iteration; every rank uses the same way."""

    @property
    def loss_scale(self) -> float:
        """The loss scale that the next iteration must have when it is handed to ``train``."""
        ...

    def train(self, iteration: Iteration, observer: Observer | None = None) -> Finished | None:
        """Run the forward, the backward and the optimizer's step of an iteration.

        Args:
            iteration: its inputs.
            observer: is told of passes and communication, and told twice if the iteration must run
                twice. A call of ``settle`` right before ``train`` prevents a second run.

        Returns:
            The iteration that this call has made final, if any.

        Raises:
            FloatingPointError: the loss or the gradient of the iteration that would have become
                final is infinite or NaN; it has changed no weight.
        """
        ...

    def settle(self) -> Finished | None:
        """Make the last iteration final and return it, if ``train`` has not done so.

        Call it before any code outside of ``train`` reads weights. Raises as ``train`` does.
        """
        ...


@dataclass(frozen=True)
class Figures:
    """Finds figures of the whole model besides loss and gradient norm, if they are asked for.

    Every rank calls every method.
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
        """Return the norm of the weights after the step; take a sharded optimizer's open step."""
        state, groups = self.state, self.state.groups
        if not self.find_norm:
            return None
        if state.sharded is not None:
            state.sharded.settle()
        return norm_of_weights(state.counted, groups.world, groups.device)


class SynchronousTrainStep:
    """Waits for loss and gradient norm of the whole model, then steps."""

    def __init__(
        self, state: TrainState, figures: Figures | None = None, ends_if_not_finite: bool = True
    ) -> None:
        self._state = state
        self._figures = figures or Figures(state)
        self._ends_if_not_finite = ends_if_not_finite

    @property
    def loss_scale(self) -> float:
        """As in ``TrainStep``."""
        return self._state.loss_scaler.state.scale

    def train(self, iteration: Iteration, observer: Observer | None = None) -> Finished:
        """As in ``TrainStep``; the returned iteration is always ``iteration``."""
        state = self._state
        loss = state.pipeline.train(iteration.batch, iteration.number, observer)
        assert loss is not None, "nothing stops the iteration"
        sums, loads = sums_of_rank(state, iteration, loss)
        full = add_up(sums, state.groups.pipeline, by_microbatch=iteration.by_microbatch)
        if not full.is_finite:
            if self._ends_if_not_finite:
                end_not_finite(state, iteration, full)
            state.zero_gradients()
            return finish(state, iteration, full)
        num_zeros = self._figures.num_zeros()
        rates, factor = own_rates(state, iteration), full.factor / iteration.loss_scale
        if state.sharded is not None:  # the next iteration takes the step, or settle does
            state.sharded.open(rates, full.grad_norm, factor)
        else:
            state.optimizer.step(rates, full.grad_norm, factor)
            state.zero_gradients()
        state.expert_biases.update(loads)
        return finish(state, iteration, full, (num_zeros, self._figures.params_norm()))

    def settle(self) -> None:
        """Take the step of a sharded optimizer; ``train`` has made every iteration final."""
        if self._state.sharded is not None:
            self._state.sharded.settle()


def sums_of_rank(
    state: TrainState, iteration: Iteration, loss: torch.Tensor
) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
    """Return the sums over this rank, its replicas and its tensor-parallel neighbours.

    Only the first rank of each replica adds numbers of tokens.

    Returns:
        The sums, and how often each expert was chosen in the global batch, by layer of this rank.
    """
    groups, figures, own = state.groups, state.layer_figures, state.pipeline.of_layers()
    state.complete_gradients()
    state.agree_on_scales()
    tokens = token_counts(iteration.batch) if groups.vocabulary.rank == 0 else (0.0, 0.0)
    splits_tokens = state.pipeline.model.tensor.sequence_parts > 1
    loads = summed_loads(own, groups, splits_tokens=splits_tokens)
    is_first = groups.data.rank == groups.tensor.rank == 0
    totals = own_totals(
        figures.joined(loss, own),
        state.counted,
        tokens,
        state.kernels,
        iteration.loss_scale,
        figures.imbalances(loads if is_first else {}, loss.device),
    )
    state.own_sums.latest = totals
    return over_ranks(over_ranks(totals, groups.data), groups.tensor_sums), loads


def own_rates(state: TrainState, iteration: Iteration) -> Rates:
    """Return the rates of an iteration's step, when all iterations before are final.

    As in Megatron, iterations that took no step do not count.
    """
    return iteration.rates(state.loss_scaler.state.samples_without_step)


def finish(
    state: TrainState,
    iteration: Iteration,
    full: GlobalState,
    figures: tuple[int | None, float | None] = (None, None),
    *,
    step_redone: bool = False,
) -> Finished:
    """Update the loss scale by the outcome of an iteration, and return the finished iteration.

    ``figures`` are the number of zeros in the gradient, and the norm of the weights after the step.
    """
    samples, scaler = _samples(state, iteration), state.loss_scaler
    depth_losses, layers = state.layer_figures.read(full)
    scaler.update(full.is_finite, len(samples))
    return Finished(
        iteration.number,
        full.loss,
        full.grad_norm,
        iteration.consumed_samples,
        step_redone and full.is_finite,
        *figures,
        samples,
        not full.is_finite,
        scaler.state.scale if scaler.is_active else None,
        scaler.state.samples_without_step,
        depth_losses,
        layers,
    )


def end_not_finite(state: TrainState, iteration: Iteration, full: GlobalState) -> NoReturn:
    """End the run because of an infinite or NaN loss or gradient; raise as ``train`` does."""
    samples = _samples(state, iteration)
    report_not_finite(state, iteration.number, iteration.batch, full.loss, samples)


def _samples(state: TrainState, iteration: Iteration) -> range:
    """Return the samples of the global batch, by their place in the order of training."""
    own = sum(microbatch.samples for microbatch in iteration.batch)
    end = iteration.consumed_samples
    return range(end - own * state.groups.replica[1], end)
