"""One operation of PyTorch as a launch: the bytes it moves, and its declared products."""

from functools import cache
from math import prod
from typing import Any, Final, NamedTuple

from torch import Tensor

from megatron.kernels.pytorch_launches import given_to, work_of
from megatron.simulator.costs.count import Launch, Product

_NAMESPACES: Final = ("aten", "megatron_kernels")


class _Operator(NamedTuple):
    """Facts of an operator. PyTorch makes them anew at each question, and counts ask often.

    Attributes:
        name: its name without the namespace.
        launches: whether its namespace has operators that launch.
        is_view: whether its result is a view of an argument.
        arguments: for every argument its name, whether it is read, and whether it is written.
    """

    name: str
    launches: bool
    is_view: bool
    arguments: tuple[tuple[str, bool, bool], ...]


@cache
def _operator(function: Any) -> _Operator:
    schema = function._schema
    aliases = [(own.name, own.alias_info) for own in schema.arguments]
    return _Operator(
        schema.name.partition("::")[2],
        function.namespace in _NAMESPACES,
        function.is_view,
        # The result may be a view of an argument that is neither: no memory is touched.
        tuple((name, info is None, info is not None and info.is_write) for name, info in aliases),
    )


def launch_of(function: Any, args: Any, kwargs: Any, result: Any) -> Launch | None:
    """Return the launch of an operation; ``None``: nothing is launched."""
    operator = _operator(function)
    if not operator.launches:
        return None
    work = work_of(function, args, kwargs)
    if work is None:
        return None
    reads, writes = uses_of(function, args, kwargs)
    if operator.is_view and not writes:
        return None
    name = operator.name
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
    return Launch(name, size, work.flops, product, work.executed, work.quickness)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in ``tree``: arguments or results of an operation, perhaps in lists."""
    found: list[Tensor] = []
    _add_tensors(tree, found)
    return found


def _add_tensors(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (list, tuple, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            _add_tensors(part, found)


def uses_of(function: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation reads, and the tensors that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    given = len(args)
    for index, (name, is_read, is_written) in enumerate(_operator(function).arguments):
        value = args[index] if index < given else kwargs.get(name)
        if is_read:
            _add_tensors(value, reads)
        elif is_written:
            _add_tensors(value, writes)
    return reads, writes


def _bytes(tensor: Tensor) -> int:
    """Return the bytes in memory; an element that a stride of 0 repeats counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride) * tensor.element_size()
