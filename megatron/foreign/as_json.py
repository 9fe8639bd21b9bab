"""The same answers as data."""

from typing import Any

from megatron.foreign.flags import Flag
from megatron.foreign.judge import Judgement, Variant
from megatron.foreign.line import launch_text
from megatron.foreign.page import Source
from megatron.foreign.predict import Gain
from megatron.foreign.values import Holes
from megatron.planning.estimate import Estimate
from megatron.run.told import Told


def as_json(source: Source, own: Judgement, gain: Gain | None, faults: list[str]) -> dict[str, Any]:
    """Return the answers to a training as one object. What is not known is ``null``."""
    launch, ranks, sizes, holes = own.launch, own.ranks, own.sizes, source.holes
    return {
        "source": source.name,
        "line": launch.line or None,
        "launcher": launch.launcher,
        "program": launch.program,
        "ranks": {
            "machines": ranks.machines,
            "per_machine": ranks.per_machine,
            "world": ranks.world_size,
            "layout": {"t": sizes.t, "c": sizes.c, "p": sizes.p, "e": sizes.e, "d": sizes.d},
            "not_known": list(own.unsized),
        },
        "flags": [_told(answer) for answer in own.told],
        "not_known": [
            {
                "flag": flag.shown(holes),
                "set": [hole.name or hole.text for v in flag.values for hole in holes.within(v)],
            }
            for flag in own.unknown
        ],
        "more_flags": [hole.text for hole in own.further],
        "unquoted": list(own.unquoted),
        "notes": [*source.notes, *launch.notes],
        "defaults": dict(source.defaults or {}),
        "taken_as_empty": list(source.assumed),
        "other_defaults": list(own.other_defaults),
        "exported": list(source.exported),
        "vocabulary": own.treatment,
        "as_is": _variant(own, own.as_is, holes),
        "split": None if own.split is None else _variant(own, own.split, holes),
        "predicted": None if gain is None else _gain(gain),
        "not_predicted": faults,
    }


def _told(answer: Told) -> dict[str, Any]:
    return {"flag": answer.flag, "answer": answer.verdict, "line": answer.line or None}


def _variant(own: Judgement, variant: Variant, holes: Holes) -> dict[str, Any]:
    return {
        "words": _words(variant.flags, holes),
        "left_out": [_told(answer) for answer in variant.left_out],
        "added": _words(variant.added, holes),
        "changes": list(variant.changes),
        "notes": list(variant.notes),
        "line": launch_text(own, variant, holes),
    }


def _words(flags: tuple[Flag, ...], holes: Holes) -> list[str]:
    return [word for flag in flags for word in (flag.option, *map(holes.shown, flag.values))]


def _gain(gain: Gain) -> dict[str, Any]:
    return {
        "gpu": gain.gpu.name,
        "whole": {"vocabulary": gain.names[0], **_estimate(gain.whole)},
        "split": {"vocabulary": gain.names[1], **_estimate(gain.split)},
        "split_gains": gain.gain,
        "faults": list(gain.faults),
        "notes": list(gain.notes),
    }


def _estimate(own: Estimate | None) -> dict[str, Any]:
    if own is None:
        return {"seconds": None, "mfu": None, "bytes": None, "fits": None}
    return {
        "seconds": own.seconds,
        "mfu": own.mfu,
        "bytes": round(own.fullest.peak),
        "fits": own.fits,
    }
