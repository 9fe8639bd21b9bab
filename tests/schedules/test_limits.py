"""A limit by memory: its bytes in both forms, and the least limit that is enough."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.limits import GIB_FLAG, PERCENT_FLAG, Gib, LimitByMemory, Percent
from megatron.schedules.settings import PlanSettings

GIB = 2**30


def test_both_forms_are_bytes_of_a_rank() -> None:
    assert Percent(25).bytes(80 * GIB) == Gib(20).bytes(80 * GIB) == 20 * GIB
    assert Gib(20).bytes(10 * GIB) == 20 * GIB, "the memory does not matter"
    assert (str(Percent(25)), str(Gib(0.5))) == (f"{PERCENT_FLAG} 25", f"{GIB_FLAG} 0.5")


@given(
    form=st.sampled_from([(Percent, 1.0, " percent"), (Gib, 0.01, " GiB")]),
    memory=st.floats(GIB, 200 * GIB),
    share=st.floats(0.01, 1.0),
)
def test_the_least_limit_is_enough_and_a_step_less_is_not(
    form: tuple[type[LimitByMemory], float, str], memory: float, share: float
) -> None:
    kind, step, unit = form
    needed = share * memory
    words = kind(1).enough(needed, memory)
    assert words.endswith(unit)
    least = float(words.removesuffix(unit))
    assert kind(least).bytes(memory) >= needed * (1 - 1e-6)
    assert kind(least - step).bytes(memory) < needed


@pytest.mark.parametrize(
    ("given_flags", "limit", "flag"),
    [
        ({}, None, "--zero-bubble-max-pending-backward"),
        ({"max_pending_backward": 3.0}, None, "--zero-bubble-max-pending-backward"),
        ({"memory_limit_gib": 9.0}, Gib(9.0), GIB_FLAG),
        ({"adaptive_memory_limit_percentile": 60.0}, Percent(60.0), PERCENT_FLAG),
        (
            {"max_pending_backward": 3.0, "adaptive_memory_limit_percentile": 60.0},
            None,
            "--zero-bubble-max-pending-backward",
        ),
    ],
)
def test_settings_keep_the_one_limit_that_acts(
    given_flags: dict[str, float], limit: LimitByMemory | None, flag: str
) -> None:
    options: dict[str, Any] = {f"zero_bubble_{name}": own for name, own in given_flags.items()}
    own = PlanSettings(**options)
    assert (own.limit_by_memory, own.limiting_flag) == (limit, flag)
    kept = own.with_limit(own.limit_by_memory)
    assert (kept.limit_by_memory, kept.memory_limit) == (limit, own.memory_limit)
    assert not own.with_limit(None).is_limited_by_memory
