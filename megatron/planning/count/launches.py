"""One operation of PyTorch as a launch: the bytes it moves, and the sizes of its matrix product."""

from collections.abc import Sequence
from math import prod
from typing import Any, Final

from torch import Tensor

from megatron.kernels.eight_bits import BLOCK, MULTIPLE
from megatron.simulator.costs.count import Launch, Product

_NO_LAUNCH: Final = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
    "_unsafe_view",
    "resize_",
    "set_",
}
"""Operations that launch no kernel on a GPU: they only allocate memory or refer to it."""

_NAMESPACES: Final = ("aten", "megatron_kernels")

_ROWS_OF_TOKENS: Final = {
    "embedding": ("weight", "indices"),
    "index_select": ("self", "index"),
    "index_add_": ("self", "index"),
    "add_rows_": ("total_vh", "sorted_n"),
    "merge_input_gradient": ("weight_vh", "targets_n"),
    "subtract_targets_": ("gradient_vh", "targets_n"),
}
"""Operations that touch one row of a matrix for every index, with the names of their arguments for
the matrix and the indices. A Triton program skips rows of other shards; the count includes them."""

_GROUPED: Final = {
    "_grouped_mm": ("self", "mat2", "offs"),
    "grouped_product": ("x_si", "weight_gio", "ends_g"),
    "grouped_weight_product": ("grad_so", "x_si", "ends_g"),
    "add_grouped_weight_product_": ("grad_so", "x_si", "ends_g"),
}
"""Products of groups of rows, with the names of their factors and of the groups' ends."""

_ROWS_OF_GROUPS: Final = {"grouped_eight_bit_product", "grouped_block_product"}
"""Products in 8 bits of rows ``left_sk`` with the matrices ``right_gnk`` of their groups."""

_TURNED: Final = {
    "grouped_eight_bit_weight_product": "out_goi",
    "add_grouped_eight_bit_weight_product_": "total_goi",
    "grouped_block_weight_product": "out_goi",
    "add_grouped_block_weight_product_": "total_goi",
}
"""Products of turned rows of groups, with the names of their results. Their factors have gaps (see
``places`` and ``block_places`` in ``kernels/eight_bits.py``), which do not count."""

_BY_ROWS: Final = {
    "eight_bit_product": ("left_ik", "right_jk"),
    "block_product": ("left_sk", "right_nk"),
}
"""Products of rows of one factor with rows of the other, with the names of their factors."""

_ONLY_WRITTEN: Final = {"adamw_": ("quotients", "weights"), "_foreach_copy_": ("self",)}
"""Arguments that an in-place operation writes without reading them."""


_TOKENS_FIRST: Final = {
    "_flash_attention_forward": 2,
    "_flash_attention_backward": 5,
    "_efficient_attention_forward": 2,
    "_efficient_attention_backward": 5,
}
"""Causal attention with tokens before heads in its tensors, perhaps with a window, and the matrix
products of its forward or backward."""

_EXECUTED_PRODUCTS: Final = 5
_COUNTED_PRODUCTS: Final = 4
"""Matrix products in the backward of flash attention. The backward computes the scores again, and
this product does not count as FLOPs of the model."""


def launch_of(function: Any, args: Any, kwargs: Any, result: Any) -> Launch | None:
    """Return the launch of an operation; ``None``: nothing is launched."""
    name = function._schema.name.partition("::")[2]
    if name in _NO_LAUNCH or function.namespace not in _NAMESPACES:
        return None
    reads, writes = uses_of(function, args, kwargs)
    if function.is_view and not writes:
        return None
    known = {id(each) for each in tensors_of((args, kwargs))}
    made = [each for each in tensors_of(result) if id(each) not in known]
    names = [argument.name for argument in function._schema.arguments]
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    sizes, again = _rows_touched(name, given), _read_again(name, given, writes)
    moved = [*reads, *writes, *again, *made]
    if not moved:
        return None  # the operation only asks about types
    size = sum(sizes.get(id(each), _bytes(each)) for each in moved)
    if own := _own_product(name, size, given):
        return own
    if name in _TOKENS_FIRST:
        return _tokens_first(name, size, given)
    factors = [each for each in args if isinstance(each, Tensor)]
    flops = flops_of(name, factors)
    if flops is None:
        return Launch(name, size)
    product = _product(name, factors)
    executed = flops
    if product is None and given.get("is_causal", given.get("causal", False)):
        flops = _with_later_positions(flops, given)
        executed = flops // 2
    if product is None and name.endswith("_backward"):
        flops = flops * _COUNTED_PRODUCTS // _EXECUTED_PRODUCTS
    return Launch(name, size, flops, product, executed)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in ``tree``: arguments or results of an operation, perhaps in lists."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    found: list[Tensor] = []
    for part in tree:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (list, tuple, dict)):
            found += tensors_of(part)
    return found


def uses_of(function: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation reads, and the tensors that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for index, argument in enumerate(function._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is None:
            reads += tensors_of(value)
        elif alias.is_write:
            writes += tensors_of(value)
        # else the result is a view of the argument: no memory is touched
    return reads, writes


def flops_of(name: str, factors: Sequence[Tensor]) -> int | None:
    """Return the FLOPs of a product or of attention; ``None``: the operation is neither.

    PyTorch has a register of such formulas, whose import takes 0.16 CPU seconds of every start of a
    rank, because it imports Triton. In it heads that share keys do not count (PyTorch 2.11).

    Args:
        name: of the operation.
        factors: its arguments that are tensors. Attention's are [b, a, s, d]: queries, keys and
            values, and in the backward the gradient of its output before them.
    """
    if product := _product("mm" if name == "_scaled_mm" else name, factors):
        return 2 * product.m * product.n * product.k * product.batch
    if not name.startswith("_scaled_dot_product"):
        return None
    is_backward = name.endswith("_backward")
    queries, keys, values = factors[1:4] if is_backward else factors[:3]
    scores = prod(map(int, queries.shape[:3])) * int(keys.shape[2])
    of_keys, of_values = (3, 2) if is_backward else (1, 1)
    return 2 * scores * (of_keys * int(queries.shape[3]) + of_values * int(values.shape[3]))


def _product(name: str, factors: Sequence[Tensor]) -> Product | None:
    """Return the sizes of a matrix product; ``None``: the operation is no matrix product."""
    if name in ("addmm", "baddbmm"):
        factors = factors[1:]
    if name in ("mm", "addmm"):
        (m, k), n = factors[0].shape, factors[1].shape[1]
        return Product(int(m), int(n), int(k))
    if name in ("bmm", "baddbmm"):
        (batch, m, k), n = factors[0].shape, factors[1].shape[2]
        return Product(int(m), int(n), int(k), int(batch))
    return None


def _own_product(name: str, size: int, given: dict[str, Any]) -> Launch | None:
    """Return the launch of a product whose FLOPs PyTorch does not know; ``None``: it is none.

    Args:
        name: of the operation.
        size: bytes that the launch moves.
        given: arguments by name.
    """
    if name in _GROUPED:
        left, right, ends_g = (given[key] for key in _GROUPED[name])
        return _grouped(name, size, left, right, len(ends_g))
    if name in _ROWS_OF_GROUPS:
        left, right = given["left_sk"], given["right_gnk"].transpose(1, 2)
        return _grouped(name, size, left, right, len(right))
    if name in _TURNED:
        (groups, o, i), columns = given[_TURNED[name]].shape, given["x_ip"].shape[1]
        gaps = BLOCK * (int(groups) - 1) if "block" in name else MULTIPLE * int(groups)
        rows = int(columns) - gaps
        flops, sizes = 2 * rows * int(o) * int(i), (int(o), int(i), -(-rows // int(groups)))
        return Launch(name, size, flops, Product(*sizes, int(groups)), flops)
    if name in _BY_ROWS:
        (m, k), (n, _) = (given[key].shape for key in _BY_ROWS[name])
        flops = 2 * int(m) * int(n) * int(k)
        return Launch(name, size, flops, Product(int(m), int(n), int(k)), flops)
    return None


def _grouped(name: str, size: int, left: Tensor, right: Tensor, groups: int) -> Launch:
    """Return the launch of one product per group; groups of rows count as equally large.

    Args:
        name: of the operator.
        size: bytes that the launch moves.
        left: a factor with the rows of all groups.
        right: a matrix for each group, or for gradients of weights a factor with the same rows.
        groups: number of groups.
    """
    (rows, i), o = left.shape, right.shape[-1]
    flops, rows_of_group = 2 * int(rows) * int(i) * int(o), -(-int(rows) // groups)
    m, k = (rows_of_group, int(i)) if right.dim() == 3 else (int(i), rows_of_group)
    return Launch(name, size, flops, Product(m, int(o), k, groups), flops)


def _tokens_first(name: str, size: int, given: dict[str, Any]) -> Launch:
    """Return the launch of causal attention with tokens before heads, perhaps with a window.

    Causal attention without a window counts the products of all positions and executes half of
    them. With a window it counts and executes the products of the positions that are seen.

    Args:
        name: of the operation.
        size: bytes that the launch moves.
        given: arguments by name; heads are [b, s, a, d], or [n, a, d] of packed samples.
    """
    query, key = given["query"], given["key"]
    (queries, heads, channels), keys = query.shape[-3:], int(key.shape[-3])
    queries, window = int(queries), int(given.get("window_size_left", -1))
    one = 2 * prod(query.shape[:-3]) * int(heads) * int(channels) * _TOKENS_FIRST[name]
    if window < 0 or window >= keys - 1:
        flops = one * queries * (2 * keys - queries)
        executed = flops // 2
    else:
        behind = range(keys - queries, keys)
        flops = executed = one * sum(min(position, window) + 1 for position in behind)
    if name.endswith("_backward"):
        flops = flops * _COUNTED_PRODUCTS // _EXECUTED_PRODUCTS
    return Launch(name, size, flops, None, executed)


def _with_later_positions(flops: int, given: dict[str, Any]) -> int:
    """Return twice the FLOPs that causal attention needs.

    The queries may be only the end of a sequence whose keys are all there. Causal attention then
    spares half of the products of these queries with their own keys, and no others.

    Args:
        flops: FLOPs of all queries with all keys.
        given: arguments by name, with ``query`` and ``key`` of [b, a, s, d]. Packed samples have
            other shapes, and always have all of their queries.
    """
    if given["query"].dim() != 4:
        return flops
    queries, keys = int(given["query"].shape[2]), int(given["key"].shape[2])
    return flops * (2 * keys - queries) // keys


def _read_again(name: str, given: dict[str, Any], writes: list[Tensor]) -> list[Tensor]:
    """Return the written tensors that an operation in place also reads."""
    if not name.endswith("_"):
        return []
    unread = {id(each) for key in _ONLY_WRITTEN.get(name, ()) for each in tensors_of(given[key])}
    return [each for each in writes if id(each) not in unread]


def _rows_touched(name: str, given: dict[str, Any]) -> dict[int, int]:
    """Return the bytes of touched rows, by the id of their matrix."""
    chosen = _ROWS_OF_TOKENS.get(name)
    if chosen is None:
        return {}
    rows, indices = (given[name] for name in chosen)
    return {id(rows): indices.numel() * prod(rows.shape[1:]) * rows.element_size()}


def _bytes(tensor: Tensor) -> int:
    """Return the bytes in memory; an element that a stride of 0 repeats counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride) * tensor.element_size()
