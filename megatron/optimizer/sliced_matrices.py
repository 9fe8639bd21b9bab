"""Matrices that tensor-parallel ranks make orthogonal together, each rank on its own slice.

With X [m, n], m ≤ n, cut along n into X_1, ..., X_t, a Newton-Schulz step needs A = X Xᵀ, which is
the sum of all X_k X_kᵀ: one all-reduce of [m, m]. All else, X_k <- a X_k + (b A + c A²) X_k,
touches one slice. The same with Xᵀ in place of X, for a matrix that is cut along its rows and has
more rows than columns.

If the ranks cut the shorter dimension m instead, the sum would be Xᵀ X [n, n], with products of n³.
(Keys and values of few heads are such matrices: the ranks share the rows, and these are few.) The
ranks then exchange parts of their slices, so that each has some columns of all rows, and exchange
back at the end. So no rank holds a whole matrix, and every product is of the smaller dimension.

The order of rows and columns within a slice does not matter: the iteration commutes with every
permutation of rows or of columns. So the slices of fused matrices may stay as they lie on a rank.
"""

from collections.abc import Sequence

from torch import Tensor

from megatron.optimizer.newton_schulz import Step, at_norm_1, iterated, squared_norm
from megatron.optimizer.parameters import ParameterPart
from megatron.optimizer.settings import Precision
from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis


def cut_dimension(part: ParameterPart) -> int | None:
    """Return the dimension along which tensor-parallel ranks cut a matrix; ``None``: they do not.

    Matrices of experts that are spread over ranks are whole, each on its rank.

    Args:
        part: this rank's part of a matrix, with all rows that the rank has.
    """
    if part.owned.axis is not None:
        return None
    pairs = enumerate(zip(part.gradient.shape, part.global_shape, strict=True))
    cut = [dimension for dimension, (own, whole) in pairs if own != whole]
    assert len(cut) <= 1, f"{part.name} is cut along rows and columns"
    return cut[0] if cut else None


def orthogonalized_slice(
    own: Tensor, cut: int, axis: ConnectedAxis, steps: Sequence[Step], precision: Precision
) -> Tensor:
    """Return this rank's slice of what ``orthogonalized`` returns for the whole matrix.

    All ranks call it together.

    Args:
        own: this rank's slice [m, n] of a matrix, full precision; or the slices [e, m, n] of
            several matrices. Slices of all ranks have the same shape.
        cut: the dimension that the ranks cut, 0 for rows and 1 for columns.
        axis: the ranks.
        steps: the coefficients of every step.
        precision: of the products.
    """
    x_mn = own.mT if cut == 0 else own  # so that the ranks cut n
    square = collectives.all_reduce(squared_norm(x_mn), collectives.SUM, axis)
    x_mn = at_norm_1(x_mn, square, precision)
    rows, columns = x_mn.shape[-2:]
    is_short = rows > columns * axis.size
    if is_short:
        x_mn = _with_all_columns(x_mn, axis).mT
    x_mn = iterated(
        x_mn,
        steps,
        precision,
        lambda product_mm: collectives.all_reduce(product_mm, collectives.SUM, axis),
    )
    if is_short:
        x_mn = _with_all_rows(x_mn.mT, rows, axis)
    return (x_mn.mT if cut == 0 else x_mn).to(own.dtype)


def _row_counts(rows: int, axis: ConnectedAxis) -> list[int]:
    """Return how many of a matrix' rows every rank gets, which are as equal as can be."""
    each, more = divmod(rows, axis.size)
    return [each + (place < more) for place in range(axis.size)]


def _with_all_columns(slice_mk: Tensor, axis: ConnectedAxis) -> Tensor:
    """Return some rows [r, t k] of all slices; the columns of slice 0 stand first.

    Args:
        slice_mk: this rank's columns of all rows, [m, k] or [e, m, k].
        axis: the t ranks.
    """
    counts = _row_counts(slice_mk.shape[-2], axis)
    own = counts[axis.rank]
    sent_mek = slice_mk.movedim(-2, 0)
    gathered = collectives.all_to_all(sent_mek, axis, counts, [own] * axis.size)
    by_rank_trek: Tensor = gathered.unflatten(0, (axis.size, own))
    # [t, r, k] -> [r, t, k], or [t, r, e, k] -> [e, r, t, k]
    return by_rank_trek.movedim(0, -2).movedim(0, -3).flatten(-2)


def _with_all_rows(rows_rk: Tensor, rows: int, axis: ConnectedAxis) -> Tensor:
    """Return this rank's columns of all rows, [m, k] or [e, m, k]: undo ``_with_all_columns``.

    Args:
        rows_rk: this rank's rows of all columns, [r, t k] or [e, r, t k].
        rows: m.
        axis: the t ranks.
    """
    counts = _row_counts(rows, axis)
    by_rank_tre = rows_rk.unflatten(-1, (axis.size, -1)).movedim(-3, 0).movedim(-2, 0)
    sent = [counts[axis.rank]] * axis.size
    gathered_mek = collectives.all_to_all(by_rank_tre.flatten(0, 1), axis, sent, counts)
    slice_mk: Tensor = gathered_mek.movedim(0, -2)
    return slice_mk
