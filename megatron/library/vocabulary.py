"""Output layer with its loss, and embedding, for a vocabulary that is split over any ranks.

Both are ordinary modules: ``loss.backward()`` differentiates the loss, and gradients are in
``.grad``. The ranks of a process group share the vocabulary, for instance tensor-parallel ranks.
All of them call the modules, and the backward, in the same order. Each rank has the whole input, or
its own part of the tokens (``sequence_parallel``). No rank ever has an [n, V] tensor, for n tokens
and a vocabulary of V entries.
"""

from dataclasses import replace
from typing import Final, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.kernels.autograd import apply
from megatron.layers.vocabulary.output_s import LossOptions
from megatron.layers.vocabulary.shard import VocabularyShard
from megatron.library.vocabulary_autograd import Embeddings, Sharded, SumOverRanks, TokenLosses
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.tensor import tensor_parallel

Reduction = Literal["mean", "sum", "none"]

IGNORED: Final = -100
"""The target that ``torch.nn.functional.cross_entropy`` ignores by default."""


class _SplitVocabulary(nn.Module):
    """A matrix [V, h] whose rows are split over the ranks of a group.

    Each of P ranks has ceil(V / P) rows. The rows behind the V-th are padding: they are never
    predicted, never looked up, and stay zero.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        group: dist.ProcessGroup | None = None,
        weight: nn.Parameter | None = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(vocab_size, hidden_size) < 1:
            raise ValueError(
                f"a vocabulary of {vocab_size} and a hidden size of {hidden_size}: both must be at "
                "least 1"
            )
        axis = _axis(group)
        padded = -(-vocab_size // axis.size) * axis.size
        self.shard = VocabularyShard.of(vocab_size, padded, axis.rank, axis.size)
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        shape = (self.shard.rows, hidden_size)
        if weight is None:
            self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.reset_parameters()
        elif weight.shape != shape:
            raise ValueError(
                f"the given weight has the shape {tuple(weight.shape)}, and this rank has the rows "
                f"{shape} of [{vocab_size}, {hidden_size}]: give the other layer's weight"
            )
        else:
            self.weight = weight
        ranks = tensor_parallel(axis, self.weight.device, sequence_parallel=sequence_parallel)
        self._sharded = Sharded(self.shard, ranks)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw this rank's rows from a normal distribution of standard deviation 0.02.

        Ranks draw different rows, even if they have the same seed.
        """
        device = self.weight.device
        if device.type == "meta":
            return
        seed = int(torch.randint(2**40, ())) + self.shard.first_row
        generator = torch.Generator(device).manual_seed(seed)
        self.weight.normal_(0, 0.02, generator=generator)
        self.weight[self.shard.real_rows :] = 0

    @torch.no_grad()
    def load_whole(self, whole_vh: Tensor) -> None:
        """Take this rank's rows from the whole matrix [V, h].

        Raises:
            ValueError: if the matrix has another shape.
        """
        if whole_vh.shape != (self.vocab_size, self.hidden_size):
            raise ValueError(
                f"the matrix has the shape {tuple(whole_vh.shape)}, not "
                f"{(self.vocab_size, self.hidden_size)}: give all rows, without padding"
            )
        first, real = self.shard.first_real_row, self.shard.real_rows
        self.weight[:real] = whole_vh[first : first + real]
        self.weight[real:] = 0

    def extra_repr(self) -> str:
        """Return the sizes of the module, for ``print``."""
        first, real = self.shard.first_real_row, self.shard.real_rows
        return f"{self.vocab_size} x {self.hidden_size}, rows {first} to {first + real - 1} here"


class VocabParallelHead(_SplitVocabulary):
    """The output layer and its cross entropy, over a vocabulary that is split over ranks.

    With y the target's logit, l all logits and lse their log-sum-exp, a token's loss is ``lse - (1
    - label_smoothing) y - label_smoothing / V sum(l) + z_loss lse^2``. Without the z-loss,
    ``torch.nn.functional.cross_entropy`` of the whole matrix gives the same, in fp32. There is no
    bias.

    Args:
        hidden_size: h.
        vocab_size: V; it need not be a multiple of the ranks.
        group: process group of the ranks that share the matrix; by default all ranks, or this
            process alone where ``torch.distributed`` is not initialised.
        weight: weight of the embedding to which the layer is tied; by default the layer has a
            weight of its own.
        sequence_parallel: each rank has an equal part of the tokens instead of all of them.
        recompute: let the backward form the logits again instead of keeping them. No tensor of
            [tokens, V / P] then outlives a pass, at the price of a third more products.
        label_smoothing: share of the target's probability that is spread over the vocabulary.
        z_loss: weight of the squared log-sum-exp.
        logit_softcap: logits become ``c tanh(logit / c)``; 0 leaves them as they are.
        ignore_index: target of the tokens that have no loss.
        device: of the weight.
        dtype: of the weight.

    Attributes:
        weight: this rank's rows [ceil(V / P), h].
        shard: the place of these rows in the whole matrix.
        options: form of the loss.

    Raises:
        ValueError: for sizes that make no matrix, or a weight of another shape.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        group: dist.ProcessGroup | None = None,
        weight: nn.Parameter | None = None,
        sequence_parallel: bool = False,
        recompute: bool = False,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logit_softcap: float = 0.0,
        ignore_index: int = IGNORED,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            vocab_size,
            hidden_size,
            group=group,
            weight=weight,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        if not 0 <= label_smoothing <= 1 or z_loss < 0 or logit_softcap < 0:
            raise ValueError(
                f"label_smoothing={label_smoothing}, z_loss={z_loss}, "
                f"logit_softcap={logit_softcap}: the first is 0 to 1, the others 0 or more"
            )
        self.options = LossOptions(vocab_size, label_smoothing, z_loss, logit_softcap)
        self.ignore_index = ignore_index
        self.recompute = recompute
        self._sharded = replace(self._sharded, recompute=recompute)

    def forward(self, x: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the loss in fp32 (float64 for float64 input).

        Args:
            x: hidden states [..., h] of all tokens, the same on every rank. With
                ``sequence_parallel``: of this rank's own tokens.
            targets: token ids [...] that these tokens shall predict, int64.
            reduction: ``mean`` is the mean over the tokens that are not ignored (0 if all are
                ignored), ``sum`` the sum over them. Both count the tokens of all ranks, and are the
                same on every rank. ``none`` gives the loss of every token that this rank has, 0 for
                an ignored token.

        Returns:
            A scalar, or [...] with ``none``.

        Raises:
            ValueError: if the shapes or dtypes do not match, or (on a CPU) if a target is not in
                the vocabulary.
        """
        losses, counts = self._token_losses(x, targets, self.options)
        if reduction == "none":
            return losses
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction={reduction!r}: choose mean, sum or none")
        ranks = self._sharded.ranks
        total, valid = losses.sum(), counts.sum()
        if ranks.sequence_parts > 1:
            total = apply(SumOverRanks, total, ranks)
            valid = ranks.all_gather(valid).sum()
        return total if reduction == "sum" else total / valid.clamp_min(1)

    def log_probs(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probability of every target, differentiable; 0 for an ignored target.

        Logits are soft-capped first; label smoothing and z-loss play no part. For a temperature t
        give ``x / t``. ``x`` and ``targets`` are as in ``forward``.

        Returns:
            Log-probabilities [...] of the targets that this rank has.
        """
        options = LossOptions(self.vocab_size, logit_softcap=self.options.logit_softcap)
        return -self._token_losses(x, targets, options)[0]

    def _token_losses(
        self, x: Tensor, targets: Tensor, options: LossOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the losses [...], and for each whether its token counts (is not ignored)."""
        counts = targets != self.ignore_index
        self._check(x, targets, counts)
        x_uh, weight = x.flatten(0, -2), cast("Tensor", self.weight)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x_uh, weight = x_uh.to(dtype), weight.to(dtype)
        elif x.dtype != weight.dtype:
            raise ValueError(f"input in {x.dtype}, weight in {weight.dtype}: they must be alike")
        losses_u = apply(
            TokenLosses,
            x_uh,
            weight,
            targets.flatten(),
            self._sharded,
            options,
            torch.is_grad_enabled() and (x_uh.requires_grad or weight.requires_grad),
        )
        return torch.where(counts, losses_u.view(targets.shape), 0.0), counts

    def _check(self, x: Tensor, targets: Tensor, counts: Tensor) -> None:
        if x.shape != (*targets.shape, self.hidden_size):
            raise ValueError(
                f"input {tuple(x.shape)} and targets {tuple(targets.shape)}: with h = "
                f"{self.hidden_size} the input needs the shape {(*targets.shape, self.hidden_size)}"
            )
        if targets.device.type == "cpu":  # on a GPU, the host would have to wait for the answer
            _check_ids(targets[counts], self.vocab_size)


class VocabParallelEmbedding(_SplitVocabulary):
    """The embedding of tokens, over a vocabulary that is split over ranks.

    Args:
        vocab_size: V; it need not be a multiple of the ranks.
        hidden_size: h.
        group: process group of the ranks that share the matrix; by default all ranks, or this
            process alone where ``torch.distributed`` is not initialised.
        weight: weight of the head to which the layer is tied; by default the layer has a weight of
            its own.
        sequence_parallel: each rank has an equal part of the tokens instead of all of them.
        device: of the weight.
        dtype: of the weight.

    Attributes:
        weight: this rank's rows [ceil(V / P), h].
        shard: the place of these rows in the whole matrix.

    Raises:
        ValueError: for sizes that make no matrix, or a weight of another shape.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., h] of token ids [...].

        Every rank gives all tokens and gets all embeddings. With ``sequence_parallel``, every rank
        gives its own tokens and gets their embeddings.

        Raises:
            ValueError: on a CPU, if a token is not in the vocabulary.
        """
        if tokens.device.type == "cpu":
            _check_ids(tokens, self.vocab_size)
        embedding_uh = apply(Embeddings, self.weight, tokens.flatten(), self._sharded)
        return embedding_uh.view(*tokens.shape, self.hidden_size)


def _axis(group: dist.ProcessGroup | None) -> ConnectedAxis:
    """Return a group as an axis. A single rank has no group, because it does not communicate."""
    if group is None and not dist.is_initialized():
        return ConnectedAxis("vocabulary", 0, (0,))
    own = dist.group.WORLD if group is None else group
    ranks, rank = tuple(dist.get_process_group_ranks(own)), dist.get_rank(own)
    if rank < 0:
        raise ValueError("this process is not in the given group: build the layer on its ranks")
    return ConnectedAxis("vocabulary", rank, ranks, own if len(ranks) > 1 else None)


def _check_ids(ids: Tensor, vocab_size: int) -> None:
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise ValueError(
            f"{int(wrong[0])} is no entry of a vocabulary of {vocab_size}: they are 0 to "
            f"{vocab_size - 1}"
        )
