"""The help of a command: the meaning of every flag, topic by topic."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill

from megatron.flags.declare import Declaration
from megatron.flags.groups import declarations

_INDENT = " " * 8


@dataclass(frozen=True)
class Topic:
    """Several groups of flags that a user reads as one.

    Attributes:
        title: title of the topic, in the place of the groups' own titles.
        groups: the groups, in the order of the help.
    """

    title: str
    groups: tuple[type, ...]


def groups_in(topics: Sequence[type | Topic]) -> tuple[type, ...]:
    """Return the groups of all topics, in the order of the help."""
    return tuple(group for _, groups in titled(topics) for group in groups)


def titled(topics: Sequence[type | Topic]) -> Iterator[tuple[str, tuple[type, ...]]]:
    """Yield every topic's title with its groups; a group alone is a topic, with its own title."""
    for own in topics:
        yield (own.title, own.groups) if isinstance(own, Topic) else (summary(own), (own,))


def help_text(usage: str, about: str, topics: Sequence[type | Topic]) -> str:
    """Return the help of a command.

    Args:
        usage: the form of the command line.
        about: purpose of the command; may be empty.
        topics: its flags. The first line of a group's docstring is the group's title.
    """
    lines = [f"usage: {usage}", *(("", about.strip()) if about else ())]
    for title, groups in titled(topics):
        lines += ["", f"{title}:"]
        for declared in (own for group in groups for own in declarations(group)):
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
