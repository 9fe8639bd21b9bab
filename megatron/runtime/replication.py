"""The work that a rank shares with its replicas: its place in a program, and its execution."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.model.stage import RankModel
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.sharded import ShardedOptimizer
from megatron.parallel.groups import Groups
from megatron.parallel.lanes import Lane
from megatron.runtime.buckets import described, summands
from megatron.runtime.replica_work import ReplicaWork
from megatron.schedules.buckets import with_reductions, with_updates
from megatron.schedules.lower import Program
from megatron.schedules.plan import Plan


@dataclass(frozen=True)
class Replication:
    """The work that a rank shares with its replicas, and with ranks that sum the same gradients.

    Attributes:
        buckets: the parameters, and where their gradients are.
        overlap_reduce: reduce a bucket as soon as its gradients are complete; otherwise reduce all
            buckets at the end.
        dtype: of gradients while they are sent and summed; ``None``: the gradients' own dtype.
        optimizer: the optimizer, if it is sharded over the replicas.
        deferred: whether the program of an iteration takes the optimizer step of the previous
            iteration.
        overlap_gather: gather parameters while passes run that do not read them.
        gathers_eight_bits: gather the weights of layers that multiply in 8 bits as 8 bits.
    """

    buckets: Sequence[Bucket]
    overlap_reduce: bool = False
    dtype: torch.dtype | None = None
    optimizer: ShardedOptimizer | None = None
    deferred: bool = False
    overlap_gather: bool = False
    gathers_eight_bits: bool = False

    def in_program(
        self, program: Program, model: RankModel, groups: Groups, *, with_steps: bool
    ) -> Program:
        """Return ``program`` with the reductions of all pipeline ranks added.

        Every pipeline rank must call this method, because the ranks exchange the descriptions of
        their buckets.

        If optimizer steps are deferred and ``with_steps`` is true, the program also takes the step
        of the previous iteration.
        """
        owned = [bucket.owned for bucket in self.buckets]
        narrow = model.gathered_weights() if self.gathers_eight_bits else {}
        own = described(owned, model, program.plan, groups.gradients.size, narrow)
        everywhere = groups.pipeline.all_gather_object(own)
        program = with_reductions(program, everywhere, overlap=self.overlap_reduce)
        if not (self.deferred and with_steps):
            return program
        return with_updates(program, everywhere, overlap=self.overlap_gather)

    def work(self, plan: Plan, model: RankModel, groups: Groups, lane: Lane) -> ReplicaWork:
        """Return the object that executes this rank's reductions of ``plan`` on ``lane``."""
        axes = {"tensor": groups.partial_gradients, "ends": groups.ends}
        return ReplicaWork(
            self.buckets,
            [bucket.layout.sizes for bucket in self.buckets],
            [bucket.summed_over(groups.gradients) for bucket in self.buckets],
            lane,
            self.dtype,
            self.optimizer,
            [[axes[n] for n in summands(b.owned[0], model, plan)] for b in self.buckets],
        )
