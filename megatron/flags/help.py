"""The help of a command: the meaning of every flag, group by group."""

from collections.abc import Sequence
from textwrap import fill

from megatron.flags.declare import Declaration
from megatron.flags.groups import declarations

_INDENT = " " * 8


def help_text(usage: str, about: str, groups: Sequence[type]) -> str:
    """Return the help of a command.

    Args:
        usage: the form of the command line.
        about: purpose of the command; may be empty.
        groups: groups of its flags. The first line of a group's docstring is the group's title.
    """
    lines = [f"usage: {usage}", *(("", about.strip()) if about else ())]
    for group in groups:
        lines += ["", f"{summary(group)}:"]
        for declared in declarations(group):
            if not declared.facts.hidden:
                words = f"{declared.facts.help} ({_default(declared)})".lstrip()
                names = ", ".join(declared.names) or declared.option
                metavar = "" if declared.facts.place else declared.metavar
                lines.append(f"  {names} {metavar}".rstrip())
                lines.append(
                    fill(
                        words,
                        100,
                        initial_indent=_INDENT,
                        subsequent_indent=_INDENT,
                        break_on_hyphens=False,
                    )
                )
    return "\n".join(lines)


def summary(group: type) -> str:
    """Return the first line of a group's docstring, without its stop."""
    return str(group.__doc__).partition("\n")[0].rstrip(".")


def _default(declared: Declaration) -> str:
    words = declared.default_words
    return words if words == "required" else f"default: {words}"
