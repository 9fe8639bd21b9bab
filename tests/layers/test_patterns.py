"""Patterns of layers: the shortest words that say the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.layers.patterns import LayerPattern


@given(
    entries=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    last=st.integers(0, 1),
    first=st.booleans(),
)
def test_a_pattern_is_the_least_number_that_has_the_entries(
    entries: list[int], last: int, first: bool
) -> None:
    size = len(entries)

    def has_entries(pattern: LayerPattern) -> bool:
        return [pattern.entry(i, last, first) for i in range(size)] == entries

    numbers = [every for every in range(1, size + 1) if has_entries(LayerPattern(every=every))]
    wanted = LayerPattern(every=numbers[0]) if numbers else LayerPattern(listed=tuple(entries))
    assert LayerPattern.of(entries, last, first) == wanted


@pytest.mark.parametrize("entries", [[1] * 9_999 + [0], [0] + [1] * 9_999, [1] * 10_000])
def test_a_long_pattern_takes_one_walk(entries: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk for every number would take hours for as many layers as a flag allows."""
    entry, asked = LayerPattern.entry, list[int]()

    def counted(own: LayerPattern, layer: int, last: int = 1, first: bool = False) -> int:
        asked.append(layer)
        return entry(own, layer, last, first)

    monkeypatch.setattr(LayerPattern, "entry", counted)
    for last in (0, 1):
        LayerPattern.of(entries, last, first=True)
        LayerPattern.of(entries, last)
    assert len(asked) <= 4 * len(entries)
