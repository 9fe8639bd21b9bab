"""One operation of PyTorch as a launch: its bytes, and the sizes of its product."""

from collections.abc import Sequence
from math import prod
from typing import Any, Final

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

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
"""Operations that ask for memory, or for nothing."""

_NAMESPACES: Final = ("aten", "megatron_kernels")

_ROWS_OF_TOKENS: Final = {
    "embedding": ("weight", "indices"),
    "index_select": ("self", "index"),
    "index_add_": ("self", "index"),
    "merge_input_gradient": ("weight_vh", "targets_n"),
    "subtract_targets_": ("gradient_vh", "targets_n"),
}
"""Operations that touch one row of a matrix for every index: names of the matrix and the indices.
A Triton program skips rows of another shard; the count takes all."""

_ONLY_WRITTEN: Final = {"adamw_": ("quotients", "weights"), "_foreach_copy_": ("self",)}
"""Arguments that an operation in place writes and does not read."""


_EXECUTED_PRODUCTS: Final = 5
_COUNTED_PRODUCTS: Final = 4
"""Products in the backward of flash attention. It forms the scores again, and that product does not
count as the model's."""


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
        return None  # it asks about types
    size = sum(sizes.get(id(each), _bytes(each)) for each in moved)
    if name == "_grouped_mm":
        return _grouped(size, args)
    counter = flop_registry.get(function.overloadpacket)
    if counter is None:
        return Launch(name, size)
    factors = [each for each in args if isinstance(each, Tensor)]
    flops = int(counter(*factors, out_val=result))
    product = _product(name, factors)
    executed = flops
    if product is None and given.get("is_causal", given.get("causal", False)):
        flops = _with_later_positions(flops, given)
        executed = flops // 2
    if product is None and name.endswith("_backward"):
        flops = flops * _COUNTED_PRODUCTS // _EXECUTED_PRODUCTS
    return Launch(name, size, flops, product, executed)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in ``tree``."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def uses_of(function: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors whose memory an operation reads, and those whose memory it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for index, argument in enumerate(function._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is None:
            reads += tensors_of(value)
        elif alias.is_write:
            writes += tensors_of(value)
        # else the result is a view of it: nothing is touched
    return reads, writes


def _product(name: str, factors: Sequence[Tensor]) -> Product | None:
    """Return the sizes of a matrix product; ``None``: the operation is no matrix product."""
    if name in ("addmm", "baddbmm"):
        factors = factors[1:]
    if name in ("mm", "addmm", "_scaled_mm"):
        (m, k), n = factors[0].shape, factors[1].shape[1]
        return Product(int(m), int(n), int(k))
    if name in ("bmm", "baddbmm"):
        (batch, m, k), n = factors[0].shape, factors[1].shape[2]
        return Product(int(m), int(n), int(k), int(batch))
    return None


def _grouped(size: int, args: Any) -> Launch:
    """Return the launch of the products of groups of rows, all of which have equally many.

    Args:
        size: bytes.
        args: two factors and the ends of the groups, which lie in the rows of the first factor if
            the second one has a matrix for each, and else in its columns.
    """
    left, right, ends_g = args
    (m, k), n, groups = left.shape, right.shape[-1], len(ends_g)
    flops = 2 * int(m) * int(n) * int(k)
    by_rows = right.dim() == 3
    product = Product(
        -(-int(m) // groups) if by_rows else int(m),
        int(n),
        int(k) if by_rows else -(-int(k) // groups),
        groups,
    )
    return Launch("_grouped_mm", size, flops, product, flops)


def _with_later_positions(flops: int, given: dict[str, Any]) -> int:
    """Return twice the FLOPs that causality needs.

    Queries may be the end of a sequence alone, of which all earlier keys are there. Then causality
    spares half of the square of the queries and nothing else.

    Args:
        flops: of all queries with all keys.
        given: arguments by name, with ``query`` and ``key`` of [b, a, s, d]; packed samples have
            other shapes, and all their queries are there.
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
    """Return the bytes of touched rows, by the id of the matrix that they are of."""
    chosen = _ROWS_OF_TOKENS.get(name)
    if chosen is None:
        return {}
    rows, indices = (given[name] for name in chosen)
    return {id(rows): indices.numel() * prod(rows.shape[1:]) * rows.element_size()}


def _bytes(tensor: Tensor) -> int:
    """Bytes in memory; elements that a stride of 0 repeats are there once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride) * tensor.element_size()
