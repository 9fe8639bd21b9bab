"""The search for the fastest plan finds it, and makes no plan that cannot be it."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.search.fastest import fastest


@dataclass
class Contender:
    """A plan of which the time is asked for."""

    least_time: float
    slack: float
    fits: bool
    planned: list[float] = field(default_factory=list)

    @property
    def time(self) -> float:
        self.planned.append(self.least_time)
        return self.least_time + self.slack


TIMES = st.integers(1, 100)
CONTENDERS = st.lists(st.builds(Contender, TIMES, st.integers(0, 20), st.booleans()), max_size=9)


def fitting(contender: Contender) -> bool:
    return contender.fits


@given(contenders=CONTENDERS)
def test_it_is_the_fastest_that_fits(contenders: list[Contender]) -> None:
    found = fastest(contenders, fitting)
    times = [contender.time for contender in contenders if contender.fits]
    assert (None if found is None else found.time) == min(times, default=None)


@given(contenders=CONTENDERS, indifference=st.floats(0, 0.5))
def test_it_is_near_the_fastest_and_what_cannot_beat_it_is_not_planned(
    contenders: list[Contender], indifference: float
) -> None:
    found = fastest(contenders, fitting, indifference)
    if found is None:
        assert not any(map(fitting, contenders))
        return
    planned = [contender for contender in contenders if contender.planned]
    assert all(fitting(contender) for contender in planned)
    assert found.time * (1 - indifference) <= min(c.time for c in contenders if c.fits)
    assert all(contender.least_time <= found.time for contender in planned)
