"""Figures are written in units that suit their size: none but zero reads as zero."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.simulator.units import MEMORY, TIME, Scale, percent

SIZES = {unit.name: unit.size for scale in (TIME, MEMORY) for unit in scale.units}


@pytest.mark.parametrize(
    ("scale", "value", "written"),
    [
        (TIME, 12.3456, "12.346 s"),
        (TIME, 0.1, "0.100 s"),
        (TIME, 0.0999, "99.900 ms"),
        (TIME, 0.00005, "50.000 us"),
        (TIME, 0.0, "0 s"),
        (MEMORY, 38 * 2**30, "38.0 GiB"),
        (MEMORY, 2**29, "512.0 MiB"),
        (MEMORY, 1536, "1.5 KiB"),
        (MEMORY, 3, "3.0 B"),
    ],
)
def test_the_unit_suits_the_size(scale: Scale, value: float, written: str) -> None:
    assert scale.write(value) == written


@given(st.floats(0.01, 1e9), st.sampled_from([TIME, MEMORY]))
def test_what_is_read_is_what_was_written(value: float, scale: Scale) -> None:
    value *= scale.units[-1].size * 100
    number, name = scale.write(value).split()
    assert float(number) > 0
    assert float(number) * SIZES[name] == pytest.approx(value, rel=0.06)


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=5))
def test_a_column_has_one_unit_in_which_none_reads_zero(values: list[float]) -> None:
    unit = TIME.unit(*values)
    assert all(float(TIME.number(value, unit)) > 0 for value in values)


@given(st.floats(1e-9, 1.0))
def test_a_share_never_reads_zero(share: float) -> None:
    written = percent(share)
    assert re.fullmatch(r"\d+(\.\d+)?(e-\d+)?%", written)
    assert float(written.rstrip("%")) == pytest.approx(
        100 * share, rel=0.06, abs=0.05 * (share >= 5e-4)
    )
    assert float(written.rstrip("%")) > 0
