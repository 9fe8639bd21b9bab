#!/usr/bin/env python3
"""Write docs/launch-lines.md: what becomes of every flag of some public launch scripts.

python tools/launch_lines_page.py
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.run.command_line import read
    from megatron.run.told import Told, told_of
    from tools.pages.tables import escaped, table


ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "launch-lines.md"
LISTS = ROOT / "tests" / "run" / "launch_lists.json"

# A dry run needs no ranks, devices, data or tokenizer; this tool has none of them.
DRY_RUN = ("--dry-run", "--vocab-size", "32000")

_HEAD = """# Launch lines of others

Written by `python tools/launch_lines_page.py`: the flags of public launch scripts for GPTs, and
what `pretrain_gpt.py --dry-run` says to each. Variables of a script stand as 1 or a letter.

An accepted flag has its meaning in Megatron-LM. A noted one is told in a line, with what it means
here. One whose effect would be missing is refused. All refusals of a line come at once; without the
refused flags, each of these lines is accepted. The dry runs have one replica of the model, or as
many as the ranks of experts need. With more than one, ways to shard over replicas other than
`--use-distributed-optimizer` are refused too. [flags.md](flags.md) has the answers to all flags.

| script | flags | accepted | noted | refused | for want of |
|---|--:|--:|--:|--:|---|"""


@dataclass(frozen=True)
class LaunchList:
    """The flags of a public launch script.

    Attributes:
        name: name of the script in a few words.
        source: where the script is published.
        flags: each flag with its values; variables of the script have the value 1 or a letter.
        values: other values for variables where 1 makes no valid model.
    """

    name: str
    source: str
    flags: tuple[tuple[str, ...], ...]
    values: dict[str, str]

    def size(self, axis: str, otherwise: int = 1) -> int:
        """Return the size of an axis of ranks, as in ``--tensor-model-parallel-size``."""
        asked = {flag[0]: flag[1:] for flag in self.flags}
        return int(asked.get(f"--{axis}-parallel-size", (otherwise,))[0])

    @property
    def replicas(self) -> int:
        """The fewest replicas of the model whose ranks can share the experts."""
        tensor, context = self.size("tensor-model"), self.size("context")
        block = self.size("expert-model") * self.size("expert-tensor", tensor)
        return max(1, block // (tensor * context))

    @property
    def words(self) -> list[str]:
        """The command line."""
        filled = (
            (flag[0], self.values[flag[0]]) if flag[0] in self.values else flag
            for flag in self.flags
        )
        return [word for flag in filled for word in flag]


def launch_lists() -> list[LaunchList]:
    """Return the lists, in the order of their file."""
    lists = json.loads(LISTS.read_text(encoding="utf-8"))
    return [
        LaunchList(name, entry["source"], tuple(map(tuple, entry["flags"])), entry["values"])
        for name, entry in lists.items()
    ]


def asked(launch: LaunchList) -> list[str]:
    """Return the command line of a dry run; it has one replica, or as many as experts need."""
    replicas = launch.replicas
    more = ["--dry-run-replicas", str(replicas)] if replicas > 1 else []
    return [*launch.words, *DRY_RUN, *more]


def told(launch: LaunchList) -> list[Told]:
    """Return the treatment of every flag, and of our flags that the line lacks."""
    found = read(asked(launch), world_size=1)
    return told_of(launch.flags, found.mistakes, found.notes)


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    lists = [(launch, told(launch)) for launch in launch_lists()]
    yield _HEAD
    for launch, answers in lists:
        counts = [sum(a.verdict == v for a in answers) for v in ("accepted", "noted", "refused")]
        features = dict.fromkeys(a.feature for a in answers if a.feature)
        yield escaped(launch.name, len(launch.flags), *counts, ", ".join(features))
    for launch, answers in lists:
        yield from ("", f"## {launch.name}", "", f"{launch.source}.{_but_for(launch)}", "")
        yield from table(("answer", "flag", "what is said"), (), "l")
        silent = [f"`{answer.flag}`" for answer in answers if answer.verdict == "accepted"]
        yield escaped("accepted", " ".join(silent), "")
        for verdict in ("noted", "refused"):
            for answer in answers:
                if answer.verdict == verdict:
                    yield escaped(verdict, f"`{answer.flag}`", answer.said)


def _but_for(launch: LaunchList) -> str:
    values = ", ".join(f"`{flag} {value}`" for flag, value in launch.values.items())
    return f" Read with {values}." if values else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
