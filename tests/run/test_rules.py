"""Rules are found by standing in a module of the package, and none is forgotten there."""

import inspect
from types import ModuleType

import pytest

from megatron.flags.checks import check
from megatron.flags.groups import Flags
from megatron.flags.rules import FoundRule, refuses, rules_in
from megatron.run.command_line import modules_of_rules, read, rules_for


@pytest.mark.parametrize("module", modules_of_rules(), ids=lambda own: own.__name__)
def test_a_private_function_that_judges_flags_is_a_rule_or_is_called(module: ModuleType) -> None:
    """A rule that nobody marks would never be asked."""
    text = inspect.getsource(module)
    for name, value in vars(module).items():
        if not inspect.isfunction(value) or not name.startswith("_"):
            continue
        signature = inspect.signature(value)
        takes = [own.annotation for own in signature.parameters.values()]
        is_own = value.__module__ == module.__name__
        if is_own and takes == [Flags] and "Iterator[str]" in str(signature.return_annotation):
            assert text.count(f"{name}(") > 1, f"nothing calls {name}, and it is no rule"


def test_a_rule_is_found_once_and_in_the_runs_for_which_it_holds() -> None:
    found = rules_in(modules_of_rules())
    assert len({(own.rule.__module__, own.rule.__name__) for own in found}) == len(found)
    names = {run: {own.rule.__name__ for own in rules_for(run)} for run in ("real", "dry")}
    rooms = {own.rule.__module__.rpartition(".")[0] for own in found}
    assert {"megatron.run", "megatron.run.rules", "megatron.data"} <= rooms
    assert "_tensorboard" in names["real"] - names["dry"]
    assert "_files_of_a_dry_run" in names["dry"] - names["real"]
    assert "_idle_without_training" in names["dry"] & names["real"]


def test_rules_tell_their_lines_in_the_order_of_the_help_wherever_they_stand() -> None:
    """``--num-layers`` is the first flag of the help, ``--log-interval`` one of the last."""

    def rule(*lines: str) -> FoundRule:
        return refuses(lambda flags: iter(lines))

    flags = read([], 1).flags
    later = rule("--log-interval 1: too few", "no flag at all")
    first = rule("--num-layers: too many")
    for rules in ((later, first), (first, later)):
        told = check(flags, rules).mistakes[-3:]
        assert told == ["--num-layers: too many", "--log-interval 1: too few", "no flag at all"]
