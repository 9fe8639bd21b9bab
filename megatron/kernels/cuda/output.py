"""The output layer of one shard on a GPU: the passes S, E and T, and the arithmetic of C1.

The logits of all the shard's rows are one matrix [v, n], [vocabulary, tokens]. One product writes
it. Then it is read once for its columns' maxima, turned into exponentials in place, and read by the
other products. The maxima are known before the first exponential, so no running maximum is needed.
C1 and T subtract the targets' part, straight from W and X. Where logits are not kept, slices of the
tokens go through the same steps one after the other, all in the memory of one slice.

Shapes: n tokens, h hidden size, v rows of the shard without padding, k spans of rows.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.kernels.cuda import gradients, operators
from megatron.kernels.cuda.gradients import (
    CudaState,
    begin_gradient,
    initial_state,
    relative_to_all,
)
from megatron.kernels.cuda.products import Products
from megatron.kernels.cuda.sizes import slice_tokens
from megatron.kernels.softmax import LossOptions, Merged, ShardState


class CudaOutput:
    """The part of ``Kernels`` about the output layer.

    Args:
        products: matrix products of the device.
    """

    def __init__(self, products: Products) -> None:
        self._products = products

    def kept_room(self, x_nh: Tensor, rows: int) -> Sequence[Tensor]:
        """See ``Kernels``: one [v, n]."""
        return [x_nh.new_empty(rows, len(x_nh))]

    def scratch_room(self, x_nh: Tensor, rows: int, *, again: bool) -> Sequence[Tensor]:
        """See ``Kernels``: one [v, tokens of a slice]."""
        return [x_nh.new_empty(rows, slice_tokens(rows, len(x_nh), again=again))]

    def output_s(
        self,
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
        state = initial_state(x_nh, targets_n, first_row)
        [room_vn] = room
        if keep:
            state.exp_tiles = (room_vn,)
        capped_spread = bool(options.spread and options.logit_softcap)
        if form_gradient:
            begin_gradient(state, weight_vh, options)
        if not len(weight_vh):
            return state
        for part in _slices(len(x_nh), room_vn):
            logits_vn = _part_of(room_vn, part)
            self._logits_and_maxima(state, weight_vh, logits_vn, part, options)
            slopes_vn = torch.empty_like(logits_vn) if capped_spread else None
            self._exponentials(state, logits_vn, part, options, slopes_vn)
            if keep:
                state.slopes_vn = slopes_vn
            if form_gradient:
                self._form_gradient(state, weight_vh, logits_vn, slopes_vn, part)
        return state

    def naive_s(
        self,
        x_nh: Tensor,
        weight_vh: Tensor,
        targets_n: Tensor,
        first_row: int,
        options: LossOptions,
        room: Sequence[Tensor],
    ) -> ShardState:
        """See ``Kernels``; the logits are not capped yet."""
        state = initial_state(x_nh, targets_n, first_row)
        [logits_vn] = state.exp_tiles = tuple(room)
        if len(weight_vh):
            everything = slice(0, len(x_nh))
            self._logits_and_maxima(state, weight_vh, logits_vn, everything, options)
        return state

    def naive_e(self, state: ShardState, maximum_n: Tensor, options: LossOptions) -> None:
        """See ``Kernels``."""
        assert isinstance(state, CudaState)
        [logits_vn] = state.exp_tiles
        state.maximum_n.copy_(maximum_n)
        if not len(logits_vn):
            return
        if options.spread and options.logit_softcap:
            state.slopes_vn = torch.empty_like(logits_vn)
        everything = slice(0, logits_vn.shape[1])
        self._exponentials(state, logits_vn, everything, options, state.slopes_vn)

    def merge(
        self,
        statistics_p4n: Tensor,
        state: ShardState,
        weight_vh: Tensor,
        weight_n: Tensor,
        options: LossOptions,
    ) -> tuple[Merged, Tensor | None]:
        """See ``Kernels``; it is one kernel."""
        assert isinstance(state, CudaState)
        return gradients.merge(statistics_p4n, state, weight_vh, weight_n, options)

    def output_t(
        self,
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
        assert isinstance(state, CudaState)
        if room is not None:
            state = relative_to_all(state, merged)
        if form_gradient:
            begin_gradient(state, weight_vh, options)
        scaled_nh = state.x_nh
        if gradient_vh is not None and len(weight_vh):
            scaled_nh = gradients.scaled_input(state, merged, weight_n, options)
        for part, exp_vn, slopes_vn in self._exponentials_of(state, weight_vh, options, room):
            if gradient_vh is not None:
                first = begins and part.start == 0
                self._products.accumulate_(gradient_vh, exp_vn, scaled_nh[part], begins=first)
                self._subtract_spread(gradient_vh, slopes_vn, weight_n, state, part, options)
            if form_gradient:
                self._form_gradient(state, weight_vh, exp_vn, slopes_vn, part)
        if gradient_vh is not None and len(weight_vh):
            gradients.subtract_targets(gradient_vh, state, weight_n, options)
        if not form_gradient:
            return None
        return gradients.input_gradient(state, merged, weight_vh, weight_n, options)

    def _logits_and_maxima(
        self,
        state: CudaState,
        weight_vh: Tensor,
        logits_vn: Tensor,
        part: slice,
        options: LossOptions,
    ) -> None:
        """Fill ``logits_vn`` with some tokens' logits, and set their maxima and targets' logits."""
        torch.mm(weight_vh, state.x_nh[part].T, out=logits_vn)
        maximum_n, target_logits_n = state.maximum_n[part], state.statistics_4n[2][part]
        maxima_kn = maximum_n.new_empty(operators.spans(len(weight_vh)), len(maximum_n))
        operators.column_maxima(
            logits_vn,
            state.targets_n[part],
            maxima_kn,
            target_logits_n,
            state.first_row,
            options.logit_softcap,
        )
        torch.amax(maxima_kn, 0, out=maximum_n)

    def _exponentials(
        self,
        state: CudaState,
        logits_vn: Tensor,
        part: slice,
        options: LossOptions,
        slopes_vn: Tensor | None,
    ) -> None:
        """Turn logits into exponentials relative to the state's maximum, and set their sums."""
        maximum_n, sum_n, _, logit_sum_n = state.statistics_4n[:, part]
        spans = operators.spans(len(logits_vn))
        sums_kn = sum_n.new_empty(spans, len(sum_n))
        logit_sums_kn = torch.empty_like(sums_kn) if options.spread else None
        operators.exponentials_(
            logits_vn, maximum_n, sums_kn, logit_sums_kn, slopes_vn, options.logit_softcap
        )
        torch.sum(sums_kn, 0, out=sum_n)
        if logit_sums_kn is not None:
            torch.sum(logit_sums_kn, 0, out=logit_sum_n)

    def _form_gradient(
        self,
        state: CudaState,
        weight_vh: Tensor,
        exp_vn: Tensor,
        slopes_vn: Tensor | None,
        part: slice,
    ) -> None:
        """Form A of some tokens, and their ``spread_nh`` if label smoothing meets capped logits."""
        raw_nh, spread_nh = state.raw_gradient_nh, state.spread_nh
        assert raw_nh is not None
        self._products.form(raw_nh[part], exp_vn.T, weight_vh)
        if slopes_vn is not None and spread_nh is not None:
            self._products.form(spread_nh[part], slopes_vn.T, weight_vh)

    def _subtract_spread(
        self,
        gradient_vh: Tensor,
        slopes_vn: Tensor | None,
        weight_n: Tensor,
        state: CudaState,
        part: slice,
        options: LossOptions,
    ) -> None:
        """Subtract label smoothing's part from the weight gradient if logits are capped."""
        if slopes_vn is not None:
            pulled_nh = (-options.spread * weight_n[part]).unsqueeze(1) * state.x_nh[part]
            self._products.accumulate_(gradient_vh, slopes_vn, pulled_nh.to(state.x_nh.dtype))

    def _exponentials_of(
        self,
        state: CudaState,
        weight_vh: Tensor,
        options: LossOptions,
        room: Sequence[Tensor] | None,
    ) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Yield slices of the tokens, exponentials relative to the state's maximum, and slopes."""
        if not len(weight_vh):
            return
        if room is None:
            yield slice(0, len(state.x_nh)), state.exp_tiles[0], state.slopes_vn
            return
        [room_vn] = room
        for part in _slices(len(state.x_nh), room_vn):
            exp_vn = _part_of(room_vn, part)
            torch.mm(weight_vh, state.x_nh[part].T, out=exp_vn)
            slopes_vn = None
            if options.spread and options.logit_softcap:
                slopes_vn = torch.empty_like(exp_vn)
            operators.exponentials_(
                exp_vn, state.maximum_n[part], None, None, slopes_vn, options.logit_softcap
            )
            yield part, exp_vn, slopes_vn


def _slices(tokens: int, room_vn: Tensor) -> Iterator[slice]:
    """Yield slices of the tokens, each as large as the room allows."""
    at_once = max(1, room_vn.shape[1])
    for begin in range(0, tokens, at_once):
        yield slice(begin, min(tokens, begin + at_once))


def _part_of(room_vn: Tensor, part: slice) -> Tensor:
    """Return contiguous room for the logits of some tokens."""
    rows, tokens = len(room_vn), part.stop - part.start
    return room_vn.view(-1)[: rows * tokens].view(rows, tokens)
