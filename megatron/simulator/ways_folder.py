"""A folder with the ways that ``plan-pretraining`` has looked at: a list, and their timelines.

``candidates.json`` lists the ways with their figures. ``way-3.json`` is the timeline of way 3 in
the format of ``timeline_file.py``. Nothing else is in the folder, and nothing else of it is read.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, get_args

from megatron.native.files import read_text, replace_text
from megatron.simulator.simulate import Timeline
from megatron.simulator.timeline_file import load_timeline, save_timeline

Role = Literal["", "taken", "unsplit", "runner-up", "obstacle"]
"""The part of a way in the answer.

taken: it is proposed. unsplit: the fastest that fits without a split vocabulary. runner-up: among
the next best. obstacle: among the fastest that do not fit. Empty: the answer does not name it.
"""

LIST: Final = "candidates.json"

MOST_SPANS: Final = 50_000
"""Spans of the largest timeline that is written: a page draws no more."""

_MOST_WAYS: Final = 10_000
_LONGEST: Final = 2000
"""Characters of the longest word, and words of the longest line."""
_LARGEST: Final = 1e18
"""The largest number; larger ones are damage, and a page cannot place them."""

_TIMELINE: Final = re.compile(r"way-[1-9][0-9]{0,5}\.json")
_WAY_OUT: Final = "give a folder that plan-pretraining --explore wrote"


def fault_of_target(folder: Path) -> str:
    """Return why ways cannot be written into a folder, and the way out; empty if they can.

    A folder that holds nothing but ways of an earlier search may be written again.
    """
    if not folder.exists() and not folder.is_symlink():
        return ""
    if not folder.is_dir():
        return "is no folder: give the name of a new one"
    other = next((own.name for own in folder.iterdir() if not _is_own(own.name)), None)
    if other is None:
        return ""
    return f"the folder holds other files, such as {other[:40]!r}: give a new or an empty one"


def is_shown(timeline: Timeline) -> bool:
    """Return whether a timeline is small enough for a page."""
    return len(timeline.spans) + len(timeline.waits) <= MOST_SPANS


def _is_own(name: str) -> bool:
    """Return whether ``save_ways`` writes files of this name."""
    return name == LIST or _TIMELINE.fullmatch(name) is not None


def save_ways(
    folder: Path, job: Mapping[str, Any], ways: Sequence[tuple[Mapping[str, Any], Timeline | None]]
) -> None:
    """Write ways into a folder, which is made if it is missing; ways that it holds are replaced.

    The list is written last, so that it names only timelines that are there.

    Args:
        folder: the folder; ``fault_of_target`` finds no fault in it.
        job: the job: ``model`` and ``gpus``, perhaps more.
        ways: figures of each way, and its timeline; ``None``: it has none.

    Raises:
        OSError: a file cannot be written; the message names it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LIST).unlink(missing_ok=True)
    listed, written = list[dict[str, Any]](), {LIST}
    for number, (figures, timeline) in enumerate(ways, 1):
        name = None
        if timeline is not None and is_shown(timeline):
            name = f"way-{number}.json"
            save_timeline(timeline, folder / name, is_own_name=True)
            written.add(name)
        listed.append({"number": number, **figures, "timeline": name})
    for old in folder.iterdir():
        if old.name not in written and _is_own(old.name):
            old.unlink()
    replace_text(folder / LIST, json.dumps({**job, "ways": listed}, indent=1) + "\n")


@dataclass(frozen=True)
class WaysFolder:
    """Ways that ``save_ways`` wrote.

    Attributes:
        folder: the folder.
        listed: ``model`` (``None``: not told), ``gpus`` (``name`` and ``count``) and ``ways``: for
            each the fields of ``_FIELDS``, with ``number`` 1, 2, ... in order.
    """

    folder: Path
    listed: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "WaysFolder":
        """Read the list of ways.

        Raises:
            ValueError: the folder holds no such list, or an unsound one; the message names the
                file and the way out.
        """
        file = folder / LIST
        try:
            document = json.loads(_text_of(file), parse_constant=_no_number)
            return cls(folder, _listed(document, folder))
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}: {_WAY_OUT}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} {error}: {_WAY_OUT}") from error

    def timeline(self, number: int) -> Timeline:
        """Return the timeline of a way.

        Raises:
            ValueError: there is no such way, it has no timeline, or its file holds none; the
                message says the way out.
        """
        way = next((own for own in self.listed["ways"] if own["number"] == number), None)
        if way is None:
            last = len(self.listed["ways"])
            raise ValueError(f"there is no way {number!r:.40}: give a number from 1 to {last}")
        if way["timeline"] is None:
            raise ValueError(
                f"way {number} has no timeline, because it has more than {MOST_SPANS:,} spans: a "
                "dry run of its line says how it goes"
            )
        file = self.folder / way["timeline"]
        if fault := _fault_of(file):
            raise ValueError(f"{file} {fault}: {_WAY_OUT}")
        try:
            return load_timeline(file)
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}: {_WAY_OUT}") from error


def _text_of(file: Path) -> str:
    if fault := _fault_of(file):
        raise ValueError(fault)
    return read_text(file)


def _fault_of(file: Path) -> str:
    """Return why a file is not read: a link leads out of the folder."""
    return "is a link, which may lead out of the folder" if file.is_symlink() else ""


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"has {word}, which is no number")


def _is_number(value: object) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _is_time(value: object) -> bool:
    return isinstance(value, float) and 1 / _LARGEST <= value <= _LARGEST


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST


def _are_words(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _LONGEST and all(map(_is_word, value))


def _is_layout(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= _LONGEST
        and all(map(_is_word, value))
        and all(map(_is_whole, value.values()))
    )


def _or_none(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


_FIELDS: Final[Mapping[str, Callable[[object], bool]]] = {
    "number": _is_count,
    "role": lambda value: isinstance(value, str) and value in get_args(Role),
    "fits": lambda value: isinstance(value, bool),
    "words": _are_words,
    "layout": _is_layout,
    "schedule": _is_word,
    "vocabulary": _is_word,
    "planned": lambda value: isinstance(value, bool),
    "seconds": _is_time,
    "bytes": _is_whole,
    "bytes_left": _is_whole,
    "mfu": _is_number,
    "tokens_per_second": _is_number,
    "days": _or_none(_is_number),
    "microbatches": _is_count,
    "timeline_microbatches": _or_none(_is_count),
    "timeline": _or_none(
        lambda value: isinstance(value, str) and _TIMELINE.fullmatch(value) is not None
    ),
}
"""The fields of a way that are read, each with its check."""


def _listed(document: Any, folder: Path) -> dict[str, Any]:
    """Return the fields of a list that are read.

    Raises:
        ValueError: a field is missing or has a value of another kind; the message is to follow the
            name of the file.
    """
    if not isinstance(document, dict) or not isinstance(document.get("ways"), list):
        raise ValueError("holds no list of ways")
    ways: list[Any] = document["ways"]
    model, gpus = document.get("model"), document.get("gpus")
    if not 0 < len(ways) <= _MOST_WAYS:
        raise ValueError(f"lists {len(ways):,} ways, which must be 1 to {_MOST_WAYS:,}")
    if not _or_none(_is_word)(model):
        raise ValueError(f"has a model {model!r:.40}, which must be a name")
    if not (isinstance(gpus, dict) and _is_word(gpus.get("name")) and _is_count(gpus.get("count"))):
        raise ValueError(f"has gpus {gpus!r:.40}, which must have a name and a count")
    return {
        "model": model,
        "gpus": {name: gpus[name] for name in ("name", "count")},
        "ways": [_way(own, number, folder) for number, own in enumerate(ways, 1)],
    }


def _way(named: Any, number: int, folder: Path) -> dict[str, Any]:
    if not isinstance(named, dict):
        raise ValueError(f"has {named!r:.40} as way {number}, which must be an object")
    for name, is_right in _FIELDS.items():
        if name not in named:
            raise ValueError(f"has no {name!r} of way {number}")
        if not is_right(named[name]):
            raise ValueError(f"has {name!r} {named[name]!r:.40} of way {number}")
    if named["number"] != number:
        raise ValueError(f"has number {named['number']!r:.40} of way {number}")
    if named["timeline"] is not None and not (folder / named["timeline"]).is_file():
        raise ValueError(f"names the timeline {named['timeline']}, which is not there")
    return {name: named[name] for name in _FIELDS}
