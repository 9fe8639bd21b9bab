"""The output layer of one rank: its shard of the matrix, and the passes S and T over microbatches.

The mathematics is in ``output_s``, ``output_t`` and ``naive_output``. This file holds the buffers
of the exponentials, which are reused from microbatch to microbatch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.kernels.face import Kernels
from megatron.layers.main_grad import main_grad_of
from megatron.layers.vocabulary import naive_output, output_s, output_t
from megatron.layers.vocabulary.output_s import LossOptions, Merged, ShardState
from megatron.layers.vocabulary.shard import VocabularyShard


class OutputLayer(nn.Module):
    """Output matrix of one vocabulary shard, with S and T.

    Args:
        shard: which rows this rank holds.
        weight: [rows, h], shared with the input layer when embeddings are tied.
        options: form of the loss.
        kernels: of the device and type of ``weight``.
    """

    def __init__(
        self,
        shard: VocabularyShard,
        weight: nn.Parameter,
        options: LossOptions,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.shard = shard
        self.weight = weight
        self.options = options
        self._kernels = kernels
        self._free: list[Sequence[Tensor]] = []

    @property
    def real_weight(self) -> Tensor:
        """The rows without padding [v, h], detached."""
        return self.weight.detach()[: self.shard.real_rows]

    @torch.no_grad()
    def s(self, x_nh: Tensor, targets_n: Tensor, form_gradient: bool) -> ShardState:
        """Pass S: exponentials and statistics of this shard; with ``form_gradient`` A and D too."""
        return self._statistics(x_nh, targets_n, self._take_tiles(x_nh), form_gradient, True)

    @torch.no_grad()
    def evaluate(self, x_nh: Tensor, targets_n: Tensor) -> ShardState:
        """Pass S of an evaluation: statistics only, over one tile of scratch memory."""
        heights = self._tile_heights()
        scratch = x_nh.new_empty(max(heights, default=0), len(x_nh))
        tiles = [scratch[:height] for height in heights]
        return self._statistics(x_nh, targets_n, tiles, form_gradient=False, t_follows=False)

    @torch.no_grad()
    def naive_s(self, x_nh: Tensor, targets_n: Tensor) -> ShardState:
        """Pass S of the naive treatment: logits; C1 then maximises the state's ``maximum_n``.

        In an evaluation (a module set to ``eval()``), S does all work that a shard can do alone.
        """
        if not self.training:
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
        if self.training:
            naive_output.naive_e(state, maximum_n, self.options, self._kernels)
        else:
            naive_output.rescale_sum(state, maximum_n)

    merged_from = staticmethod(naive_output.merged_from)

    @torch.no_grad()
    def input_gradient(self, state: ShardState, merged: Merged, weight_n: Tensor) -> Tensor:
        """Return this shard's part of the input gradient [n, h], formed in T.

        Algorithm 1 and the naive treatment use it.
        """
        return output_t.input_gradient_in_t(
            state, self.real_weight, merged, weight_n, self.options, self._kernels
        )

    @torch.no_grad()
    def t(self, state: ShardState, merged: Merged, weight_n: Tensor) -> None:
        """Pass T: the weight gradient, into ``main_grad``."""
        main_grad = main_grad_of(self.weight)
        gradient_vh = main_grad[: self.shard.real_rows]
        output_t.subtract_target_gradient(gradient_vh, state, weight_n, self.options)
        factor_kn = output_t.tile_factors(state, merged, weight_n, self.options)
        output_t.add_weight_gradient(gradient_vh, state, factor_kn, self._kernels)
        self._free.append(state.exp_tiles)

    def _statistics(
        self,
        x_nh: Tensor,
        targets_n: Tensor,
        tiles: Sequence[Tensor],
        form_gradient: bool,
        t_follows: bool,
    ) -> ShardState:
        return output_s.output_s(
            x_nh,
            self.real_weight,
            targets_n,
            self.shard.first_row,
            self.options,
            tiles,
            form_gradient=form_gradient,
            t_follows=t_follows,
            kernels=self._kernels,
        )

    def _tile_heights(self) -> list[int]:
        return output_s.tile_heights(self.shard.real_rows, self._kernels.tile_rows)

    def _take_tiles(self, x_nh: Tensor) -> Sequence[Tensor]:
        """Return free buffers for one microbatch's exponentials, or new ones."""
        while self._free:
            tiles = self._free.pop()
            if not tiles or tiles[0].shape[1] == len(x_nh):
                return tiles
        return [x_nh.new_empty(height, len(x_nh)) for height in self._tile_heights()]
