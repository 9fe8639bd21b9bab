"""An optimizer whose masters and moments are on the host, and that steps on the CPU.

Weights and gradients stay on the device. A step copies gradients to the host, updates the masters
there, rounds them, and copies the new weights back. The update is that of the same optimizer on a
CPU, over the same parts. So on CPUs the bits are those of a step without this class.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron.kernels.reference.optimizer import divide
from megatron.optimizer.host_link import HostLink
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.mixed_precision import divisors_of
from megatron.optimizer.optimizer import Optimizer, check_norm
from megatron.optimizer.parameters import ParameterPart
from megatron.optimizer.sharded import MakeOptimizer
from megatron.parallel.lanes import Done, Pending, wait_on_host


class _Batch:
    """Some parts, and their optimizer on the host.

    Attributes:
        parts: on the device.
        optimizer: of the same parts on the host.
        slot: holds the gradients and the rounded weights of ``optimizer`` for a step. Other batches
            use it before and after.
        steps: number of steps that the batch has taken, those included that were undone.
    """

    def __init__(self, parts: Sequence[ParameterPart], make: MakeOptimizer, link: HostLink) -> None:
        self.parts, self.slot, self.steps = parts, link.enter(self), 0
        self._there = link.on_host(parts, self.slot)
        self.optimizer = make(self._there)
        self._link = link
        self._arriving: Pending[None] = Done(None)

    def fetch(self) -> Pending[None]:
        """Begin to copy the gradients to the host, unless that has begun."""
        if self.slot.user is not self:
            self.slot.user = self
            pairs = [(own.gradient, to.gradient) for own, to in self._pairs]
            self._arriving = self._link.out.submit(partial(self._copy, pairs))
        return self._arriving

    def step(self, rates: Rates, grad_norm: float, factor: float) -> None:
        """Update this batch of parts, while the gradients of the next batch arrive."""
        wait_on_host(self.fetch())
        self._link.fetch_after(self)
        self.change(partial(self.optimizer.step, rates, grad_norm, factor))
        self.slot.user = None
        self.steps += 1

    def change(self, work: Callable[[], None]) -> None:
        """Run ``work``, which changes the weights on the host, and begin to copy these back."""
        self.slot.clear()
        work()
        self.hand_back()

    def hand_back(self) -> None:
        """Begin to copy the weights to the device."""
        self.slot.leaving = self._link.back.submit(
            partial(self._copy, [(own.weight, to.weight) for to, own in self._pairs])
        )

    @property
    def _pairs(self) -> Iterator[tuple[ParameterPart, ParameterPart]]:
        """The parts on the device, each with its copy on the host."""
        return zip(self.parts, self._there, strict=True)

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for source, target in pairs:
            self._link.copy(source, target)


class HostOptimizer:
    """Updates parts of parameters on the host; an ``Optimizer``.

    Args:
        parts: parts on the device, at least one.
        make: makes the optimizer of some of the parts on the host.
        link: the way to the host.
        clip_grad: limit of the global gradient norm; 0 switches clipping off.
        steps_again: whether a step may be undone and taken again from the same gradients.
    """

    def __init__(
        self,
        parts: Sequence[ParameterPart],
        make: MakeOptimizer,
        link: HostLink,
        clip_grad: float,
        *,
        steps_again: bool,
    ) -> None:
        self._clip_grad, self._steps_again = clip_grad, steps_again
        self._gradients = [part.gradient for part in parts]
        self._batches = [_Batch(own, make, link) for own in link.batches(parts)]
        self._of = {part.name: batch.optimizer for batch in self._batches for part in batch.parts}

    @torch.no_grad()
    def step(self, rates: Rates, grad_norm: float, factor: float = 1.0) -> None:
        """As in ``Optimizer``."""
        check_norm(grad_norm)
        for batch in self._batches:
            batch.step(rates, grad_norm, factor)
        self._finish()
        # A corrected step reads the gradients on the device, and expects them divided, as after any
        # other optimizer's step.
        if self._steps_again:
            divide(self._gradients, divisors_of(factor, grad_norm, self._clip_grad))

    def _finish(self) -> None:
        """Let the device wait for all weights."""
        for batch in self._batches:
            if batch.slot.leaving is not None:
                batch.slot.leaving.wait()

    def tensors_of(self, name: str) -> dict[str, Tensor]:
        """As in ``Optimizer``; the tensors are on the host."""
        return self._of[name].tensors_of(name)

    @property
    def steps(self) -> int:
        """As in ``Optimizer``."""
        return self._batches[0].optimizer.steps

    @torch.no_grad()
    def loaded(self, steps: int) -> None:
        """As in ``Optimizer``."""
        for batch in self._batches:
            batch.change(partial(batch.optimizer.loaded, steps))
        self._finish()

    def save(self) -> None:
        """As in ``Optimizer``; the copy is on the host."""
        for batch in self._batches:
            batch.optimizer.save()

    @torch.no_grad()
    def restore(self) -> None:
        """As in ``Optimizer``."""
        for batch in self._batches:
            batch.change(batch.optimizer.restore)
        self._finish()


class SplitOptimizer:
    """Optimizers of different parts, which step together; an ``Optimizer``.

    Args:
        optimizers: each with its parts.
        names: for each of them, the names of its parts.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Sequence[Sequence[str]]) -> None:
        self._optimizers = optimizers
        self._of = {
            name: optimizer
            for optimizer, own in zip(optimizers, names, strict=True)
            for name in own
        }

    def step(self, rates: Rates, grad_norm: float, factor: float = 1.0) -> None:
        """As in ``Optimizer``."""
        for optimizer in self._optimizers:
            optimizer.step(rates, grad_norm, factor)

    def tensors_of(self, name: str) -> dict[str, Tensor]:
        """As in ``Optimizer``."""
        return self._of[name].tensors_of(name)

    @property
    def steps(self) -> int:
        """As in ``Optimizer``."""
        return self._optimizers[0].steps

    def loaded(self, steps: int) -> None:
        """As in ``Optimizer``."""
        for optimizer in self._optimizers:
            optimizer.loaded(steps)

    def save(self) -> None:
        """As in ``Optimizer``."""
        for optimizer in self._optimizers:
            optimizer.save()

    def restore(self) -> None:
        """As in ``Optimizer``."""
        for optimizer in self._optimizers:
            optimizer.restore()
