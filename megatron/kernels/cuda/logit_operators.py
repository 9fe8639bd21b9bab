"""The Triton programs that read logits, as operators of PyTorch; see ``operators.py``.

Shapes: v rows of a shard or of a tile, n tokens, k spans of rows.
"""

from torch import Tensor

from megatron.kernels.cuda.library import Programs
from megatron.kernels.cuda.library import operator as _operator
from megatron.kernels.cuda.operators import LAUNCH, TILE
from megatron.kernels.cuda.sizes import SPAN, quotient

softmax_programs = Programs("softmax")


def spans(rows: int) -> int:
    """Return k, the number of partial results for every token."""
    return quotient(rows, SPAN)


def _over_logits(logits_vn: Tensor) -> tuple[int, int]:
    rows, tokens = logits_vn.shape
    assert logits_vn.is_contiguous()
    return quotient(tokens, TILE["COLUMNS"]), spans(rows)


@_operator(
    "column_maxima(Tensor logits_vn, Tensor targets_n, Tensor(a!) maxima_kn, "
    "Tensor(b!) target_logits_n, int first_row, float cap) -> ()"
)
def column_maxima(
    logits_vn: Tensor,
    targets_n: Tensor,
    maxima_kn: Tensor,
    target_logits_n: Tensor,
    first_row: int,
    cap: float,
) -> None:
    """See ``programs.softmax``; a ``cap`` of 0 caps nothing, here and below."""
    softmax_programs.column_maxima[_over_logits(logits_vn)](
        logits_vn,
        targets_n,
        maxima_kn,
        target_logits_n,
        *logits_vn.shape,
        first_row,
        cap,
        CAPPED=cap != 0,
        SPAN=SPAN,
        **TILE,
        **LAUNCH,
    )


@_operator(
    "column_statistics(Tensor logits_vn, Tensor targets_n, Tensor(a!) maxima_kn, "
    "Tensor(b!) sums_kn, Tensor(c!)? logit_sums_kn, Tensor(d!) target_logits_n, int first_row, "
    "float cap) -> ()"
)
def column_statistics(
    logits_vn: Tensor,
    targets_n: Tensor,
    maxima_kn: Tensor,
    sums_kn: Tensor,
    logit_sums_kn: Tensor | None,
    target_logits_n: Tensor,
    first_row: int,
    cap: float,
) -> None:
    """See ``programs.softmax``; without ``logit_sums_kn`` no logits are added up."""
    softmax_programs.column_statistics[_over_logits(logits_vn)](
        logits_vn,
        targets_n,
        maxima_kn,
        sums_kn,
        maxima_kn if logit_sums_kn is None else logit_sums_kn,
        target_logits_n,
        *logits_vn.shape,
        first_row,
        cap,
        CAPPED=cap != 0,
        LOGIT_SUMS=logit_sums_kn is not None,
        SPAN=SPAN,
        **TILE,
        **LAUNCH,
    )


@_operator(
    "exponentials_(Tensor(a!) logits_vn, Tensor shift_n, Tensor(b!)? sums_kn, "
    "Tensor(c!)? logit_sums_kn, Tensor(d!)? slopes_vn, float cap) -> ()"
)
def exponentials_(
    logits_vn: Tensor,
    shift_n: Tensor,
    sums_kn: Tensor | None,
    logit_sums_kn: Tensor | None,
    slopes_vn: Tensor | None,
    cap: float,
) -> None:
    """See ``programs.softmax``; a result whose tensor is ``None`` is not formed."""
    softmax_programs.exponentials[_over_logits(logits_vn)](
        logits_vn,
        shift_n,
        shift_n if sums_kn is None else sums_kn,
        shift_n if logit_sums_kn is None else logit_sums_kn,
        logits_vn if slopes_vn is None else slopes_vn,
        *logits_vn.shape,
        cap,
        CAPPED=cap != 0,
        SUMS=sums_kn is not None,
        LOGIT_SUMS=logit_sums_kn is not None,
        SLOPES=slopes_vn is not None,
        SPAN=SPAN,
        **TILE,
        **LAUNCH,
    )
