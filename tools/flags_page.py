#!/usr/bin/env python3
"""Write docs/flags.md, the page of all flags, from their declarations.

python tools/flags_page.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.flags.declare import Declaration
    from megatron.flags.groups import declarations
    from megatron.flags.help import titled
    from megatron.run.foreign.answers import ANSWERS, FEATURES, Answer
    from megatron.run.topics import DECLARED, TOPICS
    from tools.pages.tables import escaped, rule, table


ROWS = sorted(ANSWERS.rows, key=lambda row: row[0] in DECLARED)
PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"


def page() -> str:
    """Return the page in Markdown: our flags by group, then the treatment of Megatron's others."""
    return "\n".join([*_ours(), *_others()]) + "\n"


def _ours() -> Iterator[str]:
    yield "# Flags"
    yield ""
    yield "Written by `python tools/flags_page.py` from the declarations of flags in `megatron/`."
    exceptions = "[exceptions](running.md#the-command-line)"
    yield f"Names are Megatron-LM's, and so are most defaults ({exceptions})."
    for title, groups in titled(TOPICS):
        yield from ("", f"## {title}", "")
        yield from table(("flag", "default", "meaning"), (), "l")
        flags = [declared for group in groups for declared in declarations(group)]
        for declared in flags:
            name = f"`{' '.join([declared.option, declared.metavar]).strip()}`"
            rivals = [one.option for one in flags if one.name == declared.name]
            rivals.remove(declared.option)
            yield escaped(name, declared.default_words, _meaning(declared, rivals))


def _meaning(declared: Declaration, rivals: list[str]) -> str:
    """Return a flag's help and conditions; ``rivals`` spell other values of the same field."""
    facts = declared.facts
    words = [facts.help]
    if facts.range is not None:
        words.append(f"Must be {facts.range.words}.")
    if facts.needs:
        words.append(f"Needs {facts.needs}.")
    if facts.excludes or rivals:
        excluded = " or ".join([facts.excludes] * bool(facts.excludes) + rivals)
        words.append(f"Does not go with {excluded}.")
    if facts.idle_without:
        words.append(f"Changes nothing without {facts.idle_without}.")
    if facts.idle_with:
        words.append(f"Changes nothing with {facts.idle_with}.")
    return " ".join(words)


def _others() -> Iterator[str]:
    yield from ("", "## Flags of Megatron and its relatives that do not exist here", "")
    yield "A flag that asks for what holds anyway, or that has no object, is accepted with a note."
    yield "One whose effect would be missing is refused, with the way out. An unknown flag is"
    yield "refused with the nearest known name. `N` stands for a value, `*` for the rest of a name."
    yield "Of several answers to a flag, the first that fits its value and the other flags counts."
    yield from _table("Read as other flags", "read as", "rewritten")
    yield from _table("Accepted with a note", "why it changes nothing", "noted")
    yield from ("", "### Refused", "", "| missing | why, and what instead | flags |", rule(3, "l"))
    for feature in FEATURES:
        flags = [_form(row) for row in ROWS if row[1].feature == feature.name]
        yield escaped(feature.name, feature.reason, " ".join(flags))


def _table(title: str, head: str, kind: str) -> Iterator[str]:
    yield from ("", f"### {title}", "", f"| {head} | where | flags |", rule(3, "l"))
    by_reason: dict[tuple[str, str], list[str]] = {}
    for option, answer in ROWS:
        if answer.kind == kind:
            by_reason.setdefault((answer.reason, answer.where or "always"), []).append(
                _form((option, answer))
            )
    for (reason, where), flags in by_reason.items():
        yield escaped(reason, where, " ".join(flags))


def _form(row: tuple[str, Answer]) -> str:
    option, answer = row
    return f"`{option} {answer.form}".strip() + "`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
