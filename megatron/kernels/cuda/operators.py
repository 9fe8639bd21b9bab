"""The Triton programs as operators of PyTorch, whose schemas say which tensors they write.

An operator writes into tensors that its caller has made. So it needs no rule for shapes, and does
nothing on tensors without values. On a CPU the programs run in Triton's interpreter
(``TRITON_INTERPRET=1``), for tests. Sizes of blocks are fixed: nothing is tuned while a model
trains, and sums come out the same on every GPU.

Shapes: v rows of a shard, n tokens, h hidden size, p shards; r rows, f channels.
"""

from typing import Final

from torch import Tensor

from megatron.kernels.cuda.library import Programs
from megatron.kernels.cuda.library import operator as _operator
from megatron.kernels.cuda.sizes import next_power_of_2, quotient
from megatron.kernels.declared import touches_rows

gradient_programs = Programs("gradients")

TILE: Final = {"ROWS": 16, "COLUMNS": 128}
"""Logits that a program works on at a time: 16 for each of 128 threads, 256 bytes in a row."""
BLOCK: Final = 1024
"""Channels that a program works on at a time: 8 for each of 128 threads."""

LAUNCH: Final = {"num_warps": 4, "enable_fp_fusion": True}
"""Options of all launches: 4 warps of 32 threads; a product and a sum may be one instruction,
rounded once."""


def over_rows(x: Tensor) -> tuple[int, int]:
    """Return the grid of programs that each work on ``BLOCK`` numbers of a row."""
    assert x.is_contiguous()
    return len(x), quotient(x.shape[1], BLOCK)


@_operator(
    "input_gradient(Tensor(a!) gradient_nh, Tensor raw_nh, Tensor weight_vh, Tensor? spread_nh, "
    "Tensor weight_n, Tensor shift_n, Tensor maximum_n, Tensor sum_n, Tensor targets_n, "
    "Tensor target_logits_n, int first_row, float pull, float spread, float z_loss, float cap) "
    "-> ()"
)
def input_gradient(
    gradient_nh: Tensor,
    raw_nh: Tensor,
    weight_vh: Tensor,
    spread_nh: Tensor | None,
    weight_n: Tensor,
    shift_n: Tensor,
    maximum_n: Tensor,
    sum_n: Tensor,
    targets_n: Tensor,
    target_logits_n: Tensor,
    first_row: int,
    pull: float,
    spread: float,
    z_loss: float,
    cap: float,
) -> None:
    """See ``programs.gradients``."""
    _write_gradient(
        (maximum_n, maximum_n, maximum_n, sum_n),  # the first two are not read
        0,
        gradient_nh,
        raw_nh,
        weight_vh,
        spread_nh,
        weight_n,
        shift_n,
        targets_n,
        target_logits_n,
        (first_row, pull, spread, z_loss, cap),
    )


@_operator("merge(Tensor statistics_p4n, Tensor(a!) merged_4n) -> ()")
def merge(statistics_p4n: Tensor, merged_4n: Tensor) -> None:
    """See ``programs.gradients``."""
    shards, _, tokens = statistics_p4n.shape
    assert statistics_p4n.is_contiguous()
    ranks = next_power_of_2(shards)
    gradient_programs.merge[tokens, 1](
        statistics_p4n, merged_4n, shards, tokens, RANKS=ranks, **LAUNCH
    )


@_operator(
    "merge_input_gradient(Tensor statistics_p4n, Tensor(a!) merged_4n, Tensor(b!) gradient_nh, "
    "Tensor raw_nh, Tensor weight_vh, Tensor? spread_nh, Tensor weight_n, Tensor shift_n, "
    "Tensor targets_n, Tensor target_logits_n, int first_row, float pull, float spread, "
    "float z_loss, float cap) -> ()",
    touches_rows("weight_vh", "targets_n"),
)
def merge_input_gradient(
    statistics_p4n: Tensor,
    merged_4n: Tensor,
    gradient_nh: Tensor,
    raw_nh: Tensor,
    weight_vh: Tensor,
    spread_nh: Tensor | None,
    weight_n: Tensor,
    shift_n: Tensor,
    targets_n: Tensor,
    target_logits_n: Tensor,
    first_row: int,
    pull: float,
    spread: float,
    z_loss: float,
    cap: float,
) -> None:
    """See ``programs.gradients``."""
    assert statistics_p4n.is_contiguous()
    _write_gradient(
        (statistics_p4n, merged_4n, merged_4n, merged_4n),  # the last two are not read
        len(statistics_p4n),
        gradient_nh,
        raw_nh,
        weight_vh,
        spread_nh,
        weight_n,
        shift_n,
        targets_n,
        target_logits_n,
        (first_row, pull, spread, z_loss, cap),
    )


def _write_gradient(
    statistics: tuple[Tensor, Tensor, Tensor, Tensor],
    shards: int,
    gradient_nh: Tensor,
    raw_nh: Tensor,
    weight_vh: Tensor,
    spread_nh: Tensor | None,
    weight_n: Tensor,
    shift_n: Tensor,
    targets_n: Tensor,
    target_logits_n: Tensor,
    form: tuple[int, float, float, float, float],
) -> None:
    """Launch the program of both operators; with 0 ``shards`` the statistics are merged already."""
    *_, z_loss, cap = form
    assert raw_nh.is_contiguous()
    assert weight_vh.is_contiguous()
    gradient_programs.input_gradient[over_rows(gradient_nh)](
        *statistics,
        gradient_nh,
        raw_nh,
        weight_vh,
        raw_nh if spread_nh is None else spread_nh,
        weight_n,
        shift_n,
        targets_n,
        target_logits_n,
        shards,
        len(gradient_nh) if shards else 0,
        *weight_vh.shape,
        *form,
        CAPPED=cap != 0,
        SPREAD=spread_nh is not None,
        Z_LOSS=z_loss != 0,
        MERGES=shards > 0,
        RANKS=next_power_of_2(max(shards, 1)),
        BLOCK=BLOCK,
        **LAUNCH,
    )


@_operator(
    "scale_rows(Tensor(a!) scaled_nh, Tensor x_nh, Tensor weight_n, Tensor shift_n, "
    "Tensor maximum_n, Tensor sum_n, float z_loss) -> ()"
)
def scale_rows(
    scaled_nh: Tensor,
    x_nh: Tensor,
    weight_n: Tensor,
    shift_n: Tensor,
    maximum_n: Tensor,
    sum_n: Tensor,
    z_loss: float,
) -> None:
    """See ``programs.gradients``."""
    assert scaled_nh.is_contiguous()
    gradient_programs.scale_rows[over_rows(x_nh)](
        scaled_nh,
        x_nh,
        weight_n,
        shift_n,
        maximum_n,
        sum_n,
        x_nh.shape[1],
        z_loss,
        Z_LOSS=z_loss != 0,
        BLOCK=BLOCK,
        **LAUNCH,
    )


@_operator(
    "subtract_targets_(Tensor(a!) gradient_vh, Tensor x_nh, Tensor weight_n, Tensor targets_n, "
    "Tensor target_logits_n, int first_row, float pull, float cap) -> ()",
    touches_rows("gradient_vh", "targets_n"),
)
def subtract_targets_(
    gradient_vh: Tensor,
    x_nh: Tensor,
    weight_n: Tensor,
    targets_n: Tensor,
    target_logits_n: Tensor,
    first_row: int,
    pull: float,
    cap: float,
) -> None:
    """See ``programs.gradients``."""
    assert gradient_vh.is_contiguous()
    gradient_programs.subtract_targets[over_rows(x_nh)](
        gradient_vh,
        x_nh,
        weight_n,
        targets_n,
        target_logits_n,
        *gradient_vh.shape,
        first_row,
        pull,
        cap,
        CAPPED=cap != 0,
        BLOCK=BLOCK,
        **LAUNCH,
    )
