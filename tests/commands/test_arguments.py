"""The flags of a plan: one set of names for training and every tool, and what a plan file says."""

from pathlib import Path
from typing import Final

import pytest

from megatron.commands.arguments import PLAN_GROUPS, request_of
from megatron.commands.simulate_schedule import GROUPS
from megatron.flags.command import read, reading
from megatron.flags.declare import option_of
from megatron.flags.groups import Flags, declarations, options_of
from megatron.run.topics import DECLARED
from megatron.run.words import sort_words
from megatron.schedules.block_options import BlockOptions
from megatron.schedules.make_plan import make_plan, plan_for
from megatron.schedules.plan_flags import PLAN_FLAGS
from megatron.schedules.request import Request
from tools import benchmark, emulate

ROOT: Final = Path(__file__).resolve().parents[2]
VALUES: Final = {"schedule": "zb-v", "vocabulary": "vocab-2", "file": "p.plan", "costs": "c.json"}
"""A value for each flag of a plan that takes no number."""
NAMES: Final = {**PLAN_FLAGS, **{own.name: own.names for own in declarations(BlockOptions)}}
"""The names of each flag of a plan, for the parts of a request and for the options of blocks."""


SWITCHES: Final = ("joined",)
"""Flags of a plan that take no value."""


def words_of(field: str, name: str) -> list[str]:
    return [name] if field in SWITCHES else [name, VALUES.get(field, "3")]


@pytest.mark.parametrize("field", NAMES)
def test_every_name_of_a_flag_means_the_same_in_training(field: str) -> None:
    documented, *others = NAMES[field]
    wanted = sort_words(words_of(field, documented), DECLARED)
    assert wanted.words == words_of(field, documented)
    for name in others:
        found = sort_words(words_of(field, name), DECLARED)
        assert (found.words, found.mistakes) == (wanted.words, [])


def value_of(flags: Flags, option: str) -> object:
    values = (pair for group, own in flags.groups.items() for pair in options_of(group, own))
    return dict(values)[option]


@pytest.mark.parametrize("field", NAMES)
def test_every_name_of_a_flag_means_the_same_in_the_simulator(field: str) -> None:
    names = NAMES[field]
    documented, *others = [reading(words_of(field, name), GROUPS) for name in names]
    assert not documented.mistakes
    assert str(value_of(documented.flags, names[0])) in (VALUES.get(field), "3", "3.0", "True")
    assert all(other.flags == documented.flags for other in others)


@pytest.mark.parametrize("field", ["schedule", "vocabulary", "ranks", "chunks", "memory_limit"])
def test_every_name_of_a_flag_means_the_same_in_the_emulator(field: str) -> None:
    names = PLAN_FLAGS[field]
    documented, *others = [
        emulate.parse_arguments(["--costs", "c.json", *words_of(field, name)]) for name in names
    ]
    assert all(other == documented for other in others)
    assert value_of(documented, names[0]) is not None


@pytest.mark.parametrize(
    ("field", "old"),
    [
        ("schedule", "--schedules"),
        ("vocabulary", "--treatments"),
        ("ranks", "--ranks"),
        ("layers", "--layers"),
        ("memory_limit", "--memory-limit"),
    ],
)
def test_the_benchmark_knows_them_too_and_its_old_plurals(field: str, old: str) -> None:
    names = [*PLAN_FLAGS[field], old]
    documented, *others = [benchmark.parse_arguments(words_of(field, name)) for name in names]
    values = {option_of(name): value for name, value in vars(documented).items()}
    assert values[names[0]] in ((VALUES.get(field),), 3)
    assert all(other == documented for other in others)


def test_the_page_on_running_lists_every_name() -> None:
    page = (ROOT / "docs/running.md").read_text()
    for names in NAMES.values():
        assert all(f"`{name}`" in page for name in names)


def test_the_file_of_measured_costs_is_known_by_its_old_name() -> None:
    found = sort_words(["--schedule-costs", "c.json"], DECLARED)
    assert (found.words, found.mistakes) == (["--save-measured-costs", "c.json"], [])


def test_a_name_and_another_name_of_one_flag_may_not_disagree() -> None:
    same = sort_words(["--schedule", "zb-v", "--pipeline-schedule", "zb-v"], DECLARED)
    assert same.mistakes == []
    (mistake,) = sort_words(
        ["--schedule", "zb-v", "--pipeline-schedule", "1f1b"], DECLARED
    ).mistakes
    assert mistake.startswith("--pipeline-schedule 1f1b contradicts --schedule zb-v")


def test_a_value_may_have_a_blank_behind_every_name() -> None:
    for name in PLAN_FLAGS["file"]:
        assert sort_words([name, "my plan"], DECLARED).words == ["--schedule-file", "my plan"]


def test_a_rewritten_flag_with_a_value_of_its_own_takes_no_other() -> None:
    (mistake,) = sort_words(["--use-rotary-position-embeddings", "yes"], DECLARED).mistakes
    assert mistake.startswith("--use-rotary-position-embeddings")


def requested(*words: str) -> Request:
    return request_of(read(words, "", *PLAN_GROUPS))


def test_a_plan_file_says_what_the_flags_leave_out(tmp_path: Path) -> None:
    file = tmp_path / "my.plan"
    file.write_text(make_plan("zb-v", "vocab-1", 3, 5).to_text())
    found = requested("--schedule-file", str(file))
    assert found == Request("file", "vocab-1", 3, 5, file=file)


def test_slices_are_asked_for_or_come_from_the_file(tmp_path: Path) -> None:
    assert requested("--num-seq-splits", "4") == Request("1f1b", "none", 4, 8, slices=4)
    file = tmp_path / "my.plan"
    file.write_text(make_plan("1f1b", "vocab-1", 3, 5, slices=2).to_text())
    found = requested("--schedule-file", str(file))
    assert found == Request("file", "vocab-1", 3, 5, slices=2, file=file)
    other = requested("--schedule-file", str(file), "--slices", "4")
    with pytest.raises(ValueError, match="is a plan for 2 slices of a microbatch, not 4 slices"):
        plan_for(other)


def test_a_plan_file_is_no_other_schedule(tmp_path: Path) -> None:
    file = tmp_path / "my.plan"
    file.write_text(make_plan("1f1b", "none", 2, 2).to_text())
    with pytest.raises(ValueError, match="1f1b has no use for file="):
        requested("--schedule-file", str(file), "--pipeline-schedule", "1f1b")


def test_without_a_file_the_flags_left_out_have_defaults() -> None:
    assert requested() == Request("1f1b", "none", 4, 8)
    assert requested("-m", "6", "--vocab", "redis") == Request("1f1b", "redis", 4, 6)
