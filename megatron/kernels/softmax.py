"""Statistics of the softmax over the vocabulary, of one shard and of all, and the losses.

Every rank holds a shard of the vocabulary. Pass S leaves a ``ShardState`` of the shard. The
barriers C1 and C2 merge its few numbers per token into ``Merged``, which is the same on every rank
(arXiv 2411.05288, section 4).

Shapes: n tokens (sequence x batch), h hidden size, v rows of this rank's shard without padding,
p shards. Statistics are fp32 (float64 for float64 activations).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.parallel.lanes import keep_until_used


@dataclass(frozen=True)
class LossOptions:
    """Options of a token's loss beyond plain cross-entropy.

    With lse the log-sum-exp over the real vocabulary, y the target's logit and l all logits:
    ``loss = lse - (1 - smoothing) y - smoothing / V sum(l) + z_loss_coeff lse^2``.

    Attributes:
        vocab_size: real vocabulary entries V.
        label_smoothing: share of the target mass spread evenly over the real vocabulary.
        z_loss_coeff: weight of the squared log-partition.
        logit_softcap: logits become ``c tanh(logit / c)``; 0 leaves them as they are.
    """

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss_coeff: float = 0.0
    logit_softcap: float = 0.0

    @property
    def spread(self) -> float:
        """Target mass that every real vocabulary entry gets by label smoothing."""
        return self.label_smoothing / self.vocab_size


class HasStatistics:
    """Names the rows of ``statistics_4n`` that the naive treatment sends separately.

    Attributes:
        statistics_4n: the shard's maximum, sum of exponentials, target logit, sum of logits.
    """

    statistics_4n: Tensor

    @property
    def maximum_n(self) -> Tensor:
        """This shard's maximum. In the naive treatment C1 takes the maximum of it over ranks."""
        return self.statistics_4n[0]

    @property
    def sums_kn(self) -> Tensor:
        """The rows that C2 sums over ranks in the naive treatment, [3, n]: all but the maximum."""
        return self.statistics_4n[1:]


@dataclass
class ShardState(HasStatistics):
    """The state that S leaves for T on one rank, for one microbatch; kernels may add attributes.

    Attributes:
        x_nh: input of the output layer.
        exp_tiles: tiles [t, n], which together have all rows of the shard: exponentials, or logits
            before pass E of the naive treatment. Empty if they are not kept.
        statistics_4n: the shard's maximum, sum of exponentials, target logit (0 if the target is
            on another shard), sum of logits.
        raw_gradient_nh: A, the exponentials (relative to the shard's maximum) times the output
            matrix M (Algorithm 2 only).
    """

    x_nh: Tensor
    exp_tiles: Sequence[Tensor]
    statistics_4n: Tensor
    raw_gradient_nh: Tensor | None

    def drop_gradient(self) -> None:
        """Release A; pending work of the current stream may still read it."""
        if self.raw_gradient_nh is not None:
            keep_until_used(self.raw_gradient_nh)
        self.raw_gradient_nh = None


@dataclass(frozen=True)
class Merged:
    """Statistics over the whole vocabulary, the same on every rank after C1.

    Attributes:
        max_n: m, the maximum.
        sum_n: s, the sum of exponentials relative to m.
        target_n: y, the target's logit.
        logit_sum_n: the sum of all logits.
    """

    max_n: Tensor
    sum_n: Tensor
    target_n: Tensor
    logit_sum_n: Tensor

    @property
    def lse_n(self) -> Tensor:
        """Log-sum-exp of every token."""
        return self.max_n + self.sum_n.log()


def statistics_dtype(activation: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics and accumulators: at least fp32."""
    return torch.promote_types(activation, torch.float32)


def merge_statistics(statistics_p4n: Tensor) -> Merged:
    """Merge the gathered statistics of all shards by log-sum-exp (the arithmetic of C1).

    Args:
        statistics_p4n: ``ShardState.statistics_4n`` of every rank.
    """
    return Merged(*_merged(statistics_p4n))


def merge_some_statistics(statistics_t4n: Tensor) -> Tensor:
    """Merge the statistics of some shards as ``merge_statistics`` does.

    Returns:
        Statistics of the same form [4, n], as if these shards were one.
    """
    return torch.stack(_merged(statistics_t4n))


def _merged(statistics_p4n: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    local_max_pn, local_sum_pn = statistics_p4n[:, 0], statistics_p4n[:, 1]
    max_n = local_max_pn.amax(0)
    # A shard of padding only has a maximum of -inf, and so have several such shards together.
    finite_n = max_n.clamp_min(torch.finfo(max_n.dtype).min)
    # s = Σ s' exp(m' - m): each shard's sum is relative to its own maximum (section 4, C1).
    sum_n = (local_sum_pn * (local_max_pn - finite_n).exp()).sum(0)
    return max_n, sum_n, statistics_p4n[:, 2].sum(0), statistics_p4n[:, 3].sum(0)


def token_losses(merged: Merged, options: LossOptions) -> Tensor:
    """Return the loss of every token [n], before its weight g."""
    lse_n = merged.lse_n
    loss_n = lse_n - (1 - options.label_smoothing) * merged.target_n
    if options.label_smoothing:
        loss_n = loss_n - options.spread * merged.logit_sum_n
    if options.z_loss_coeff:
        loss_n = loss_n + options.z_loss_coeff * lse_n.square()
    return loss_n


def row_factor(merged: Merged, options: LossOptions) -> Tensor:
    """Return [n], the factor that turns exponentials relative to m into gradients of the logits."""
    factor_n = 1 / merged.sum_n
    if options.z_loss_coeff:
        # The derivative of lse is the softmax, so z lse² adds 2 z lse softmax: one more factor.
        factor_n = factor_n * (1 + 2 * options.z_loss_coeff * merged.lse_n)
    return factor_n


def rescale_sum(state: ShardState, maximum_n: Tensor) -> None:
    """Pass E of an evaluation: make the shard's sum relative to the maximum over all ranks.

    Args:
        state: the result of ``OutputLayer.evaluate``.
        maximum_n: m, the maximum over all ranks.
    """
    max_n, sum_n, _, _ = state.statistics_4n
    # First the sum: the next line overwrites the maximum that it is relative to.
    sum_n.mul_((max_n - maximum_n).exp_())
    max_n.copy_(maximum_n)


def merged_from(maximum_n: Tensor, sums_kn: Tensor) -> Merged:
    """Return the statistics of the whole vocabulary.

    Args:
        maximum_n: ``ShardState.maximum_n``, maximised over ranks (C1).
        sums_kn: ``ShardState.sums_kn``, summed over ranks (C2), [3, n].
    """
    return Merged(maximum_n, *sums_kn)
