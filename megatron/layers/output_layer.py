"""The output layer of one rank: its shard of the matrix, and the passes S and T over microbatches.

The mathematics is in ``vocabulary``; here live the buffers. The exponentials of a few microbatches
share one set of tiles, so that T can form their weight gradient in one product and pass over the
fp32 gradient once: that pass costs as much as the product itself where a microbatch is short.
Buffers are reused from iteration to iteration.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron.layers import vocabulary
from megatron.layers.shard import VocabularyShard
from megatron.layers.vocabulary import LossOptions, Merged, ShardState

TILE_COLUMNS = {"cpu": 2048, "cuda": 16384}
"""Columns of a tile: on a CPU its [n, t] part should stay in the second-level cache; on a GPU it
should fill the device, where more tiles only cost launches."""

MICROBATCHES_PER_PRODUCT = 2
"""Microbatches whose weight gradients T forms together."""


@dataclass
class _Group:
    """Microbatches that share tiles, and what their T passes have left so far."""

    size: int
    tiles: list[Tensor]
    left: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """x_nh and factor_kn by the microbatch's place in the group."""


class OutputLayer(nn.Module):
    """Output matrix of one vocabulary shard, with S and T.

    Args:
        shard: which rows this rank holds.
        weight: [rows, h], shared with the input layer when embeddings are tied.
        options: form of the loss.
    """

    def __init__(self, shard: VocabularyShard, weight: nn.Parameter, options: LossOptions) -> None:
        super().__init__()
        self.shard = shard
        self.weight = weight
        self.options = options
        self._microbatches = 0
        self._groups: dict[int, _Group] = {}
        self._free: list[list[Tensor]] = []

    def begin(self, microbatches: int) -> None:
        """Start an iteration of ``microbatches``."""
        assert not self._groups, "an S was never followed by its T"
        self._microbatches = microbatches

    @property
    def real_weight(self) -> Tensor:
        """The rows without padding [v, h], detached."""
        return self.weight.detach()[: self.shard.real_rows]

    @torch.no_grad()
    def s(
        self, microbatch: int, x_nh: Tensor, targets_n: Tensor, form_gradient: bool
    ) -> ShardState:
        """Pass S: exponentials and statistics of this shard; with ``form_gradient`` A and D too."""
        index, place = divmod(microbatch, MICROBATCHES_PER_PRODUCT)
        if index not in self._groups:
            self._groups[index] = self._new_group(index, x_nh)
        n = len(x_nh)
        tiles = [tile[place * n : (place + 1) * n] for tile in self._groups[index].tiles]
        return self._statistics(x_nh, targets_n, tiles, form_gradient)

    @torch.no_grad()
    def evaluate(self, x_nh: Tensor, targets_n: Tensor) -> ShardState:
        """Pass S of an evaluation: statistics only, over one tile of scratch memory."""
        widths = self._tile_widths(x_nh)
        scratch = x_nh.new_empty(len(x_nh) * max(widths, default=0))
        tiles = [scratch[: len(x_nh) * width].view(len(x_nh), width) for width in widths]
        return self._statistics(x_nh, targets_n, tiles, form_gradient=False)

    @torch.no_grad()
    def input_gradient(self, state: ShardState, merged: Merged, weight_n: Tensor) -> Tensor:
        """Return this shard's part of the input gradient [n, h], formed in T (Algorithm 1)."""
        return vocabulary.input_gradient_in_t(
            state, self.real_weight, merged, weight_n, self.options
        )

    @torch.no_grad()
    def t(self, microbatch: int, state: ShardState, merged: Merged, weight_n: Tensor) -> None:
        """Pass T: the weight gradient, into ``main_grad``.

        The product waits for the last microbatch of a group; the passes before it only leave what
        it needs.
        """
        main_grad: Tensor = self.weight.main_grad
        gradient_vh = main_grad[: self.shard.real_rows]
        vocabulary.subtract_target_gradient(gradient_vh, state, weight_n, self.options)
        index, place = divmod(microbatch, MICROBATCHES_PER_PRODUCT)
        group = self._groups[index]
        factor_kn = vocabulary.tile_factors(state, merged, weight_n, self.options)
        group.left[place] = (state.x_nh, factor_kn)
        if len(group.left) == group.size:
            parts = [group.left[i] for i in range(group.size)]
            x_nh = torch.cat([x for x, _ in parts])
            vocabulary.add_weight_gradient(
                gradient_vh,
                [tile[: len(x_nh)] for tile in group.tiles],
                x_nh,
                torch.cat([factor for _, factor in parts], dim=1),
            )
            self._free.append(self._groups.pop(index).tiles)

    def _statistics(
        self, x_nh: Tensor, targets_n: Tensor, tiles: Sequence[Tensor], form_gradient: bool
    ) -> ShardState:
        return vocabulary.output_s(
            x_nh,
            self.real_weight,
            targets_n,
            self.shard.first_row,
            self.options,
            tiles,
            form_gradient=form_gradient,
        )

    def _tile_widths(self, x_nh: Tensor) -> list[int]:
        return vocabulary.tile_widths(self.shard.real_rows, TILE_COLUMNS[x_nh.device.type])

    def _new_group(self, index: int, x_nh: Tensor) -> _Group:
        first = index * MICROBATCHES_PER_PRODUCT
        size = min(MICROBATCHES_PER_PRODUCT, self._microbatches - first)
        tokens = len(x_nh) * min(MICROBATCHES_PER_PRODUCT, self._microbatches)
        widths = self._tile_widths(x_nh)
        if self._free and (not widths or len(self._free[-1][0]) >= tokens):
            return _Group(size, self._free.pop())
        self._free.clear()  # the microbatches have grown
        return _Group(size, [x_nh.new_empty(tokens, width) for width in widths])
