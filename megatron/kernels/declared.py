"""The declaration of an operator's launch, which stands beside the operator's schema.

A count runs operators on tensors without values, and asks each for the work of its launch. An
operator's schema says which tensors it reads and writes. By default it reads and writes them whole,
and multiplies no matrices; only an operator that does something else declares its work.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor


class Sizes(NamedTuple):
    """Sizes of a matrix product [m, k] x [k, n], or of ``batch`` products of this size."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """FLOPs of the products."""
        return 2 * self.m * self.n * self.k * self.batch


Quickness = Literal[
    "16 bits", "8 bits", "8 bits by blocks", "8-bit weight gradients by blocks", "MXFP8"
]
"""Products that a GPU multiplies at rates of their own, by the factors and by the library: all of
those in 8 bits are products of cuBLAS. Other products are as quick as those of 16 bits."""


@dataclass(frozen=True)
class LaunchWork:
    """The work of an operator's launch.

    Attributes:
        flops: FLOPs of its products that count for the model: all of causal attention, although
            the kernel needs only half, but no scores that a backward forms again.
        executed: FLOPs that the kernel really does.
        product: sizes of its matrix product; ``None`` for other kernels, including attention.
        touched: bytes of an argument that the kernel touches, if it does not touch all; by name.
        unread: arguments that it changes in place without reading them.
        quickness: the rate of its product.
    """

    flops: int = 0
    executed: int = 0
    product: Sizes | None = None
    touched: Mapping[str, int] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    quickness: Quickness = "16 bits"


Declaration = Callable[..., LaunchWork | None]
"""Returns the work of a launch for the operator's arguments, all of them given by the names of its
schema; ``None``: the operator launches nothing."""

_DECLARED: Final[dict[str, Declaration]] = {}
_WHOLE: Final = LaunchWork()
"""The work of an operator that declares none."""


def declare(name: str, work: Declaration) -> None:
    """Declare the work of the operator with a qualified name, such as ``aten::mm``."""
    assert name not in _DECLARED, f"{name} has declared its work"
    _DECLARED[name] = work


def declared(name: str, given: Callable[[], Mapping[str, Any]]) -> LaunchWork | None:
    """Return the work of an operator's launch; ``None``: it launches nothing.

    Args:
        name: of the operator, qualified.
        given: returns its arguments by name; called only for an operator that declares its work.
    """
    own = _DECLARED.get(name)
    return _WHOLE if own is None else own(**given())


def multiplies(sizes: Sizes, quickness: Quickness = "16 bits") -> LaunchWork:
    """Return the work of a matrix product."""
    return LaunchWork(sizes.flops, sizes.flops, sizes, quickness=quickness)


def of_rows(left_mk: Tensor, right_nk: Tensor, quickness: Quickness) -> LaunchWork:
    """Return the work of the product of the rows of one factor with the rows of the other."""
    (m, k), n = map(int, left_mk.shape), len(right_nk)
    return multiplies(Sizes(m, n, k), quickness)


def of_groups(left: Tensor, right: Tensor, groups: int) -> LaunchWork:
    """Return the work of one product for each group; groups of rows count as equally large.

    Args:
        left: a factor with the rows of all groups.
        right: a matrix for each group, or for gradients of weights a factor with the same rows.
        groups: number of groups.
    """
    (rows, i), o = map(int, left.shape), int(right.shape[-1])
    of_group = -(-rows // groups)
    m, k = (of_group, i) if right.dim() == 3 else (i, of_group)
    flops = 2 * rows * i * o
    return LaunchWork(flops, flops, Sizes(m, o, k, groups))


def of_turned_groups(out_goi: Tensor, x_ip: Tensor, gaps: int) -> LaunchWork:
    """Return the work of weight gradients of groups; groups of rows count as equally large.

    Args:
        out_goi: the gradients.
        x_ip: the factor with the rows of all groups turned, and with gaps between the groups.
        gaps: columns of the gaps, which do not count.
    """
    (groups, o, i), rows = map(int, out_goi.shape), int(x_ip.shape[1]) - gaps
    flops = 2 * rows * o * i
    return LaunchWork(flops, flops, Sizes(o, i, -(-rows // groups), groups))


def touches_rows(matrix: str, indices: str) -> Declaration:
    """Return the declaration of a kernel that touches one row of a matrix for every index.

    A Triton program skips rows of other shards; the count includes them.

    Args:
        matrix: name of the argument with the rows.
        indices: name of the argument with the indices.
    """

    def work(**given: Any) -> LaunchWork:
        rows = given[matrix]
        size = given[indices].numel() * prod(rows.shape[1:]) * rows.element_size()
        return LaunchWork(touched={matrix: size})

    return work


def overwrites(*names: str) -> Declaration:
    """Return the declaration of a kernel that changes arguments in place without reading them."""
    return lambda **_: LaunchWork(unread=names)
