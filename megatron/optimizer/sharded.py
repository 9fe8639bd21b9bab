"""A sharded optimizer: every replica updates its shard of each bucket (ZeRO-1, arXiv 1910.02054).

After the gradients have been reduced, replica k has the sums of shard k. It keeps the optimizer's
state of shard k only, and updates the shard's weights. Then the replicas gather all weights. Update
and gathering may wait until the next iteration needs a bucket's weights. For this, ``open`` stores
the arguments of a step. The program of the next iteration takes the step bucket by bucket
(``schedules.buckets``), or ``settle`` takes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.optimizer.bucket import Bucket
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.optimizer import Optimizer, check_norm
from megatron.optimizer.parameters import ParameterPart
from megatron.parallel.groups import ConnectedAxis

MakeOptimizer = Callable[[Sequence[ParameterPart]], Optimizer]
"""Returns the optimizer of some parts of parameters."""


@dataclass(frozen=True)
class _OpenStep:
    """The arguments of a step that has not been taken for all buckets."""

    rates: Rates
    grad_norm: float
    factor: float


class ShardedOptimizer:
    """The optimizer of one rank's shards; an ``Optimizer``. All replicas call the same methods.

    Args:
        buckets: of this rank, each with its parameters ``together``, or ``given``.
        make: makes the optimizer of a bucket.
        axis: the replicas, for buckets whose parameters have no ``axis``.
    """

    def __init__(self, buckets: Sequence[Bucket], make: MakeOptimizer, axis: ConnectedAxis) -> None:
        self._buckets = buckets
        self._axes = [bucket.summed_over(axis) for bucket in buckets]
        self._optimizers: list[Optimizer | None] = []  # None: the shard is empty
        self._of: dict[str, Optimizer] = {}
        for bucket, replicas in zip(buckets, self._axes, strict=True):
            parts = list(bucket.parts(replicas.rank))
            optimizer = make(parts) if parts else None
            self._optimizers.append(optimizer)
            if optimizer is not None:
                self._of |= {part.name: optimizer for part in parts}
        self._steps = 0
        self._saved_steps = 0
        self._open: _OpenStep | None = None
        self._to_update: set[int] = set()
        self._to_gather: set[int] = set()
        self._stale: set[int] = set()

    def open(self, rates: Rates, grad_norm: float, factor: float = 1.0) -> None:
        """Store a step for ``update`` and ``gather``; arguments and errors are those of ``step``.

        ``update`` also forgets the gradients of its bucket, because nothing needs them any more.
        """
        check_norm(grad_norm)
        assert not self._to_update, "the last step has not been taken"
        assert not self._to_gather, "the last step's weights have not been gathered"
        self._steps += 1
        self._open = _OpenStep(rates, grad_norm, factor)
        self._to_update = set(range(len(self._buckets)))
        self._to_gather = set(self._to_update)

    def update(self, bucket: int) -> None:
        """Take the open step, if there is one, for this rank's shard of a bucket."""
        if bucket in self._to_update:
            self._to_update.discard(bucket)
            self._step(bucket)
            self._buckets[bucket].forget_gradients()

    def scales_changed(self) -> None:
        """Let ``gather`` round the parameters anew that buckets were ``given``."""
        self._stale = {number for number, own in enumerate(self._buckets) if own.is_given}

    def gather(self, bucket: int) -> None:
        """Gather the weights of a bucket, if they have changed since they were last gathered.

        Scales that have changed change the weights too.
        """
        if bucket in self._to_gather or bucket in self._stale:
            assert bucket not in self._to_update, "update comes before gather"
            self.gather_again(bucket)
            self._to_gather.discard(bucket)
            self._stale.discard(bucket)

    def gather_again(self, bucket: int) -> None:
        """Gather the weights of a bucket, whether they have been updated or not."""
        self._buckets[bucket].gather(self._axes[bucket])

    def settle(self) -> None:
        """Finish an open step: afterwards every rank has the updated weights of all buckets."""
        for bucket in range(len(self._buckets)):
            self.update(bucket)
            self.gather(bucket)

    def step(self, rates: Rates, grad_norm: float, factor: float = 1.0) -> None:
        """As in ``Optimizer``, for all buckets at once; the gradients are not zeroed."""
        self.open(rates, grad_norm, factor)
        self._to_update.clear()
        for bucket in range(len(self._buckets)):
            self._step(bucket)
            self.gather(bucket)

    def tensors_of(self, name: str) -> dict[str, Tensor]:
        """As in ``Optimizer``, of a parameter with rows in this rank's shard."""
        return self._of[name].tensors_of(name)

    @property
    def steps(self) -> int:
        """As in ``Optimizer``."""
        return self._steps

    def loaded(self, steps: int) -> None:
        """As in ``Optimizer``."""
        self._steps = steps
        for optimizer in self._own:
            optimizer.loaded(steps)
        self._gather_all()

    def save(self) -> None:
        """As in ``Optimizer``."""
        self._saved_steps = self._steps
        for optimizer in self._own:
            optimizer.save()

    def restore(self) -> None:
        """As in ``Optimizer``."""
        self._steps = self._saved_steps
        for optimizer in self._own:
            optimizer.restore()
        self._gather_all()

    @property
    def _own(self) -> list[Optimizer]:
        return [optimizer for optimizer in self._optimizers if optimizer is not None]

    def _step(self, bucket: int) -> None:
        optimizer, step = self._optimizers[bucket], self._open
        assert step is not None, "no step is open"
        if optimizer is not None:
            optimizer.step(step.rates, step.grad_norm, step.factor)

    def _gather_all(self) -> None:
        self._to_gather = set(range(len(self._buckets)))
        for bucket in range(len(self._buckets)):
            self.gather(bucket)
