"""Optimizer steps that no rank waits for (arXiv 2401.10241, section 4).

A synchronous step waits until the gradient norm of the whole model is known. Here a rank waits only
for the ranks before it. Partial sums travel from the first rank to the last. Each rank steps on the
sum so far, and starts the forwards of the next iteration. The last rank's sum is the sum of the
whole model. It travels back to all ranks meanwhile, and every rank checks it before its first
backward. If clipping was needed after all, or a value is not finite, the step is undone exactly, to
the last bit. If all values are finite, it is then taken again with the right norm.

A sum of squares only grows along the ranks. If the whole model needs no clipping, no partial sum
needed clipping, and all ranks have guessed right. If the model needs clipping, only the last rank
can have guessed right. All ranks see the same sum, and reach the same decision.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.optimizer.global_state import GlobalState
from megatron.optimizer.grad_norm import clip_coefficient
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.p2p import Transfer, receive, send


class PostValidatedStep:
    """One rank's step in two parts: ``guess``, then ``validate`` and, if wrong, ``correct``.

    All ranks call these methods in step. Gradients must not change between the two parts. All ranks
    except the last keep a copy of the optimizer's state (``Optimizer.save``).

    Args:
        optimizer: of this rank.
        clip_grad: limit of the global gradient norm; 0 switches clipping off.
        hosts: the axis to sum over, with at least two ranks; sums travel between CPUs.
    """

    def __init__(self, optimizer: Optimizer, clip_grad: float, hosts: ConnectedAxis) -> None:
        assert hosts.size > 1, "a single rank has nobody to wait for"
        self._optimizer = optimizer
        self._clip_grad = clip_grad
        self._hosts = hosts
        self._is_last = hosts.rank == hosts.size - 1
        self._open: _OpenStep | None = None

    def guess(self, rates: Rates, own: GlobalState, loss_scale: float = 1.0) -> None:
        """Take the step that the sums of this rank and all earlier ranks suggest.

        No step is taken if these sums show that it would be wrong.

        Args:
            rates: of the step.
            own: sums over this rank.
            loss_scale: factor in the gradients, but not in the sums.
        """
        assert self._open is None, "the last step has not been validated"
        prefix = self._sum_so_far(own)
        # Before this rank's own step: the next rank waits for the sum only.
        pending = self._pass_on(prefix)
        # The last rank's prefix is the whole sum: it clips at once where the others would not step.
        stepped = prefix.is_finite if self._is_last else self._needs_no_clipping(prefix)
        self._open = _OpenStep(rates, loss_scale, stepped, own.by_microbatch, *pending)
        if stepped:
            if not self._is_last:
                self._optimizer.save()
            self._optimizer.step(rates, prefix.grad_norm, prefix.factor / loss_scale)

    def validate(self) -> tuple[GlobalState, bool]:
        """Wait for the sums over all ranks; return them, and whether every rank's step was right.

        If a step was wrong, the caller must call ``correct``.
        """
        assert self._open is not None, "no step to validate"
        values, mode = self._open.full.wait().tolist(), self._open.by_microbatch
        full = GlobalState.of(values, by_microbatch=mode)
        if self._open.sent is not None:
            # Until then the transfer may still read the sum.
            self._open.sent.wait()
        right = self._needs_no_clipping(full)
        if right:
            self._open = None
        return full, right

    def correct(self, full: GlobalState) -> None:
        """Undo a wrong step and, if the sums are finite, take the right one.

        Args:
            full: the sums that ``validate`` returned.
        """
        assert self._open is not None, "no step to correct"
        step, self._open = self._open, None
        if self._is_last:
            return  # this rank knew all sums when it stepped
        if step.stepped:
            self._optimizer.restore()
        if full.is_finite:
            # A guess never clips; it has multiplied the gradients by the factor.
            factor = 1.0 if step.stepped else full.factor / step.loss_scale
            self._optimizer.step(step.rates, full.grad_norm, factor)

    def _needs_no_clipping(self, state: GlobalState) -> bool:
        return state.is_finite and clip_coefficient(state.grad_norm, self._clip_grad) == 1.0

    def _sum_so_far(self, own: GlobalState) -> GlobalState:
        """Wait for the sum over the earlier ranks, and add this rank's sums."""
        hosts = self._hosts
        if hosts.rank == 0:
            return own
        space = torch.empty(len(own.values), dtype=torch.float64)
        before = receive(space, hosts.rank - 1, hosts).wait()
        return GlobalState.of(before.tolist(), by_microbatch=own.by_microbatch) + own

    def _pass_on(self, prefix: GlobalState) -> "tuple[Transfer, Transfer | None]":
        """Start sending the full sum to all ranks, and the sum so far to the next rank."""
        hosts = self._hosts
        totals = torch.tensor(prefix.values, dtype=torch.float64)
        sent = None if self._is_last else send(totals, hosts.rank + 1, hosts)
        full = totals if self._is_last else torch.empty_like(totals)
        work = dist.broadcast(full, group=hosts.group, group_src=hosts.size - 1, async_op=True)
        assert work is not None, "this rank is not in the group"
        return Transfer(full, work), sent


@dataclass(frozen=True)
class _OpenStep:
    """A step that is not validated yet.

    Attributes:
        rates: of the step.
        loss_scale: factor in the gradients.
        stepped: whether the step was taken.
        by_microbatch: see ``GlobalState``.
        full: transfer of the sums over all ranks.
        sent: transfer of the sums so far to the next rank; ``None`` on the last rank.
    """

    rates: Rates
    loss_scale: float
    stepped: bool
    by_microbatch: bool
    full: Transfer
    sent: Transfer | None
