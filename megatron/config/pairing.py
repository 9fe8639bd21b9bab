"""Judges the values of flags by their declarations: each alone, and beside the other flags.

What contradicts, or misses what it needs, is a mistake. What has no effect beside the other flags,
as in Megatron, is noted.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING

from megatron.config.declare import Declaration, Facts


def value_mistakes(
    declared: Mapping[str, Declaration], values: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Find the flags whose own values are mistakes: missing, or out of range.

    Args:
        declared: the flags, as they stand on a command line.
        values: the values of flags; ``None``: not given.

    Yields:
        The flag, and a line on its fault that begins with the flag.
    """
    for option, value in values.items():
        declaration, allowed = declared[option], declared[option].facts.range
        if value is None and declaration.default is MISSING:
            yield option, f"{option} is missing: {declaration.facts.help}"
        if isinstance(value, (int, float)) and allowed and not allowed.contains(value):
            yield option, f"{declaration.shown(value)}: must be {allowed.words}"


def pairing_mistakes(
    declared: Mapping[str, Declaration], values: Mapping[str, object]
) -> Iterator[str]:
    """Find flags whose needed flag is missing, or which stand beside a flag that they exclude.

    Args:
        declared: the flags, as they stand on a command line.
        values: the values of all flags that are no mistakes themselves; ``None``: not given.

    Yields:
        A line on each fault, which begins with the flag.
    """
    holds = _judge(values)
    for given, facts in _asking(declared, values):
        if facts.needs and not any(holds(c, True) for c in facts.needs.split(" or ")):
            yield f"{given} {facts.lack}: add {facts.needs}, or leave it out"
        for condition in facts.excludes.split(" or "):
            if holds(condition, False):
                other = condition.split()[0]
                yield (
                    f"{given} does not go with {declared[other].shown(values[other])}: give one of "
                    "them and leave the other out"
                )


def idle_notes(declared: Mapping[str, Declaration], values: Mapping[str, object]) -> Iterator[str]:
    """Find flags that change nothing beside the others, as they do in Megatron.

    Args:
        declared: the flags, as they stand on a command line.
        values: the values of all flags that are no mistakes themselves; ``None``: not given.

    Yields:
        A line on each, which begins with the flag.
    """
    holds = _judge(values)
    for given, facts in _asking(declared, values):
        wanted = facts.idle_without.split(" or ") if facts.idle_without else []
        if wanted and not any(holds(condition, True) for condition in wanted):
            yield f"{given} changes nothing without {facts.idle_without}"
        for condition in facts.idle_with.split(" or "):
            if holds(condition, False):
                yield f"{given} changes nothing with {condition}"


def _asking(
    declared: Mapping[str, Declaration], values: Mapping[str, object]
) -> Iterator[tuple[str, Facts]]:
    """Yield every flag that asks for something, as it is given, with the facts about it."""
    for option, value in values.items():
        declaration = declared[option]
        if declaration.asks(value):
            yield declaration.shown(value), declaration.facts


def _judge(values: Mapping[str, object]) -> Callable[[str, bool], bool]:
    """Return what judges a condition; of a flag that is a mistake itself, as its caller wants."""

    def holds(condition: str, unknown: bool) -> bool:
        option, _, word = condition.partition(" ")
        if option not in values:
            return unknown
        return str(values[option]) == word if word else bool(values[option])

    return holds
