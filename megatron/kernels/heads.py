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
