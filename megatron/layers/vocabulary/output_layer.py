"""The output layer of one rank: its shard of the matrix, and the passes S and T over microbatches.

The kernels do the mathematics. The layer holds the rooms of the exponentials, which are reused from
microbatch to microbatch (``rooms.py``).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.kernels.face import Kernels
from megatron.kernels.softmax import LossOptions, Merged, ShardState, merged_from, rescale_sum
from megatron.layers.main_grad import take_main_grad
from megatron.layers.vocabulary.rooms import FreeRooms
from megatron.layers.vocabulary.shard import VocabularyShard


class OutputLayer(nn.Module):
    """Output matrix of one vocabulary shard, with S and T.

    Args:
        shard: which rows this rank holds.
        weight: [rows, h], shared with the input layer when embeddings are tied.
        options: form of the loss.
        kernels: of the device and dtype of ``weight``.
        recompute: keep no exponentials from S to T; T computes them again.
        rooms: gives the memory of exponentials; ``None``: rooms of this layer alone.
    """

    def __init__(
        self,
        shard: VocabularyShard,
        weight: nn.Parameter,
        options: LossOptions,
        kernels: Kernels,
        recompute: bool = False,
        rooms: FreeRooms[Sequence[Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.shard = shard
        self.weight = weight
        self.options = options
        self._kernels = kernels
        self._recompute = recompute
        self._rooms = FreeRooms[Sequence[Tensor]]() if rooms is None else rooms

    @property
    def real_weight(self) -> Tensor:
        """The rows without padding [v, h], detached."""
        return self.weight.detach()[: self.shard.real_rows]

    @torch.no_grad()
    def logits(self, x_nh: Tensor) -> Tensor:
        """Return the logits of the real rows [n, v], soft-capped, in fp32 or wider."""
        wide = torch.promote_types(x_nh.dtype, torch.float32)
        logits_nv = (x_nh @ self.real_weight.T).to(wide)
        cap = self.options.logit_softcap
        return cap * torch.tanh(logits_nv / cap) if cap else logits_nv

    @torch.no_grad()
    def s(self, x_nh: Tensor, targets_n: Tensor, form_gradient: bool) -> ShardState:
        """Pass S: exponentials and statistics of this shard.

        With ``form_gradient`` S also begins the input gradient (Algorithm 2).
        """
        keep = not self._recompute
        room = self._take_room(x_nh) if keep else self._scratch(x_nh)
        return self._statistics(x_nh, targets_n, room, form_gradient, keep)

    @torch.no_grad()
    def evaluate(self, x_nh: Tensor, targets_n: Tensor) -> ShardState:
        """Pass S of an evaluation: statistics only, in scratch memory."""
        room = self._scratch(x_nh)
        return self._statistics(x_nh, targets_n, room, form_gradient=False, keep=False)

    @torch.no_grad()
    def naive_s(self, x_nh: Tensor, targets_n: Tensor) -> ShardState:
        """Pass S of the naive treatment: logits; C1 then takes the maximum of ``maximum_n``.

        If the logits are not kept, S computes all statistics of its shard at once. Logits are not
        kept in an evaluation (a module set to ``eval()``), and if T computes the logits again.
        """
        if not self._keeps_logits:
            return self.evaluate(x_nh, targets_n)
        return self._kernels.naive_s(
            x_nh,
            self.real_weight,
            targets_n,
            self.shard.first_row,
            self.options,
            self._take_room(x_nh),
        )

    @torch.no_grad()
    def naive_e(self, state: ShardState, maximum_n: Tensor) -> None:
        """Pass E of the naive treatment: form the exponentials and their sums.

        C2 then adds up the sums (``state.sums_kn``) of all shards.
        """
        if self._keeps_logits:
            self._kernels.naive_e(state, maximum_n, self.options)
        else:
            rescale_sum(state, maximum_n)

    merged_from = staticmethod(merged_from)

    @torch.no_grad()
    def merge(
        self, statistics_p4n: Tensor, state: ShardState, weight_n: Tensor
    ) -> tuple[Merged, Tensor | None]:
        """Merge statistics, in C1 between its collectives; see ``Kernels``.

        Args:
            statistics_p4n: statistics of all shards.
            state: the state that S left.
            weight_n: g, the weight of each token's loss.

        Returns:
            Statistics over the whole vocabulary, and this shard's part of the input gradient [n, h]
            if S has begun it.
        """
        return self._kernels.merge(statistics_p4n, state, self.real_weight, weight_n, self.options)

    @torch.no_grad()
    def t(
        self,
        state: ShardState,
        merged: Merged,
        weight_n: Tensor,
        *,
        form_gradient: bool = False,
        keeps_room: bool = False,
    ) -> Tensor | None:
        """Pass T: the weight gradient, into ``main_grad``.

        Args:
            state: the state that S left.
            merged: statistics over the whole vocabulary.
            weight_n: g, the weight of each token's loss.
            form_gradient: form the input gradient too, as Algorithm 1 and the naive treatment do.
            keeps_room: the state keeps the memory of its exponentials, which no other microbatch
                may have: a graph of S writes there again.

        Returns:
            This shard's part of the input gradient [n, h], or ``None`` without ``form_gradient``.
        """
        weight_vh = self.real_weight
        total, begins = take_main_grad(self.weight)
        if begins:
            total[len(weight_vh) :].zero_()  # the rows of padding
        gradient_nh = self._kernels.output_t(
            state,
            weight_vh,
            total[: len(weight_vh)],
            merged,
            weight_n,
            self.options,
            self._scratch(state.x_nh) if self._recompute else None,
            form_gradient=form_gradient,
            begins=begins,
        )
        if not (self._recompute or keeps_room):
            # The next S writes there on the same stream, behind these products.
            self._rooms.give(state.exp_tiles)
        return gradient_nh

    @property
    def _keeps_logits(self) -> bool:
        return self.training and not self._recompute

    def _statistics(
        self,
        x_nh: Tensor,
        targets_n: Tensor,
        room: Sequence[Tensor],
        form_gradient: bool,
        keep: bool,
    ) -> ShardState:
        return self._kernels.output_s(
            x_nh,
            self.real_weight,
            targets_n,
            self.shard.first_row,
            self.options,
            room,
            form_gradient=form_gradient,
            keep=keep,
        )

    def _scratch(self, x_nh: Tensor) -> Sequence[Tensor]:
        """Return memory for logits that are not kept."""
        return self._kernels.scratch_room(x_nh, self.shard.real_rows, again=self._recompute)

    def _take_room(self, x_nh: Tensor) -> Sequence[Tensor]:
        """Return a free room for one microbatch's exponentials, or a new one."""
        return self._rooms.take(
            # A shard without rows has no tiles, so any of its rooms fits.
            lambda own: not own or own[0].shape[1] == len(x_nh),
            lambda: self._kernels.kept_room(x_nh, self.shard.real_rows),
        )
