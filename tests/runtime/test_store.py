"""The store gives each value once, and counts what is between F and B."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megatron.runtime.store import ActivationStore


def test_a_value_is_kept_until_it_is_taken() -> None:
    store, value = ActivationStore(), object()
    store.put("x", 3, value)
    assert store.get("x", 3) is value
    assert len(store) == 1
    assert store.take("x", 3) is value
    assert len(store) == 0
    with pytest.raises(KeyError):
        store.take("x", 3)


def test_a_value_is_not_replaced() -> None:
    store = ActivationStore()
    store.put("x", 3, 1)
    with pytest.raises(AssertionError, match=r"\('x', 3, 0\) is there already"):
        store.put("x", 3, 2)


def test_names_microbatches_and_places_are_apart() -> None:
    store = ActivationStore()
    keys = [(name, i, place) for name in ("x", "input") for i in (0, 1) for place in (0, 1)]
    for value, (name, i, place) in enumerate(keys):
        store.put(name, i, value, place)
    assert [store.take(*key[:2], key[2]) for key in keys] == list(range(len(keys)))


@given(st.lists(st.booleans()))
def test_peak_is_the_most_graphs_held_at_once(forwards: list[bool]) -> None:
    store, held, peak = ActivationStore(), [], 0
    for number, forward in enumerate(forwards):
        if forward:
            store.put("graph", number, None)
            store.put("x", number, None)  # other values do not count
            held.append(number)
        elif held:
            store.take("graph", held.pop(0))
        peak = max(peak, len(held))
    assert store.peak_in_flight == peak
