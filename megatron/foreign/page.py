"""The page on a launch script: its ranks, the answers to its flags, and the lines to run here."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from megatron.flags.readable import readable
from megatron.foreign.judge import Judgement, Variant
from megatron.foreign.line import launch_text
from megatron.foreign.predict import Gain
from megatron.foreign.values import Hole, Holes, is_ambient
from megatron.planning.estimate import Estimate
from megatron.schedules.counted import counted
from megatron.simulator.units import MEMORY, TIME, percent

WIDTH: Final = 100
_INDENT: Final = "  "


@dataclass(frozen=True)
class Source:
    """A script or a configuration that was read.

    Attributes:
        name: the file.
        holes: all holes.
        notes: sentences on how the script was read.
        assumed: variables that tests read as not set.
        defaults: values that the script gives variables that are not set.
        exported: names of variables that the script hands to programs.
    """

    name: str
    holes: Holes
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    defaults: Mapping[str, str] | None = None
    exported: tuple[str, ...] = ()


def page_of(source: Source, own: Judgement, gain: Gain | None, faults: Iterable[str]) -> str:
    """Return the page on a training.

    Args:
        source: the file, and how it was read.
        own: the training.
        gain: the prediction of both lines; ``None``: nobody asked, or it was not possible.
        faults: reasons why there is no prediction.
    """
    paragraphs = [
        "\n".join(_head(source, own)),
        "\n".join(_reading(source, own)),
        "\n".join(_flags(own, source.holes)),
        "\n".join(_must_change(own.as_is)),
    ]
    lines = [f"the line to run:\n\n{launch_text(own, own.as_is, source.holes)}"]
    lines += _split(own, source.holes)
    rest = [*_gain(gain), *(f"no prediction: {fault}" for fault in faults)]
    told = [readable(text) for text in (*paragraphs, *rest) if text]
    return "\n\n".join([*told[: len(told) - len(rest)], *lines, *told[len(told) - len(rest) :]])


def _head(source: Source, own: Judgement) -> Iterator[str]:
    """Yield the job: its launcher and its ranks."""
    launch, ranks = own.launch, own.ranks
    where = f", line {launch.line}" if launch.line else ""
    is_command = launch.line and not launch.is_config
    by = f"{launch.launcher or 'python'} starts {launch.program}" if is_command else launch.program
    times = f", {launch.times} times" if launch.times > 1 else ""
    yield f"{source.name}{where}: {by}{times}"
    if not launch.trains_gpt:
        yield f"{launch.program} trains another kind of model; this project trains GPTs only"
    if ranks.machines is not None and ranks.per_machine is not None:
        machines, each = counted(ranks.machines, "machine"), counted(ranks.per_machine, "rank")
        yield f"ranks: {machines} x {each} = {ranks.world_size}{_layout(own)}"
        return
    open_ones = [
        f"{name} {text or 'not written'} ({option} N)"
        for name, known, text, option in (
            ("machines", ranks.machines, ranks.machines_text, "--nodes"),
            ("ranks of a machine", ranks.per_machine, ranks.per_machine_text, "--gpus-per-node"),
        )
        if known is None
    ]
    known = f"{ranks.total} in all, " if ranks.total else ""
    yield f"ranks: {known}not known: {', '.join(open_ones)}{_layout(own)}"


def _layout(own: Judgement) -> str:
    """Return the sizes of the axes."""
    sizes = own.sizes
    named = f"; t {sizes.t}, c {sizes.c}, p {sizes.p}"
    if sizes.e > 1:
        named += f", e {sizes.e}"
    if own.unsized:
        return f"{named}, without {', '.join(own.unsized)}"
    if sizes.world is None:
        return f"{named}; a replica has {counted(sizes.of_replica, 'rank')}"
    if sizes.d is None:
        return (
            f"{named}: {sizes.of_replica} ranks of a replica, which do not divide {sizes.world}: "
            "start another number of ranks, or change a size"
        )
    return f"{named}, d {sizes.d}"


def _reading(source: Source, own: Judgement) -> Iterator[str]:
    """Yield lines for the user on how the script was read."""
    yield from source.notes
    yield from own.launch.notes
    if source.defaults:
        shown = ", ".join(f"{name}={value}" for name, value in source.defaults.items())
        yield from _row("defaults of the script (--set NAME=VALUE gives others):", shown)
    if source.assumed:
        yield from _row("not set, and taken as empty in tests:", ", ".join(source.assumed))
    for flag in own.unknown:
        holes = [h for v in flag.values for h in source.holes.within(v) if not is_ambient(h.name)]
        if holes:
            ways = ", ".join(dict.fromkeys(_way(hole) for hole in holes))
            yield f"not known: {flag.shown(source.holes)} ({ways})"
    for hole in own.further:
        if not is_ambient(hole.name):
            yield f"left out: {hole.text}, which may stand for more flags ({_way(hole)})"
    if own.unquoted:
        yield f"quotes that are part of a value are left out: {' '.join(own.unquoted)}"
    if own.stray:
        yield f"left out: {' '.join(own.stray)}: no flag stands before it"
    if source.exported:
        yield from _row("exported, and no part of the line:", ", ".join(source.exported))


def _way(hole: Hole) -> str:
    choices = f": {' or '.join(hole.choices)}" if hole.choices else ""
    return f"{hole.way_out}{choices}"


def _row(title: str, text: str) -> list[str]:
    return _items(title, text.split(" "))


def _items(title: str, items: Iterable[str]) -> list[str]:
    """Return items in rows behind a title; no item is broken."""
    rows = [title]
    for item in items:
        if len(rows[-1]) + 1 + len(item) > WIDTH:
            rows.append(f"{_INDENT}{item}")
        else:
            rows[-1] += f" {item}"
    return rows


def _flags(own: Judgement, holes: Holes) -> Iterator[str]:
    """Yield the answers to all flags that are accepted or noted."""
    told = own.told[: len(own.flags)]
    counts = [sum(t.verdict == v for t in told) for v in ("accepted", "noted", "refused")]
    yield (
        f"{counted(len(told), 'flag')}: {counts[0]} accepted, {counts[1]} noted, "
        f"{counts[2]} refused"
    )
    stays = [answer.flag for answer in told if answer.verdict == "accepted"]
    if stays:
        yield from _items("stays:", stays)
    noted = [answer for answer in told if answer.verdict == "noted"]
    if noted:
        yield "noted, and may stay:"
    yield from (f"{_INDENT}{answer.flag}: {answer.said}" for answer in noted)
    known = {answer.line for answer in noted}
    yield from (f"{_INDENT}{note}" for note in own.as_is.notes if note not in known)
    for flag in own.as_is.added:
        yield f"added: {flag.shown(holes)}, which Megatron-LM's pretrain_gpt.py takes by default"
    yield from (f"other default: {line}" for line in own.other_defaults)


def _must_change(variant: Variant) -> Iterator[str]:
    """Yield the flags that must change, with the reasons."""
    if variant.left_out or variant.changes:
        yield "must change:"
    yield from _changes(variant, ())


def _changes(variant: Variant, known: Collection[str]) -> Iterator[str]:
    """Yield the flags that must change, without the lines that are known."""
    for answer in variant.left_out:
        yield f"{_INDENT}left out: {answer.flag}: {answer.said}"
    yield from (f"{_INDENT}change: {line}" for line in variant.changes if line not in known)


def _split(own: Judgement, holes: Holes) -> Iterator[str]:
    """Yield the line with the vocabulary split, and what must change for it."""
    if own.split is None:
        yield f"this line splits the vocabulary already (--vocab-parallel {own.treatment})"
        return
    sizes = own.sizes
    over = f"over {counted(sizes.p * sizes.t, 'rank')} (p x t)"
    if sizes.p == 1:
        over += "; with one pipeline rank it has little to gain"
    told = list(_changes(own.split, own.as_is.changes))
    told += [f"{_INDENT}noted: {note}" for note in own.split.notes]
    told += [f"{_INDENT}needless now, and may go: {flag}" for flag in own.dispensable]
    more = " ".join(flag.shown(holes) for flag in own.split.added)
    head = f"with the vocabulary split {over}: {more} is added"
    head += ":" if told else "; nothing else changes:"
    text = readable("\n".join([head, *told]))
    yield f"{text}\n\n{launch_text(own, own.split, holes)}"


def _gain(gain: Gain | None) -> Iterator[str]:
    """Yield the prediction of both lines."""
    if gain is None:
        return
    rows = [f"predicted on {gain.gpu.name} (docs/dry-run.md says how far it may be off):"]
    rows += [f"{_INDENT}{note}" for note in gain.notes]
    for name, own in zip(gain.names, (gain.whole, gain.split), strict=True):
        if own is not None:
            rows.append(f"{_INDENT}{name}: {_figures(own)}")
    rows += [f"{_INDENT}{fault}" for fault in gain.faults]
    if gain.gain is not None:
        rows.append(f"{_INDENT}the split makes the job {percent(gain.gain)} faster")
    yield "\n".join(rows)


def _figures(own: Estimate) -> str:
    fits = "" if own.fits else ", which does not fit"
    return (
        f"{TIME.write(own.seconds)} an iteration, MFU {percent(own.mfu)}, fullest rank "
        f"{MEMORY.write(own.fullest.peak)}{fits} "
        f"(from a plan of {own.planned} of {counted(own.microbatches, 'microbatch')})"
    )
