"""Costs as users write them: words on a command line, or a JSON file.

Words are ``F=1,B=2:2:4,p2p=0.1``; several times for a pass, for RG or for AG are one for each rank.
A file holds

    {"passes": {"F": 1, "B": [2, 2, 4], "W": [[1, 2], [1, 1], [1, 1]]},
     "comms": {"p2p": 0.1, "C1": 0.2, "RG": [3, 3, 4]},
     "waits": {"F": 0.3, "B": 0.3},
     "bytes": {"static": 4e9, "activation": [3e8, 3e8, 4e8], "exponentials": 2e7, "embedding": 1e7},
     "layers": [[2, 1], [2, 2], [2, 0]]}

with one number for all ranks, one for each rank, or one for each chunk of each rank. ``p2p`` is one
hop between neighbours, for X and G alike. The times of U, RG and AG (a rank's work with its
replicas) are those of all buckets of the rank together. F and B must be given, and W if the
backward is split. If no time is given for R, it takes as long as F; if a time is given, a plan
without R adds this time to the time of B. Other passes and communications that are not given take
no time.

``slices`` has an object with ``passes`` and ``comms`` for every slice of a microbatch. Without it
each of n slices takes an n-th of the time of a microbatch.

``waits`` are the parts of passes' times in which they wait for an exchange of tokens (``Costs``).

In ``bytes``, ``embedding_gradient`` are the bytes held from the B of the first stage, or from the
broadcast, to IB. ``factors`` are the bytes held between B and W; if absent, they are those of
``activation``. ``repeated`` are the bytes held between R and B, beside ``activation``. ``working``
has, by kind of pass, the bytes held only while such a pass runs: ``{"S": 1e8, "B": 2e8}``.

A file with ``layers`` is a measurement: ``layers`` are the transformer layers of each chunk of each
rank during the measurement. A measurement must give times for exactly the vocabulary passes that
the schedule runs (``check_measured``).
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from megatron.native.files import read_text, write_text
from megatron.schedules.costs import UNIT_COSTS, Costs, Exchange, HopTime, Time
from megatron.schedules.needs import COMM_KINDS, REPLICA_KINDS, CommKind
from megatron.schedules.passes import CHUNKED_KINDS, PASS_KINDS, PLANNED_KINDS, PassKind
from megatron.schedules.treatments import BarrierKind, Treatment
from megatron.simulator.costs.peak_bytes import Sizes

DEFAULT_COSTS: Final = Costs(
    {"F": 1.0, "B": 1.0, "W": 1.0, "S": 0.25, "E": 0.0, "T": 0.25, "IF": 0.0, "IB": 0.0}
)
"""The costs if none are given: the unit costs of the papers."""

_HOP: Final[tuple[CommKind, ...]] = ("X", "G")
_BARRIERS: Final[tuple[BarrierKind, ...]] = get_args(BarrierKind)
_SIZES: Final = tuple(field.name for field in fields(Sizes))
_OF_CHUNKS: Final = ("activation", "factors", "repeated")
"""Sizes that chunks of a rank may differ in."""


class CostFile(NamedTuple):
    """The content of a file of costs.

    Attributes:
        costs: times of passes and communications.
        sizes: sizes in bytes, if the file gives any.
        layers: layers of each chunk of each rank, if the file is a measurement.
        named: the passes and communications that have a time in the file.
    """

    costs: Costs
    sizes: Sizes | None
    layers: Sequence[Sequence[int]] | None = None
    named: frozenset[str] = frozenset()


_OF_HOPS: Final = ("p2p", "X", "G")
"""Names of communications that may have one time for each hop from stage to stage."""


def parse_costs(text: str) -> Costs:
    """Read ``F=1,B=2:2:4,C1=0.1``.

    Raises:
        ValueError: if a word is not ``KIND=TIME``; the message names the word.
    """
    passes: list[tuple[str, Time]] = []
    comms: list[tuple[str, float | Sequence[float]]] = []
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        times = [_number(word, part) for part in value.split(":")]
        if name in PASS_KINDS:
            passes.append((name, times if len(times) > 1 else times[0]))
        elif len(times) == 1 or name in (*REPLICA_KINDS, *_OF_HOPS):
            comms.append((name, times if len(times) > 1 else times[0]))
        else:
            raise ValueError(
                f"'{word}': only passes, RG and AG may have one time for each rank, and p2p, X and "
                "G one for each hop from stage to stage"
            )
    return _costs(passes, comms)


def parse_waits(text: str) -> Mapping[PassKind, Time]:
    """Read ``F=0.5,B=0.5``, the parts of passes' times that they wait.

    Raises:
        ValueError: if a word is not ``KIND=TIME`` of a pass of a model chunk.
    """
    found: dict[str, Time] = {}
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        times = [_number(word, part) for part in value.split(":")]
        found[name] = times if len(times) > 1 else times[0]
    return _waits(found)


def named_costs(times: Mapping[str, Time] | None) -> Costs:
    """Return the costs of ``{"F": 1, "B": [1, 2], "p2p": 0.1}``; ``None``: assumed costs.

    Raises:
        ValueError: if a name belongs to no pass or communication, or a time is no number.
    """
    if times is None:
        return UNIT_COSTS
    passes = {name: time for name, time in times.items() if name in PASS_KINDS}
    return _costs(
        passes.items(), ((name, own) for name, own in times.items() if name not in passes)
    )


def load_costs(path: Path) -> CostFile:
    """Read a JSON file of costs.

    Raises:
        ValueError: if the file cannot be read or a value in it is wrong; the message names the file
            and the value.
    """
    try:
        sections = _section(_document(path), "the file")
        for name in sections:
            if name not in ("passes", "comms", "waits", "slices", "bytes", "layers"):
                raise ValueError(
                    f"'{name}' is no section: write passes, comms, waits, slices, bytes or layers"
                )
        passes = _section(sections.get("passes", {}), "passes")
        waits = _waits(_section(sections.get("waits", {}), "waits"))
        slices = _slices(sections.get("slices", []))
        costs = replace(_costs_in(sections), waits=waits, slices=slices)
        sizes = _sizes(sections["bytes"]) if "bytes" in sections else None
        layers = _layers(sections["layers"]) if "layers" in sections else None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return CostFile(
        costs, sizes, layers, frozenset(passes) | set(costs.comms) | set(costs.exchanges)
    )


def _costs_in(sections: Mapping[str, object]) -> Costs:
    """Return the costs of the sections ``passes`` and ``comms``."""
    passes, comms = (_section(sections.get(name, {}), name) for name in ("passes", "comms"))
    return _costs(passes.items(), comms.items())


def _slices(section: object) -> tuple[Costs, ...]:
    if not isinstance(section, list):
        raise ValueError(
            f"slices is {json.dumps(section)[:40]}: write a list with an object for each slice"
        )
    return tuple(_costs_in(_section(own, "a slice")) for own in section)


def check_measured(file: CostFile, treatment: Treatment) -> None:
    """Check that measured costs belong to a treatment of the vocabulary.

    The costs must name the treatment's passes and also its collectives, because two treatments may
    have the same passes. A single rank has no collectives.

    Raises:
        ValueError: if passes or barriers are missing or belong to another treatment.
    """
    wanted: set[str] = set(treatment.passes)
    found = file.named.difference(CHUNKED_KINDS, COMM_KINDS, ("U",))
    if merged := file.named.intersection(_BARRIERS):
        wanted.update(barrier.kind for barrier in treatment.barriers)
        found |= merged
    lacking, besides = sorted(wanted - found), sorted(found - wanted)
    if lacking or besides:
        faults = [f"{' '.join(lacking)} missing"] if lacking else []
        faults += [f"{' '.join(besides)} of another treatment"] if besides else []
        raise ValueError(
            f"these costs were not measured with the vocabulary treatment {treatment.name}: "
            f"{', '.join(faults)}; measure with {treatment.name} (--save-measured-costs), or take "
            "what they were measured with"
        )


def save_costs(path: Path, costs: Costs, layers: Sequence[Sequence[int]]) -> None:
    """Write a JSON file of measured costs, with the layers as in ``CostFile``.

    Raises:
        OSError: if the file cannot be written; the message names the file.
    """
    exchanges = {kind: own.times for kind, own in costs.exchanges.items()}
    comms = {**costs.comms, **exchanges}
    document = {"passes": dict(costs.passes), "comms": comms, "layers": layers}
    if costs.slices:
        document["slices"] = [
            {"passes": dict(own.passes), "comms": dict(own.comms)} for own in costs.slices
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(document, indent=1) + "\n")


def _document(path: Path) -> object:
    """Return the content of a JSON file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is no JSON file.
    """
    way_out = "give a file that --save-measured-costs wrote, or one in its form"
    try:
        return json.loads(read_text(path), object_pairs_hook=_no_doubles)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"is no complete JSON: {error.msg} in line {error.lineno}, column {error.colno}; it "
            f"was cut short, or it is another file: {way_out}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"holds lists in lists without end: {way_out}") from error


def _costs(passes: Iterable[tuple[str, object]], comms: Iterable[tuple[str, object]]) -> Costs:
    pass_times: dict[PassKind, Time] = {}
    comm_times: dict[CommKind, HopTime] = {}
    exchanges: dict[CommKind, Exchange] = {}
    for name, given in passes:
        time: Time = _values(name, given, depth=2)
        pass_kind = next((kind for kind in PASS_KINDS if kind == name), None)
        if pass_kind is None:
            raise ValueError(f"'{name}' is no pass: write one of {' '.join(PASS_KINDS)}")
        if pass_kind in pass_times:
            raise ValueError(f"{name} is given twice: give it once")
        pass_times[pass_kind] = time
    for name, given in comms:
        hop: HopTime = _values(name, given, depth=int(name in (*REPLICA_KINDS, *_OF_HOPS)))
        for kind in _comm_kinds(name):
            if kind in comm_times or kind in exchanges:
                raise ValueError(f"{kind} is given twice: give {name} once, p2p being X and G")
            if isinstance(hop, (int, float)) or kind not in REPLICA_KINDS:
                comm_times[kind] = hop
            else:
                exchanges[kind] = Exchange(hop)
    free: dict[PassKind, Time] = {kind: 0.0 for kind in PLANNED_KINDS if kind not in CHUNKED_KINDS}
    return Costs({**free, **pass_times}, comm_times, exchanges)


def _waits(given: Mapping[str, object]) -> Mapping[PassKind, Time]:
    waits: dict[PassKind, Time] = {}
    for name, value in given.items():
        kind = next((kind for kind in CHUNKED_KINDS if kind == name), None)
        if kind is None:
            raise ValueError(f"'{name}' does not wait: write one of {' '.join(CHUNKED_KINDS)}")
        waits[kind] = _values(name, value, depth=2)
    return waits


def _comm_kinds(name: str) -> tuple[CommKind, ...]:
    kinds = _HOP if name == "p2p" else tuple(kind for kind in COMM_KINDS if kind == name)
    if not kinds:
        raise ValueError(
            f"'{name}' is no communication, nor a pass: write p2p or one of "
            f"{' '.join(COMM_KINDS)}; passes are {' '.join(PASS_KINDS)}"
        )
    return kinds


def _number(word: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"'{word}' is no cost: write KIND=TIME, as in F=1.5 or F=1:1:2") from None


def _no_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    for name, times in Counter(name for name, _ in pairs).items():
        if times > 1:
            raise ValueError(f"'{name}' is given twice: give it once")
    return dict(pairs)


def _section(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {json.dumps(value)[:40]}: write an object, as in {{...}}")
    return value


def _values(name: str, value: object, depth: int) -> Any:
    """Return ``value`` if it is a number, or numbers in at most ``depth`` nested lists."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if isinstance(value, list) and value and depth:
        return [_values(name, part, depth - 1) for part in value]
    raise ValueError(
        f"{name} is {json.dumps(value)[:40]}: write a number"
        + (" or a list with one for each rank" if depth else "")
    )


def _layers(section: Any) -> Sequence[Sequence[int]]:
    def is_row(row: Any) -> bool:
        return isinstance(row, list) and all(type(n) is int and n >= 0 for n in row)

    if not (isinstance(section, list) and all(map(is_row, section))):
        raise ValueError(
            f"layers is {json.dumps(section)[:40]}: write a list for each rank with the layers of "
            "each of its chunks"
        )
    rows: list[list[int]] = section
    return rows


def _sizes(section: object) -> Sizes:
    sizes = dict[str, Any]()
    for name, value in _section(section, "bytes").items():
        if name not in _SIZES:
            raise ValueError(f"bytes has no '{name}': write {', '.join(_SIZES)}")
        if name == "working":
            sizes[name] = {kind: _working(kind, own) for kind, own in _section(value, name).items()}
        else:
            sizes[name] = _values(name, value, depth=2 if name in _OF_CHUNKS else 1)
    return Sizes(**sizes)


def _working(kind: str, value: object) -> Any:
    if kind not in PASS_KINDS:
        raise ValueError(f"working has no pass '{kind}': write {' '.join(PASS_KINDS)}")
    return _values(kind, value, depth=2)
