"""The declared launches of PyTorch's operators.

PyTorch has a register of FLOPs, whose import takes 0.16 CPU seconds of every start of a rank,
because it imports Triton. In it heads that share keys do not count (PyTorch 2.11). A test holds
these declarations equal to it.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from megatron.kernels.declared import (
    Declaration,
    LaunchWork,
    Sizes,
    declare,
    declared,
    multiplies,
    of_groups,
    overwrites,
    touches_rows,
)

_aten = torch.ops.aten

_EXECUTED_PRODUCTS: Final = 5
_COUNTED_PRODUCTS: Final = 4
"""Matrix products in the backward of flash attention. The backward computes the scores again, and
this product does not count as FLOPs of the model."""


def work_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LaunchWork | None:
    """Return the work of an operator's launch; ``None``: it launches nothing.

    Args:
        function: an operator of PyTorch or of this project.
        args: its arguments.
        kwargs: its arguments that are given by name.
    """
    return declared(function._schema.name, lambda: given_to(function, args, kwargs))


def given_to(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by the names of its schema."""
    return {**dict(zip(_names(function), args, strict=False)), **kwargs}


@cache
def _names(function: Any) -> tuple[str, ...]:
    """Return the names of an operator's arguments; PyTorch makes them anew at each question."""
    return tuple(argument.name for argument in function._schema.arguments)


def _declare(operator: Any, work: Declaration) -> None:
    declare(operator._qualified_op_name, work)


for _allocates_or_refers in (
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten.detach,
    _aten.lift_fresh,
    _aten._unsafe_view,
    _aten.resize_,
    _aten.set_,
):
    _declare(_allocates_or_refers, lambda **_: None)

_declare(_aten.embedding, touches_rows("weight", "indices"))
_declare(_aten.index_select, touches_rows("self", "index"))
_declare(_aten.index_add_, touches_rows("self", "index"))
_declare(_aten._foreach_copy_, overwrites("self"))


def _by_matrix(left: Tensor, right: Tensor) -> LaunchWork:
    (m, k), n = map(int, left.shape), int(right.shape[1])
    return multiplies(Sizes(m, n, k))


def _by_matrices(left: Tensor, right: Tensor) -> LaunchWork:
    (batch, m, k), n = map(int, left.shape), int(right.shape[2])
    return multiplies(Sizes(m, n, k, batch))


# ``self`` is a factor, or the tensor to which a product is added
_declare(_aten.mm, lambda mat2, **given: _by_matrix(given["self"], mat2))
_declare(_aten._scaled_mm, lambda mat2, **given: _by_matrix(given["self"], mat2))
_declare(_aten.addmm, lambda mat1, mat2, **_: _by_matrix(mat1, mat2))
_declare(_aten.bmm, lambda mat2, **given: _by_matrices(given["self"], mat2))
_declare(_aten.baddbmm, lambda batch1, batch2, **_: _by_matrices(batch1, batch2))
_declare(_aten._grouped_mm, lambda mat2, offs, **own: of_groups(own["self"], mat2, len(offs)))


def _attention(
    of_keys: int,
    of_values: int,
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    is_backward: bool = False,
    **_: Any,
) -> LaunchWork:
    """Return the work of attention with heads before tokens.

    Args:
        of_keys: products whose depth or width is that of a key.
        of_values: products whose depth or width is that of a value.
        query: [b, a, s, d]; the end of a sequence, or all of it.
        key: [b, g, s, d], of the whole sequence.
        value: as ``key``.
        is_causal: causal attention spares half of the products of the queries with their own keys,
            and no others. Attention to all keys is a part of causal attention, the part without
            these halves. As a part it counts twice what it executes, so that the parts count what
            the whole does.
        is_backward: the products form the scores again.
    """
    batch, heads, queries, channels = map(int, query.shape)
    keys = int(key.shape[2])
    pairs = batch * heads * queries * keys
    executed = 2 * pairs * (of_keys * channels + of_values * int(value.shape[3]))
    flops = 2 * executed
    if is_causal:
        flops = executed * (2 * keys - queries) // keys
        executed = flops // 2
    if is_backward:
        flops = _without_scores(flops)
    return LaunchWork(flops, executed)


def _without_scores(flops: int) -> int:
    return flops * _COUNTED_PRODUCTS // _EXECUTED_PRODUCTS


_forward = partial(_attention, 1, 1)
_backward = partial(_attention, 3, 2, is_backward=True)

_declare(_aten._scaled_dot_product_flash_attention, _forward)
_declare(_aten._scaled_dot_product_efficient_attention, _forward)
_declare(_aten._scaled_dot_product_cudnn_attention, _forward)
_declare(_aten._scaled_dot_product_flash_attention_backward, _backward)
_declare(_aten._scaled_dot_product_efficient_attention_backward, _backward)
_declare(_aten._scaled_dot_product_cudnn_attention_backward, _backward)


def _tokens_first(
    products: int,
    *,
    query: Tensor,
    key: Tensor,
    window_size_left: int | None = None,
    is_backward: bool = False,
    **_: Any,
) -> LaunchWork:
    """Return the work of causal attention with tokens before heads, perhaps with a window.

    Causal attention without a window counts the products of all positions and executes half of
    them. With a window it counts and executes the products of the positions that are seen.

    Args:
        products: matrix products.
        query: [b, s, a, d], or [n, a, d] of packed samples.
        key: as ``query``, with the keys of the whole sequence.
        window_size_left: positions that a query sees before its own; ``None`` or -1: all.
        is_backward: the products form the scores again.
    """
    queries, heads, channels = map(int, query.shape[-3:])
    keys = int(key.shape[-3])
    window = -1 if window_size_left is None else int(window_size_left)
    one = 2 * prod(map(int, query.shape[:-3])) * heads * channels * products
    if window < 0 or window >= keys - 1:
        flops = one * queries * (2 * keys - queries)
        executed = flops // 2
    else:
        behind = range(keys - queries, keys)
        flops = executed = one * sum(min(position, window) + 1 for position in behind)
    return LaunchWork(_without_scores(flops) if is_backward else flops, executed)


_tokens_first_backward = partial(_tokens_first, 5, is_backward=True)

_declare(_aten._flash_attention_forward, partial(_tokens_first, 2))
_declare(_aten._efficient_attention_forward, partial(_tokens_first, 2))
_declare(_aten._flash_attention_backward, _tokens_first_backward)
_declare(_aten._efficient_attention_backward, _tokens_first_backward)
