"""The output layer of one rank: its shard of the matrix, and the passes S and T over microbatches.

The mathematics is in ``output_s``, ``output_t``, ``output_t_again`` and ``naive_output``. This file
holds the buffers of the exponentials, which are reused from microbatch to microbatch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.kernels.face import Kernels
from megatron.layers.main_grad import main_grad_of
from megatron.layers.vocabulary import naive_output, output_s, output_t, output_t_again
from megatron.layers.vocabulary.output_s import LossOptions, Merged, ShardState
from megatron.layers.vocabulary.shard import VocabularyShard


class OutputLayer(nn.Module):
    """Output matrix of one vocabulary shard, with S and T.

    Args:
        shard: which rows this rank holds.
        weight: [rows, h], shared with the input layer when embeddings are tied.
        options: form of the loss.
        kernels: of the device and type of ``weight``.
        recompute: keep no exponentials from S to T, which forms them again.
    """

    def __init__(
        self,
        shard: VocabularyShard,
        weight: nn.Parameter,
        options: LossOptions,
        kernels: Kernels,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.shard = shard
        self.weight = weight
        self.options = options
        self._kernels = kernels
        self._recompute = recompute
        self._free: list[Sequence[Tensor]] = []

    @property
    def real_weight(self) -> Tensor:
        """The rows without padding [v, h], detached."""
        return self.weight.detach()[: self.shard.real_rows]

    @torch.no_grad()
    def s(self, x_nh: Tensor, targets_n: Tensor, form_gradient: bool) -> ShardState:
        """Pass S: exponentials and statistics of this shard; with ``form_gradient`` A and D too."""
        keep = not self._recompute
        tiles = self._take_tiles(x_nh) if keep else self._one_tile(x_nh)
        return self._statistics(x_nh, targets_n, tiles, form_gradient, keep)

    @torch.no_grad()
    def evaluate(self, x_nh: Tensor, targets_n: Tensor) -> ShardState:
        """Pass S of an evaluation: statistics only, over one tile of scratch memory."""
        tiles = self._one_tile(x_nh)
        return self._statistics(x_nh, targets_n, tiles, form_gradient=False, keep=False)

    @torch.no_grad()
    def naive_s(self, x_nh: Tensor, targets_n: Tensor) -> ShardState:
        """Pass S of the naive treatment: logits; C1 then maximises the state's ``maximum_n``.

        If the logits are not kept, S does all work that a shard can do alone. So it is in an
        evaluation (a module set to ``eval()``), and where T forms the logits again.
        """
        if not self._keeps_logits:
            return self.evaluate(x_nh, targets_n)
        return naive_output.naive_s(
            x_nh,
            self.real_weight,
            targets_n,
            self.shard.first_row,
            self.options,
            self._take_tiles(x_nh),
        )

    @torch.no_grad()
    def naive_e(self, state: ShardState, maximum_n: Tensor) -> None:
        """Pass E of the naive treatment: exponentials; C2 then sums the state's ``sums_kn``."""
        if self._keeps_logits:
            naive_output.naive_e(state, maximum_n, self.options, self._kernels)
        else:
            naive_output.rescale_sum(state, maximum_n)

    merged_from = staticmethod(naive_output.merged_from)

    @torch.no_grad()
    def t(
        self, state: ShardState, merged: Merged, weight_n: Tensor, *, form_gradient: bool = False
    ) -> Tensor | None:
        """Pass T: the weight gradient, into ``main_grad``.

        Args:
            state: the state that S left.
            merged: statistics over the whole vocabulary.
            weight_n: g, the weight of each token's loss.
            form_gradient: as Algorithm 1 and the naive treatment do.

        Returns:
            This shard's part of the input gradient [n, h], or ``None`` without ``form_gradient``.
        """
        weight_vh, options, kernels = self.real_weight, self.options, self._kernels
        gradient_vh, gradient_nh = main_grad_of(self.weight)[: len(weight_vh)], None
        if self._recompute:
            return output_t_again.t_again(
                state,
                weight_vh,
                gradient_vh,
                merged,
                weight_n,
                options,
                self._one_tile(state.x_nh),
                form_gradient=form_gradient,
                kernels=kernels,
            )
        if form_gradient:
            gradient_nh = output_t.input_gradient_in_t(
                state, weight_vh, merged, weight_n, options, kernels
            )
        output_t.subtract_target_gradient(gradient_vh, state, weight_n, options)
        factor_kn = output_t.tile_factors(state, merged, weight_n, options)
        output_t.add_weight_gradient(gradient_vh, state, factor_kn, kernels)
        self._free.append(state.exp_tiles)
        return gradient_nh

    @property
    def _keeps_logits(self) -> bool:
        return self.training and not self._recompute

    def _statistics(
        self,
        x_nh: Tensor,
        targets_n: Tensor,
        tiles: Sequence[Tensor],
        form_gradient: bool,
        keep: bool,
    ) -> ShardState:
        return output_s.output_s(
            x_nh,
            self.real_weight,
            targets_n,
            self.shard.first_row,
            self.options,
            tiles,
            form_gradient=form_gradient,
            keep=keep,
            kernels=self._kernels,
        )

    def _one_tile(self, x_nh: Tensor) -> Sequence[Tensor]:
        """Return buffers for tiles that are not kept; they share the memory of one."""
        rows, at_most = self.shard.real_rows, self._kernels.tile_rows
        if self._recompute:
            at_most = output_t_again.tile_rows(rows, at_most)
        heights = output_s.tile_heights(rows, at_most)
        scratch = x_nh.new_empty(max(heights, default=0), len(x_nh))
        return [scratch[:height] for height in heights]

    def _take_tiles(self, x_nh: Tensor) -> Sequence[Tensor]:
        """Return free buffers for one microbatch's exponentials, or new ones."""
        while self._free:
            tiles = self._free.pop()
            if not tiles or tiles[0].shape[1] == len(x_nh):
                return tiles
        heights = output_s.tile_heights(self.shard.real_rows, self._kernels.tile_rows)
        return [x_nh.new_empty(height, len(x_nh)) for height in heights]
