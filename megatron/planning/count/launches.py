"""One operation of PyTorch as a launch: the bytes it moves, and its declared products."""

from math import prod
from typing import Any, Final

from torch import Tensor

from megatron.kernels.pytorch_launches import given_to, work_of
from megatron.simulator.costs.count import Launch, Product

_NAMESPACES: Final = ("aten", "megatron_kernels")


def launch_of(function: Any, args: Any, kwargs: Any, result: Any) -> Launch | None:
    """Return the launch of an operation; ``None``: nothing is launched."""
    if function.namespace not in _NAMESPACES:
        return None
    work = work_of(function, args, kwargs)
    reads, writes = uses_of(function, args, kwargs)
    if work is None or (function.is_view and not writes):
        return None
    name = function._schema.name.partition("::")[2]
    known = {id(each) for each in tensors_of((args, kwargs))}
    made = [each for each in tensors_of(result) if id(each) not in known]
    given = given_to(function, args, kwargs) if work.unread or work.touched else {}
    unread = {id(each) for key in work.unread for each in tensors_of(given[key])}
    again = [each for each in writes if name.endswith("_") and id(each) not in unread]
    moved = [*reads, *writes, *again, *made]
    if not moved:
        return None  # the operation only asks about types
    touched = {id(given[key]): size for key, size in work.touched.items()}
    size = sum(touched.get(id(each), _bytes(each)) for each in moved)
    product = None if work.product is None else Product(*work.product)
    return Launch(name, size, work.flops, product, work.executed)


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


def _bytes(tensor: Tensor) -> int:
    """Return the bytes in memory; an element that a stride of 0 repeats counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride) * tensor.element_size()
