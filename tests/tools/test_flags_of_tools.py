"""The declarations of every tool's flags, as those of training."""

import re
from collections.abc import Iterator
from dataclasses import MISSING
from importlib import import_module

import pytest

from megatron.flags.checks import value_mistakes
from megatron.flags.groups import all_declarations

COMMANDS = (
    *("simulate_schedule", "draw_schedule", "explore_schedules", "watch_run"),
    *("convert_checkpoint", "from_megatron", "generate_text", "preprocess_data"),
)
TOOLS = (
    *("benchmark", "checkpoint", "checkpoint_benchmark", "choosing_page", "compare_timelines"),
    *("emulate", "first_model", "gpu_report", "head_benchmark", "host_time"),
    *("merge_datasets", "plans_at_scale", "predict_paper", "predict_published"),
    *("predictions.calibrate", "predictions.own_runs", "predictions.shared_tables"),
    "predictions.calibrate_shared",
    *("preprocess_benchmark", "replicas_at_scale"),
    *("reproduce", "reproduce_paper", "sample_data", "schedule_report", "splitting_page"),
    *("experts_page", "long_sequences_page", "recipe_cards", "vocab_recompute"),
)
BASES = ("Flags",)


def groups_of(module: str) -> Iterator[tuple[type, ...]]:
    """Yield the groups that a command line of the tool has; a subcommand has one."""
    names = vars(import_module(module))
    own = (name for name in names if name.endswith("Flags") and name not in BASES)
    if "COMMANDS" in names:
        yield from ((group,) for group in names["COMMANDS"].values())
    else:
        yield tuple(names[name] for name in own)


@pytest.mark.parametrize(
    "module",
    [*(f"megatron.commands.{name}" for name in COMMANDS), *(f"tools.{name}" for name in TOOLS)],
)
def test_flags_have_a_meaning_a_default_and_conditions_that_exist(module: str) -> None:
    for groups in groups_of(module):
        assert any(group.__module__ == module for group in groups)
        declared = all_declarations(groups)
        names = [name for own in declared.values() for name in own.names]
        assert len(names) == len(set(names))
        defaults = {o: own.default for o, own in declared.items() if own.default is not MISSING}
        assert not list(value_mistakes(declared, defaults))
        for own in declared.values():
            assert re.fullmatch(r"\S.*\.", own.facts.help)
            assert own.default is not None or own.facts.unset or own.facts.hidden
            numeric = own.kind in (int, float, tuple[int, ...], tuple[float, ...])
            assert own.facts.range or own.facts.reads or not numeric, f"{own.option} has no range"
            for condition in (own.facts.needs, own.facts.excludes):
                assert set(re.findall(r"--[\w-]+", condition)) <= declared.keys()
