#!/usr/bin/env python3
"""Write docs/flags.md, the page of all flags, from their declarations.

python tools/flags_page.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.declare import Declaration, declarations, groups_of
from megatron.config.flags import Flags
from megatron.config.other_flags import OTHER_FLAGS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"

_ANSWERS = {
    "rewritten": "Other names of flags, read as those",
    "noted": "Accepted with a note, as what they ask for holds anyway",
    "refused": "Refused, as their effect would be missing",
}


def page() -> str:
    """The page in Markdown: our flags by group, then what becomes of Megatron's others."""
    return "\n".join([*_ours(), *_others()]) + "\n"


def _ours() -> Iterator[str]:
    yield "# Flags"
    yield ""
    yield "Written by `python tools/flags_page.py` from `megatron/config/flags.py` and"
    yield "`megatron/config/other_flags.py`. Names and defaults are Megatron-LM's."
    for group in groups_of(Flags).values():
        yield from ("", f"## {str(group.__doc__).rstrip('.')}", "")
        yield "| flag | default | meaning |"
        yield "|---|---|---|"
        for declared in declarations(group):
            name = f"`{' '.join([declared.option, declared.metavar]).strip()}`"
            yield _row(name, declared.default_words, _meaning(declared))


def _meaning(declared: Declaration) -> str:
    facts = declared.facts
    words = [facts.help]
    if facts.range is not None:
        words.append(f"Must be {facts.range.words}.")
    if facts.needs:
        words.append(f"Needs {facts.needs}.")
    if facts.excludes:
        words.append(f"Does not go with {facts.excludes}.")
    return " ".join(words)


def _others() -> Iterator[str]:
    yield from ("", "## What becomes of Megatron's other flags", "")
    yield "Every other flag of Megatron-LM is unknown here, and refused."
    for kind, title in _ANSWERS.items():
        yield from ("", f"### {title}", "", "| flag | why, or what instead |", "|---|---|")
        for flag, answer in sorted(OTHER_FLAGS.items()):
            if answer.kind == kind:
                yield _row(f"`{flag} {' or '.join(answer.values)}".strip() + "`", answer.reason)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
