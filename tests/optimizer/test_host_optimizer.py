"""States on the host change no bit, whenever the copies between host and device are made."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
from optimizer.entries import ALONE, QKV, entries
from torch import Tensor, nn

from megatron.kernels.choose import kernels_for
from megatron.layers.main_grad import main_grad_of
from megatron.optimizer import host_optimizer
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.host_link import HostLink, parts_on_host
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.make import make_optimizer, make_with_host
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.parameters import ParameterPart
from megatron.optimizer.settings import HostStateSettings, OptimizerSettings
from megatron.parallel.lanes import InlineLane, Lane, Pending, ThreadLane

CPU: Final = torch.device("cpu")
CONFIG: Final = OptimizerSettings(lr=0.1, weight_decay=0.3, clip_grad=1.0, adam_beta2=0.95)
RATES: Final = Rates(0.1, 0.02, 0.3)
SHAPES: Final = {
    "embedding.word_embeddings.weight": (9, 4),
    "fc1.weight": (5, 7),
    "norm.weight": (37,),
    "fc2.weight": (16, 16),
    "fc2.bias": (16,),
    "fc3.weight": (11, 16),
}
BATCH: Final = 128
"""Elements of a batch, so that the parts of all sizes make four batches."""


class LateLane:
    """Runs work when its result is waited for, and not before."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []

    def submit(self, work: Callable[[], Any]) -> Pending[Any]:
        self.waiting.append(work)
        return _Late(self, work)

    def close(self) -> None: ...


class _Late:
    def __init__(self, lane: LateLane, work: Callable[[], Any]) -> None:
        self._lane, self._work = lane, work

    def wait(self) -> None:
        while self._work in self._lane.waiting:
            self._lane.waiting.pop(0)()


class Trained:
    """A few parameters whose optimizer has states on the host, or none."""

    def __init__(
        self,
        states: HostStateSettings | None = None,
        lane: Callable[[], Lane] = InlineLane,
        config: OptimizerSettings = CONFIG,
        dtype: torch.dtype = torch.bfloat16,
        gradients: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.parameters = entries(
            (name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
            for name, shape in SHAPES.items()
        )
        kernels = kernels_for(CPU, dtype)
        self.bucket = Bucket(self.parameters, kernels, gradient_dtype=gradients)
        parts = list(map(ParameterPart.whole, self.parameters))
        self.optimizer: Optimizer
        if states is None:
            self.optimizer = make_optimizer(config, QKV, ALONE, kernels, parts)
            return
        self.link = HostLink(parts, states, CPU, batch=BATCH)
        self.link.out, self.link.back = lane(), lane()
        self.optimizer = make_with_host(config, QKV, ALONE, kernels, self.link, parts)

    def draw(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for entry in self.parameters:
            gradient = main_grad_of(entry.parameter)
            gradient.copy_(torch.randn(gradient.shape, generator=generator))

    def step(self, number: int) -> None:
        self.draw(number)
        self.optimizer.step(RATES, 3.0, 0.3)  # both to be scaled and clipped

    def kept(self) -> dict[str, Tensor]:
        """All masters, states and weights."""
        tensors = {
            f"{name}.{kind}": tensor.clone()
            for name in SHAPES
            for kind, tensor in self.optimizer.tensors_of(name).items()
        }
        return tensors | {own.name: own.parameter.detach().clone() for own in self.parameters}


def assert_equal(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


def both(**how: Any) -> tuple[Trained, Trained]:
    """The same parameters with and without states on the host."""
    fraction = how.pop("fraction", 1.0)
    lane = how.pop("lane", LateLane)
    return Trained(HostStateSettings(True, fraction), lane, **how), Trained(**how)


@pytest.mark.parametrize("lane", [InlineLane, LateLane, lambda: ThreadLane("copies")])
@pytest.mark.parametrize(
    ("how", "fraction"),
    [
        ({}, 1.0),
        ({}, 0.5),
        ({"dtype": torch.float32}, 1.0),
        ({"dtype": torch.float32}, 0.5),
        ({"dtype": torch.float16}, 0.3),
        ({"gradients": torch.bfloat16}, 1.0),
        ({"config": replace(CONFIG, optimizer="sgd")}, 0.5),
        ({"config": replace(CONFIG, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")}, 1.0),
    ],
    ids=str,
)
def test_steps_are_those_without(
    how: dict[str, Any], fraction: float, lane: Callable[[], Lane]
) -> None:
    ours, expected = both(fraction=fraction, lane=lane, **how)
    for number in range(3):
        ours.step(number)
        expected.step(number)
        assert_equal(ours.kept(), expected.kept())
    assert ours.optimizer.steps == 3
    assert len(ours.link.names) == len(SHAPES) or fraction < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_loaded_states_reach_the_device(dtype: torch.dtype) -> None:
    ours, expected = both(dtype=dtype, fraction=0.5)
    expected.step(0)
    for name in SHAPES:
        theirs = expected.optimizer.tensors_of(name)
        for kind, tensor in ours.optimizer.tensors_of(name).items():
            tensor.detach().copy_(theirs[kind].detach())
    ours.optimizer.loaded(1)
    assert_equal(ours.kept(), expected.kept())
    for own in (ours, expected):
        own.step(1)
    assert_equal(ours.kept(), expected.kept())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_step_on_a_guess_is_undone_and_taken_again(dtype: torch.dtype, fraction: float) -> None:
    config = replace(CONFIG, post_validation=True)
    ours, expected = both(config=config, dtype=dtype, fraction=fraction)
    for own in (ours, expected):
        own.step(0)
        before = own.kept()
        own.draw(1)
        own.optimizer.save()
        own.optimizer.step(RATES, 0.5, 0.3)
        own.optimizer.restore()
        assert_equal(own.kept(), before)
        own.optimizer.step(RATES, 3.0)
    assert_equal(ours.kept(), expected.kept())


def test_a_step_on_no_number_changes_nothing() -> None:
    ours, _ = both()
    before = ours.kept()
    with pytest.raises(FloatingPointError):
        ours.optimizer.step(RATES, float("nan"))
    assert_equal(ours.kept(), before)
    assert not ours.link.out.waiting  # type: ignore[attr-defined]  # a LateLane


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_at_least_the_share_is_on_the_host(fraction: float) -> None:
    parts = list(map(ParameterPart.whole, Trained().parameters))
    sizes = {part.name: part.weight.numel() for part in parts}
    names = parts_on_host(parts, fraction)
    share = sum(sizes[name] for name in names) - fraction * sum(sizes.values())
    assert 0 <= share < max((sizes[name] for name in names), default=1)


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.9])
def test_copies_on_two_ranks_are_both_on_the_host(fraction: float) -> None:
    """However many other parameters the ranks have; the CPU and a GPU round in other orders."""
    copied = "embedding.word_embeddings.weight"
    parts = list(map(ParameterPart.whole, Trained().parameters))
    few = [part for part in parts if part.name in (copied, "norm.weight")]
    for own in (parts, few):
        assert copied in parts_on_host(own, fraction, frozenset((copied,)))


@pytest.mark.parametrize("in_order", [True, False])
def test_gradients_of_the_next_optimizer_travel_meanwhile(in_order: bool) -> None:
    """A sharded optimizer has one optimizer per bucket. In another order steps are right too."""
    ours, expected = Trained(), Trained()
    parts = list(map(ParameterPart.whole, ours.parameters))
    link, lane = HostLink(parts, HostStateSettings(), CPU, batch=BATCH), LateLane()
    link.out, link.back = lane, LateLane()
    kernels = kernels_for(CPU, torch.bfloat16)
    made = [
        make_with_host(CONFIG, QKV, ALONE, kernels, link, own) for own in (parts[:3], parts[3:])
    ]
    for number in range(3):
        ours.draw(number)
        for optimizer in made if in_order else reversed(made):
            optimizer.step(RATES, 3.0, 0.3)
            assert len(lane.waiting) == (in_order and optimizer is made[0])
        expected.step(number)
        for own, other in zip(ours.parameters, expected.parameters, strict=True):
            assert torch.equal(own.parameter, other.parameter), own.name


@contextmanager
def never_awaited() -> Iterator[None]:
    """Let the CPU update before gradients have arrived."""
    with patch.object(host_optimizer, "wait_on_host", lambda pending: None):
        yield


@contextmanager
def weights_left_behind() -> Iterator[None]:
    """Let the passes begin before weights have come back."""
    with patch.object(host_optimizer.HostOptimizer, "_finish", lambda self: None):
        yield


@contextmanager
def one_slot() -> Iterator[None]:
    """Let gradients arrive where the CPU reads those of the batch before."""
    make = HostLink.__init__

    def spoiled(self: HostLink, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.slots = (self.slots[0], self.slots[0])

    with patch.object(HostLink, "__init__", spoiled):
        yield


@pytest.mark.parametrize(
    ("fault", "lane"),
    [(never_awaited, LateLane), (weights_left_behind, LateLane), (one_slot, InlineLane)],
)
def test_faults_on_purpose_are_found(fault: Callable[[], Any], lane: Callable[[], Lane]) -> None:
    expected = Trained()
    expected.step(0)
    with fault():
        ours = Trained(HostStateSettings(), lane)
        ours.step(0)
    with pytest.raises(AssertionError):
        assert_equal(ours.kept(), expected.kept())
