"""Linear layers that ranks share: what they move when, and what they keep. Nobody else is there."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from optimizer.entries import entries
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.layers.linear import Linear, Way
from megatron.layers.main_grad import main_grad_of
from megatron.layers.recompute import NO_RECOMPUTATION, Recomputation, again
from megatron.layers.site import Site
from megatron.layers.weight_gradients import parts_of
from megatron.optimizer.bucket import Bucket
from megatron.parallel.tensor import TensorParallel

CPU = torch.device("cpu")
T, B, U, IN, OUT = 2, 3, 4, 6, 10


class Waited:
    """A result that notes when it is waited for."""

    def __init__(self, name: str, value: Tensor, events: list[str]) -> None:
        self._name, self._value, self._events = name, value, events

    def wait(self) -> Tensor:
        self._events.append(f"{self._name} done")
        return self._value


class Noting(TensorParallel):
    """Two ranks with their own tokens, of which the other has the same numbers as this one."""

    rank, size, sequence_parts = 1, T, T

    def __init__(self) -> None:
        self.events: list[str] = []
        self.gathered: list[StorageWeakRef] = []

    def gather(self, x_buh: Tensor) -> Tensor:
        self.events.append("gather")
        return self._doubled(x_buh)

    def start_gather(self, x_buh: Tensor) -> Waited:
        self.events.append("gather begins")
        return Waited("gather", self._doubled(x_buh), self.events)

    def reduce(self, partial_bsh: Tensor) -> Tensor:
        self.events.append("reduce")
        return self._summed(partial_bsh)

    def start_reduction(self, partial_bsh: Tensor) -> Waited:
        self.events.append("reduction begins")
        return Waited("reduction", self._summed(partial_bsh), self.events)

    def own_tokens(self, x_bsh: Tensor) -> Tensor:
        return x_bsh[:, U:]

    def _doubled(self, x_buh: Tensor) -> Tensor:
        whole = torch.cat([x_buh, x_buh], dim=1)
        self.gathered.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    def _summed(self, partial_bsh: Tensor) -> Tensor:
        return T * partial_bsh[:, U:]


class Products(TorchDispatchMode):
    """Notes every product of matrices by what comes out, dX or dW."""

    def __init__(self, events: list[str], weight: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch has no types there
        self._events, self._weight = events, tuple(weight.shape)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self._events.append("dW" if tuple(result.shape) == self._weight else "dX")
        return result


def make_linear(
    way: Way,
    tensor: Noting,
    defer: Callable[[Any], None] | None = None,
    recomputation: Recomputation = NO_RECOMPUTATION,
) -> Linear:
    site = Site(CPU, torch.float64, tensor=tensor, recomputation=recomputation)
    linear = Linear(IN, OUT, site, bias=True, parallel=way)
    generator = torch.Generator().manual_seed(5)
    for parameter in linear.parameters():
        parameter.data.normal_(generator=generator)
    Bucket(entries(linear.named_parameters()), site.kernels)
    linear.defer = defer
    return linear


def forward_and_backward(linear: Linear, way: Way, tensor: Noting) -> tuple[Tensor, Tensor]:
    """The output and the input's gradient; the events of the backward only are left."""
    shape = (B, U, IN) if way == "columns" else (B, T * U, IN // T)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = linear(x)
    assert tensor.events == (["gather"] if way == "columns" else ["reduce"])
    tensor.events.clear()
    with Products(tensor.events, linear.weight):
        y.backward(torch.randn_like(y))
    assert x.grad is not None
    return y, x.grad


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (
            "columns",
            ["gather begins", "dX", "gather done", "reduction begins", "dW", "reduction done"],
        ),
        ("rows", ["gather", "dX", "dW"]),
    ],
)
def test_communication_runs_beside_a_product(way: Way, expected: list[str]) -> None:
    """The input comes beside dX, and its gradient leaves beside dW."""
    tensor = Noting()
    linear = make_linear(way, tensor)
    y, x_grad = forward_and_backward(linear, way, tensor)
    assert tensor.events == expected
    assert y.shape == ((B, T * U, OUT // T) if way == "columns" else (B, U, OUT))
    assert x_grad.shape == ((B, U, IN) if way == "columns" else (B, T * U, IN // T))


@pytest.mark.parametrize(
    ("way", "in_b"),
    [("columns", ["dX", "reduce"]), ("rows", ["gather", "dX"])],
)
def test_w_gathers_again(way: Way, in_b: list[str]) -> None:
    """From B to W a rank keeps nothing of the tokens that others have."""
    tensor, deferred = Noting(), list[Callable[[], None]]()
    linear = make_linear(way, tensor, deferred.append)
    forward_and_backward(linear, way, tensor)
    assert tensor.events == in_b
    assert tensor.gathered
    assert all(whole.expired() for whole in tensor.gathered)
    assert not main_grad_of(linear.weight).any()
    tensor.events.clear()
    with Products(tensor.events, linear.weight):
        deferred.pop()()
    assert tensor.events == ["gather begins", "gather done", "dW"]
    assert main_grad_of(linear.weight).any()


def deferred_works(tensor: Noting, ways: Sequence[Way]) -> tuple[Linear, list[Callable[[], None]]]:
    deferred = list[Callable[[], None]]()
    for way in ways:
        linear = make_linear(way, tensor, deferred.append)
        tensor.events.clear()
        forward_and_backward(linear, way, tensor)
    tensor.events.clear()
    return linear, deferred


def events_of_parts(tensor: Noting, linear: Linear, works: list[Callable[[], None]]) -> list[str]:
    with Products(tensor.events, linear.weight):
        for part in parts_of(works):
            part()
            tensor.events.append("|")
    assert not works
    return ["product" if event in ("dW", "dX") else event for event in tensor.events]


BEGINS, DONE = "gather begins", "gather done"


def test_w_gathers_for_the_next_two_products_while_it_multiplies() -> None:
    """Other passes may run between two parts, while tensors are under way."""
    tensor = Noting()
    linear, works = deferred_works(tensor, ("columns", "rows", "columns", "rows"))
    assert events_of_parts(tensor, linear, works) == [
        *(BEGINS, BEGINS, "|"),
        *(DONE, BEGINS, "product", "|"),
        *(DONE, BEGINS, "product", "|"),
        *(DONE, "product", "|"),
        *(DONE, "product", "|"),
    ]


def test_nothing_is_under_way_during_a_work_that_may_call_the_same_ranks() -> None:
    """Such as experts that are with their layer: they send tokens to each other again."""
    tensor = Noting()
    linear, works = deferred_works(tensor, ("columns", "rows", "columns", "rows"))
    works.insert(1, lambda: tensor.events.append("other"))
    found = events_of_parts(tensor, linear, works)
    assert found == [
        *(BEGINS, "|", DONE, "product", "|"),
        *("other", "|"),
        *(BEGINS, DONE, BEGINS, BEGINS, "product", "|"),
        *(DONE, "product", "|"),
        *(DONE, "product", "|"),
    ]
    under_way = [found[:at].count(BEGINS) - found[:at].count(DONE) for at in range(len(found))]
    assert under_way[found.index("other")] == 0
    assert max(under_way) == 2


def test_a_w_without_gatherings_has_a_part_for_each_product() -> None:
    done = list[int]()
    parts = list(parts_of([lambda: done.append(1), lambda: done.append(2)]))
    assert len(parts) == 2
    for part in parts:
        part()
    assert done == [1, 2]


@pytest.mark.parametrize("way", ["columns", "rows"])
def test_a_pass_pauses_between_the_products_of_two_layers(way: Way) -> None:
    """After the product that no collective follows: of outputs forward, of inputs backward."""
    tensor = Noting()
    tensor.pause = lambda: tensor.events.append("pause")  # type: ignore[method-assign]
    linear = make_linear(way, tensor)
    shape = (B, U, IN) if way == "columns" else (B, T * U, IN // T)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = linear(x)
    if way == "columns":
        assert tensor.events == ["gather", "pause"]
        tensor.events.clear()
        y.sum().backward()
        assert "pause" not in tensor.events
        return
    assert tensor.events == ["reduce"]
    tensor.events.clear()
    with Products(tensor.events, linear.weight):
        y.sum().backward()
    assert tensor.events == ["gather", "dX", "dW", "pause"]


def test_nothing_whole_is_kept_for_a_backward_that_is_not_split() -> None:
    tensor = Noting()
    y = make_linear("columns", tensor)(torch.randn(B, U, IN, dtype=torch.float64))
    assert y.requires_grad
    assert [whole.expired() for whole in tensor.gathered] == [True]


@pytest.mark.parametrize("split", [False, True])
def test_computing_again_ends_before_a_last_product_that_ranks_add_up(split: bool) -> None:
    tensor, deferred = Noting(), list[Callable[[], None]]()
    whole_layers = Recomputation(group=1)
    linear = make_linear("rows", tensor, deferred.append if split else None, whole_layers)
    plain = make_linear("rows", Noting(), None)
    x, other = (torch.ones((B, T * U, IN // T), dtype=torch.float64) for _ in range(2))
    for leaf in (x, other):
        leaf.requires_grad_()
    y = again(lambda x: linear(x.sin()), x)
    assert tensor.events == ["reduce"]
    tensor.events.clear()
    with Products(tensor.events, linear.weight):
        y.square().sum().backward()
    for work in deferred:
        work()
    plain(other.sin()).square().sum().backward()
    assert tensor.events[:2] == ["gather", "dX"]
    assert "reduce" not in tensor.events
    assert x.grad is not None
    assert other.grad is not None
    assert torch.equal(x.grad, other.grad)
    assert torch.equal(main_grad_of(linear.weight), main_grad_of(plain.weight))


@pytest.mark.parametrize("way", ["columns", "rows"])
def test_an_input_without_gradient_is_not_reduced(way: Way) -> None:
    tensor = Noting()
    linear = make_linear(way, tensor)
    shape = (B, U, IN) if way == "columns" else (B, T * U, IN // T)
    linear(torch.randn(shape, dtype=torch.float64)).sum().backward()
    assert not any("reduction" in event for event in tensor.events)
    assert main_grad_of(linear.weight).any()


def test_a_rank_alone_runs_pytorchs_own_linear() -> None:
    """So that what one rank computes, and how fast, has nothing to do with sharing."""
    linear = Linear(IN, OUT, Site(CPU, torch.float32), bias=True, parallel="rows")
    torch.nn.init.normal_(linear.weight)
    torch.nn.init.normal_(linear.bias)
    y = linear(torch.randn(B, U, IN, requires_grad=True))
    names = set(names_of_graph(y))
    assert any(name.startswith("Addmm") for name in names)
    assert not any("Shared" in name for name in names)
    assert linear.holdings == {}


def names_of_graph(y: Tensor) -> Iterator[str]:
    """The kinds of nodes of a tensor's autograd graph."""
    nodes = [y.grad_fn]
    while nodes:
        if (node := nodes.pop()) is not None:
            yield node.name()
            nodes += [following for following, _ in node.next_functions]
