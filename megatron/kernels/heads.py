"""The order of query, key and value heads in the output of a fused projection."""

from torch import Tensor


def split_heads(qkv_bsgcd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [b, s, a, d], keys and values [b, s, g, d]; views wherever strides allow.

    Args:
        qkv_bsgcd: [b, s, g, r + 2, d]: for every group its r = a / g queries, its key, its value.
    """
    # one operation, so that the backward writes the fused gradient once instead of adding parts
    if qkv_bsgcd.shape[3] == 3:
        q_bsad, k_bsgd, v_bsgd = qkv_bsgcd.unbind(3)
        return q_bsad, k_bsgd, v_bsgd
    q, k, v = qkv_bsgcd.split([qkv_bsgcd.shape[3] - 2, 1, 1], dim=3)
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


def split_heads_to_keep(qkv_bsgcd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``split_heads``, for heads that the backward keeps: either all are views or none is.

    Groups of several queries have no strides for a view of all queries. To keep the copy, and
    keys and values as views, would keep the queries twice.
    """
    q_bsad, k_bsgd, v_bsgd = split_heads(qkv_bsgcd)
    if is_view(q_bsad):
        return q_bsad, k_bsgd, v_bsgd
    return q_bsad, alone(k_bsgd), alone(v_bsgd)


def is_view(x: Tensor) -> bool:
    """Return whether a tensor is in the memory of a larger one."""
    return x.untyped_storage().nbytes() > x.nbytes


def alone(x: Tensor) -> Tensor:
    """Return a tensor in memory of its own: a view would keep all memory that it is a view of."""
    return x.clone() if is_view(x) else x
