"""Garbage is collected when the rules of the run say so, and at no other time."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from megatron.training.guard.collector import Collector


class Cycle:
    """An object that refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.own = self


def garbage() -> "weakref.ref[Cycle]":
    return weakref.ref(Cycle())


@pytest.fixture(autouse=True)
def python_as_before() -> Iterator[None]:
    yield
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("interval", [None, 0, 3])
def test_what_is_there_at_the_begin_is_passed_over(interval: int | None) -> None:
    before, kept = garbage(), Cycle()
    with Collector(interval).running():
        assert before() is None
        frozen = weakref.ref(kept)
        del kept
        gc.collect()
        assert frozen() is not None
        assert gc.isenabled() is (interval is None)
    gc.collect()
    assert frozen() is None


def test_it_collects_after_every_so_many_iterations() -> None:
    collector = Collector(3)
    with collector.running():
        seen = []
        for iteration in range(7):
            waiting = garbage()
            collector.ended(iteration)
            seen.append(waiting() is None)
        assert seen == [False, False, True, False, False, True, False]


@pytest.mark.parametrize(
    ("collector", "collects"),
    [(Collector(0), True), (Collector(0, around_evaluations=False), False), (Collector(), False)],
)
def test_it_collects_around_evaluations(collector: Collector, collects: bool) -> None:
    with collector.running():
        gc.disable()  # so that no threshold is met here
        before = garbage()
        with collector.evaluating():
            assert (before() is None) is collects
            within = garbage()
        assert (within() is None) is collects
        gc.enable()


def test_objects_that_were_replaced_are_freed() -> None:
    replaced = Cycle()
    collector = Collector(0)
    with collector.running():
        old = weakref.ref(replaced)
        del replaced
        collector.settle()
        assert old() is None
        assert gc.get_freeze_count() > 0
