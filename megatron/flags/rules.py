"""Rules about several flags, which are found by standing in a package.

    @refuses
    def _layers_per_stage(flags: Flags) -> Iterator[str]:
        ...
        yield f"--num-layers {layers} ...: {way_out}"

A rule yields a line on every finding. The line begins with the flag at fault; the line of a mistake
names the way out. ``refuses`` makes a rule that finds mistakes, ``notes`` a rule that finds flags
that change nothing beside the others.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType
from typing import Literal, TypeAlias

from megatron.flags.groups import Flags, Rule

Runs: TypeAlias = Literal["all", "real", "dry"]
"""Runs for which a rule holds: a real run needs ranks, devices and data, a dry run none of them."""


@dataclass(frozen=True)
class FoundRule:
    """A rule as it stands in its module; it is called as the function is.

    Attributes:
        rule: the function.
        finds: whether its lines are mistakes or notes.
        runs: runs for which it holds.
    """

    rule: Rule
    finds: Literal["mistakes", "notes"]
    runs: Runs

    def __call__(self, flags: Flags) -> Iterator[str]:
        """Yield a line on each finding."""
        return self.rule(flags)


def refuses(rule: Rule) -> FoundRule:
    """Make a function a rule that finds mistakes in all runs."""
    return FoundRule(rule, "mistakes", "all")


def refuses_in(runs: Runs) -> Callable[[Rule], FoundRule]:
    """Make a function a rule that finds mistakes in some runs."""
    return lambda rule: FoundRule(rule, "mistakes", runs)


def notes(rule: Rule) -> FoundRule:
    """Make a function a rule that finds flags that change nothing, in all runs."""
    return FoundRule(rule, "notes", "all")


def notes_in(runs: Runs) -> Callable[[Rule], FoundRule]:
    """Make a function a rule that finds flags that change nothing, in some runs."""
    return lambda rule: FoundRule(rule, "notes", runs)


@cache
def modules_in(package: ModuleType) -> tuple[ModuleType, ...]:
    """Return all modules of a package and of the packages inside it, by name."""
    found = walk_packages(package.__path__, f"{package.__name__}.")
    return tuple(import_module(name) for name in sorted(own.name for own in found if not own.ispkg))


@cache
def rules_in(modules: tuple[ModuleType, ...]) -> tuple[FoundRule, ...]:
    """Return the rules of modules, by module and in the order of their lines."""
    return tuple(
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, FoundRule) and value.rule.__module__ == module.__name__
    )
