"""A pass has a text form that can be read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.passes import CHUNKED_KINDS, PLANNED_KINDS, Pass

slices = st.integers(0, 15)
passes = st.builds(
    Pass, st.sampled_from(PLANNED_KINDS), st.integers(0, 10**6), st.just(0), slices
) | st.builds(Pass, st.sampled_from(CHUNKED_KINDS), st.integers(0, 999), st.integers(0, 7), slices)


@given(passes)
def test_text_round_trip(item: Pass) -> None:
    assert Pass.parse(str(item)) == item


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (Pass("F", 3), "F3"),
        (Pass("B", 12, 1), "B12.1"),
        (Pass("IF", 0), "IF0"),
        (Pass("IB", 7), "IB7"),
    ],
)
def test_text_form(item: Pass, text: str) -> None:
    assert str(item) == text


@pytest.mark.parametrize(
    "text", ["", "F", "3", "Q3", "f3", "F-1", "F3.", "F3.x", "F3 ", "IW2", "FB1", "U0"]
)
def test_what_is_no_pass_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no pass: write a kind") as caught:
        Pass.parse(text)
    assert f"'{text}'" in str(caught.value)


@pytest.mark.parametrize("text", ["S3.1", "T0.1", "IF2.0", "IB1.3"])
def test_vocabulary_passes_have_no_chunk(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' names a chunk"):
        Pass.parse(text)
