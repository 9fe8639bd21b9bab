"""Helpers of the commands: one-line errors, the flags of a plan, numbers in a range, pictures."""

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from megatron.native.words import readable
from megatron.schedules.catalogue import CHUNKED_SCHEDULES, SCHEDULE_NAMES
from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.plan_file import load_any_plan, treatments_of
from megatron.schedules.plan_flags import PLAN_FLAGS
from megatron.schedules.request import DEFAULT_SECONDS, VOCABULARY_TREATMENTS, Request
from megatron.simulator.draw.picture import Picture
from megatron.simulator.draw.stretches import WHOLE, Window
from megatron.simulator.draw.svg import paint_svg


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, as all commands do."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"error: {readable(message)}\n")


def number(least: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """Return a function that reads a finite number of at least ``least``."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least) - 1
        if not least <= value < math.inf:
            wanted = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"'{text}': give a {wanted}, {least:g} or more")
        return value

    return read


def picture_file(text: str) -> Path:
    """Read the name of a picture's file."""
    path = Path(text)
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(f"'{text}': end it in .svg")
    return path


def add_window(add: Callable[..., object]) -> None:
    """Add the flag for the part of a timeline that is drawn.

    Args:
        add: ``add_argument`` of a parser.
    """
    shown = (
        "draw this part only: FROM:TO in the unit of the times, counted from the first start, as "
        "1.5:3; or mFROM:mTO, from the first microbatch's first pass to the last one's last, as "
        "m8:m15; any of the numbers may be left out"
    )
    add("--window", type=_window, default=WHOLE, metavar="FROM:TO", help=shown)


def _window(text: str) -> Window:
    try:
        return Window.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check_window(window: Window, drawings: Mapping[str, bool]) -> None:
    """Check that a window that is asked for is drawn.

    Args:
        window: the value of ``--window``.
        drawings: the flags that draw a window, with whether they are given.

    Raises:
        ValueError: if it is not.
    """
    if window != WHOLE and not any(drawings.values()):
        flags = " or ".join(drawings)
        raise ValueError(f"--window {window} is the part to draw: add {flags}, or leave it out")


def write_picture(picture: Picture, path: Path) -> None:
    """Write ``picture`` as SVG.

    Raises:
        OSError: if the file cannot be written.
    """
    path.write_text(paint_svg(picture))


DEFAULTS: Final[Mapping[str, Any]] = {
    "schedule": "1f1b",
    "vocabulary": "none",
    "ranks": 4,
    "microbatches": 8,
}
"""The plan that the commands take where the flags, or the plan's file, say nothing else."""


def add_plan_flags(add: Callable[..., object]) -> None:
    """Add the flags that say which plan is wanted, but for its size; ``request_of`` reads them.

    Args:
        add: ``add_argument`` of a parser or of a group in it.
    """

    def flag(field: str, **facts: Any) -> None:
        add(*PLAN_FLAGS[field], dest=field, **facts)

    schedule = (
        f"{', '.join(SCHEDULE_NAMES)} (default: file with --schedule-file, else "
        f"{DEFAULTS['schedule']})"
    )
    flag("schedule", choices=SCHEDULE_NAMES, metavar="NAME", help=schedule)
    treatment = (
        f"{', '.join(VOCABULARY_TREATMENTS)} (default: {DEFAULTS['vocabulary']}, or that of "
        "--schedule-file)"
    )
    flag("vocabulary", choices=VOCABULARY_TREATMENTS, metavar="TREATMENT", help=treatment)
    chunks = f"model chunks of a rank, for {' or '.join(CHUNKED_SCHEDULES)}"
    add("-v", *PLAN_FLAGS["chunks"], dest="chunks", type=number(1), metavar="CHUNKS", help=chunks)
    limit = "microbatches of a rank that may be in flight"
    flag("memory_limit", type=number(1, float), metavar="MICROBATCHES", help=limit)
    file = "a plan in text form, as --save-plan of simulate-schedule writes it"
    flag("file", type=Path, metavar="FILE", help=file)
    ahead = (
        "what B computes again becomes a pass of its own, R, which need not wait for the gradient; "
        "a rank may hold so many chunks between R and B (default: within B)"
    )
    flag("recompute_ahead", type=number(1), metavar="CHUNKS", help=ahead)
    add("--split-backward", action="store_const", const=True, help="make W a pass of its own")
    seconds = (
        "time to look for the plan; then the best so far is taken (default: no limit; for "
        f"--pipeline-schedule optimal {DEFAULT_SECONDS:g})"
    )
    flag("seconds", type=number(0, float), metavar="SECONDS", help=seconds)


def add_size_flags(add: Callable[..., object], default: str = "") -> None:
    """Add the flags for the pipeline ranks and microbatches of a plan.

    Args:
        add: ``add_argument`` of a parser or of a group in it.
        default: where the numbers come from if they are not given, besides ``DEFAULTS``.
    """
    for letter, names, field in (
        ("-p", PLAN_FLAGS["ranks"], "ranks"),
        ("-m", ("--microbatches",), "microbatches"),
    ):
        usual = f"default: {DEFAULTS[field]}, or those of --schedule-file{default}"
        add(letter, *names, dest=field, type=number(1), metavar=letter[1:].upper(), help=usual)


REQUEST_FIELDS: Final = (
    *("schedule", "vocabulary", "ranks", "microbatches", "chunks", "memory_limit"),
    *("split_backward", "file", "seconds", "recompute_ahead"),
)
"""Fields of ``Request`` that the flags give."""


def request_of(arguments: argparse.Namespace, costs: Costs = UNIT_COSTS) -> Request:
    """Return the request of the flags; what they leave out comes from the plan's file, if any.

    Args:
        arguments: with an attribute for each of ``REQUEST_FIELDS``; ``None``: not given.
        costs: of the request.

    Raises:
        ValueError: if the file holds no plan that can be run, or the flags make no request.
    """
    given = {
        field: value for field in REQUEST_FIELDS if (value := getattr(arguments, field)) is not None
    }
    return Request(costs=costs, **{**DEFAULTS, **_of_file(arguments.file), **given})


def _of_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    plan = load_any_plan(path)
    return {
        "schedule": "file",
        "vocabulary": treatments_of(plan)[0],
        "ranks": plan.ranks,
        "microbatches": plan.microbatches,
    }
