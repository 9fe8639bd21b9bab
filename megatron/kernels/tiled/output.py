"""The output layer of one shard for kernels that work on tiles: the passes S, E and T."""

from collections.abc import Sequence

from torch import Tensor

from megatron.kernels.softmax import LossOptions, Merged, ShardState, merge_statistics
from megatron.kernels.tiled import naive_output, output_s, output_t
from megatron.kernels.tiled.face import TileKernels
from megatron.kernels.tiled.state import TiledState


class TiledOutput:
    """The part of ``Kernels`` about the output layer, in terms of ``TileKernels``."""

    def kept_room(self: TileKernels, x_nh: Tensor, rows: int) -> Sequence[Tensor]:
        """See ``Kernels``: a tile each."""
        heights = output_s.tile_heights(rows, self.tile_rows)
        return [x_nh.new_empty(height, len(x_nh)) for height in heights]

    def scratch_room(
        self: TileKernels, x_nh: Tensor, rows: int, *, again: bool
    ) -> Sequence[Tensor]:
        """See ``Kernels``: tiles that share the memory of one."""
        at_most = output_t.tile_rows(rows, self.tile_rows) if again else self.tile_rows
        heights = output_s.tile_heights(rows, at_most)
        scratch = x_nh.new_empty(max(heights, default=0), len(x_nh))
        return [scratch[:height] for height in heights]

    def output_s(
        self: TileKernels,
        x_nh: Tensor,
        weight_vh: Tensor,
        targets_n: Tensor,
        first_row: int,
        options: LossOptions,
        room: Sequence[Tensor],
        *,
        form_gradient: bool,
        keep: bool,
    ) -> ShardState:
        """See ``Kernels``."""
        return output_s.output_s(
            x_nh,
            weight_vh,
            targets_n,
            first_row,
            options,
            room,
            form_gradient=form_gradient,
            keep=keep,
            kernels=self,
        )

    def naive_s(
        self,
        x_nh: Tensor,
        weight_vh: Tensor,
        targets_n: Tensor,
        first_row: int,
        options: LossOptions,
        room: Sequence[Tensor],
    ) -> ShardState:
        """See ``Kernels``."""
        return naive_output.naive_s(x_nh, weight_vh, targets_n, first_row, options, room)

    def naive_e(
        self: TileKernels, state: ShardState, maximum_n: Tensor, options: LossOptions
    ) -> None:
        """See ``Kernels``."""
        assert isinstance(state, TiledState)
        naive_output.naive_e(state, maximum_n, options, self)

    def merge(
        self,
        statistics_p4n: Tensor,
        state: ShardState,
        weight_vh: Tensor,
        weight_n: Tensor,
        options: LossOptions,
    ) -> tuple[Merged, Tensor | None]:
        """See ``Kernels``."""
        merged = merge_statistics(statistics_p4n)
        if state.raw_gradient_nh is None:
            return merged, None
        assert isinstance(state, TiledState)
        return merged, output_s.input_gradient_from_s(state, merged, weight_n, options)

    def output_t(
        self: TileKernels,
        state: ShardState,
        weight_vh: Tensor,
        gradient_vh: Tensor | None,
        merged: Merged,
        weight_n: Tensor,
        options: LossOptions,
        room: Sequence[Tensor] | None,
        *,
        form_gradient: bool,
        begins: bool = False,
    ) -> Tensor | None:
        """See ``Kernels``."""
        assert isinstance(state, TiledState)
        if begins and gradient_vh is not None:
            gradient_vh.zero_()  # the targets subtract before there is a product
        if room is not None:
            return output_t.t_again(
                state,
                weight_vh,
                gradient_vh,
                merged,
                weight_n,
                options,
                room,
                form_gradient=form_gradient,
                kernels=self,
            )
        gradient_nh = None
        if form_gradient:
            gradient_nh = output_t.input_gradient_in_t(
                state, weight_vh, merged, weight_n, options, self
            )
        if gradient_vh is not None:
            output_t.subtract_target_gradient(gradient_vh, state, weight_n, options)
            factor_kn = output_t.tile_factors(state, merged, weight_n, options)
            output_t.add_weight_gradient(gradient_vh, state, factor_kn, self)
        return gradient_nh
