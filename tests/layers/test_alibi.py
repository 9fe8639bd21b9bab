"""The slopes of ALiBi are those of its paper and of BLOOM."""

import pytest

from megatron.layers.alibi import alibi_slopes


def test_powers_of_two_make_a_geometric_sequence() -> None:
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(1) == (2.0**-8,)


def test_further_heads_lie_between_those_of_the_next_power() -> None:
    assert alibi_slopes(12) == pytest.approx(
        [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    )


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 7, 16, 71, 112])
def test_every_head_has_a_slope_of_its_own(heads: int) -> None:
    slopes = alibi_slopes(heads)
    assert len(slopes) == len(set(slopes)) == heads
    assert all(0 < slope < 1 for slope in slopes)
