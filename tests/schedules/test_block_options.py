"""The options of blocks: each is one field, with the facts that rows, flags and messages need."""

import dataclasses
from inspect import signature

import pytest

from megatron.library import plans
from megatron.schedules.block_options import BlockOptions
from megatron.schedules.catalogue import OPTION_FLAGS, SCHEDULES, TRAITS
from megatron.schedules.request import Request

FIELDS = {own.name: own.default for own in dataclasses.fields(BlockOptions)}


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_take_fields_with_their_defaults(name: str) -> None:
    """A row's own defaults are those of the node: a request without options has the row itself."""
    known = SCHEDULES[name]
    made = known.with_options
    taken = {} if made is None else {n: p.default for n, p in signature(made).parameters.items()}
    assert taken.items() <= FIELDS.items()
    assert Request(name, "none", 2, 4).catalogued is known


def test_every_option_has_a_schedule_that_takes_it() -> None:
    assert {name for own in TRAITS.values() for name in own.block_options} == {*FIELDS}


def test_an_option_has_a_flag_a_short_name_and_a_value() -> None:
    (given,) = BlockOptions.of(group=6).given
    assert given.written == "--microbatch-group-size-per-virtual-pipeline-stage 6"
    assert given.declared.option in OPTION_FLAGS
    assert given.declared.names[1:] == ("--group",)
    assert str(given) == "group=6"
    assert BlockOptions.of(group=None).given == ()


def test_an_option_is_left_out_where_it_is_not_taken_or_has_a_fault() -> None:
    own = BlockOptions.of(group=6)
    assert own.taken_by(TRAITS["interleaved"]) == own == own.sound(6)
    assert own.taken_by(TRAITS["gis"]) == BlockOptions() == own.sound(7)


def test_rows_of_equal_options_are_one_row() -> None:
    """Plans of one row are found again by it."""
    values = BlockOptions.of(group=6).values
    wider = SCHEDULES["interleaved"].made_with(values)
    assert wider is SCHEDULES["interleaved"].made_with(values)
    assert wider.block(4, 12, 2).group == 6
    assert SCHEDULES["interleaved"].block(4, 12, 2).group == 4


def test_the_library_takes_options_by_their_short_names() -> None:
    made = plans.plan("interleaved", 4, 12, chunks=2, group=6)
    entered = [(item.microbatch, item.chunk) for item in made.rows[0] if item.kind == "F"]
    assert entered[:12] == [(i, chunk) for chunk in (0, 1) for i in range(6)]
    with pytest.raises(ValueError, match="1f1b has no use for group=6: only interleaved has"):
        plans.plan("1f1b", 4, 12, group=6)
    with pytest.raises(TypeError, match="no block takes grup: an option is one of group"):
        plans.plan("interleaved", 4, 12, grup=6)
