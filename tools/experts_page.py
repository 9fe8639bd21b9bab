#!/usr/bin/env python3
"""Predict mixtures of experts on many GPUs: tables of docs/experts.md.

python tools/experts_page.py [--update] [--keep FOLDER]

Mixtral 8x7B and Qwen3-30B-A3B on 32 H100s, with several layouts, vocabularies, treatments and
schedules; DeepSeek-V3 on 1,024; and pairs of passes on 64. The tool predicts as the dry run does,
and runs nothing. A difference below the error of such predictions is called a tie.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.flags.command import read
    from tools.pages import tables
    from tools.pages.tables import percent, row, table
    from tools.predictions.mixtures import (
        DEEPSEEKS,
        IMBALANCES,
        LAYOUTS,
        LIMIT,
        PAIRED_SCHEDULES,
        QWEN_JOB,
        VOCABULARIES,
        Found,
        PassTimes,
        paired,
        pass_times,
        predicted,
    )
    from tools.predictions.scenarios import QWEN, Scenario
    from tools.predictions.ties import error_of, is_tie

TOOL: Final = "experts_page.py"
PAGE: Final = tables.PAGE.with_name("experts.md")
ERROR: Final = error_of(across=True)
"""All jobs have several machines."""

_TREATMENTS: Final = ("none", "redis", "vocab-2")

Rows = Mapping[Scenario, Found]
"""Predictions by job."""


def jobs() -> list[Scenario]:
    """Return all jobs of the page, each once."""
    found = [*LAYOUTS, *IMBALANCES.values(), *DEEPSEEKS]
    found += [own for job, names in VOCABULARIES for own in treated(job, names)]
    found += [own for name in PAIRED_SCHEDULES for own in paired(name) if own is not None]
    return list(dict.fromkeys(found))


def treated(job: Scenario, names: Sequence[str]) -> list[Scenario]:
    """Return a job with each of some treatments of the vocabulary."""
    return [job._replace(treatment=name) for name in names]


def change(new: Found, old: Found, name: str) -> str:
    """Return in words how the time of ``new`` differs from the time of ``old``, given by name."""
    part = new.seconds / old.seconds - 1
    more = "more" if part > 0 else "less"
    return f"takes {percent(abs(part))} {more} time than {name}{_tie(part, ' (a tie)')}"


def cells_of(cells: Iterable[object]) -> str:
    """Return a row of a table."""
    return row(*cells).replace("  ", " ")


def _tie(part: float, words: str = ", a tie") -> str:
    """Return ``words`` if a difference is a tie."""
    return words if is_tie(part, ERROR) else ""


def fastest(found: Mapping[str, float]) -> str:
    """Return a sentence on the fastest of several ways, whose seconds are given by name."""
    first, *rest = sorted(found, key=lambda name: found[name])
    ties = [name for name in rest if is_tie(found[name] / found[first] - 1, ERROR)]
    tied = f" Less than {percent(ERROR)} slower, so a tie: {', '.join(ties)}." if ties else ""
    return f"{first} is the fastest.{tied}"


def layout_row(job: Scenario, found: Found, *, named: bool) -> str:
    """Return the row of a layout; ``named``: with the name of its model."""
    cells = (
        job.model if named else "",
        *(job.tensor, job.replicas, job.expert, job.expert_tensor),
        f"`{job.dispatcher}`" if job.expert > 1 else "",
        f"{found.seconds:.2f}",
        *map(percent, (found.mfu, found.idle)),
        found.memory,
    )
    return cells_of(cells)


def layouts(rows: Rows) -> Iterator[str]:
    """Yield the table of layouts, and how its closest rows compare."""
    yield "| model | t | d | e | etp | tokens by | s an iteration | MFU | idle | GiB at most |"
    yield tables.rule(10, "lrrrrlr")
    above = ""
    for job in LAYOUTS:
        yield layout_row(job, rows[job], named=job.model != above)
        above = job.model
    two, one, alltoall, allgather, flex = (rows[LAYOUTS[place]] for place in (3, 4, 8, 9, 10))
    less = one.held - two.held
    yield ""
    yield (
        f"For Mixtral with e = 8, t = 1 {change(one, two, 't = 2')}, and t = 2 holds "
        f"{abs(less):.0f} GiB {'less' if less > 0 else 'more'}. For Qwen3 with t = 1 and e = 8, "
        f"`allgather` {change(allgather, alltoall, '`alltoall`')}; `flex` "
        f"{change(flex, alltoall, '`alltoall`')}."
    )


def gain(found: Mapping[str, Found]) -> str:
    """Return by how much longer the faster of none and redis takes than vocab-2."""
    whole = min(own.seconds for name, own in found.items() if name != "vocab-2")
    part = whole / found["vocab-2"].seconds - 1
    return percent(part, "+") + _tie(part)


def vocabularies(rows: Rows) -> Iterator[str]:
    """Yield the table of vocabularies, and the fastest way for one of them."""
    over = "how much longer the faster of none and redis takes than vocab-2"
    yield from table(("model, schedule", "vocabulary", *_TREATMENTS, over), ())
    above, times = "", dict[str, float]()
    for job, names in VOCABULARIES:
        found = {own.treatment: rows[own] for own in treated(job, names)}
        place = f"{job.model}, {_schedule(job)}"
        cells = (f"{found[name].seconds:.2f}" if name in found else "" for name in _TREATMENTS)
        named = "" if place == above else place
        yield cells_of((named, f"{job.vocabulary:,}", *cells, gain(found)))
        above = place
        if (job.model, job.vocabulary) == (QWEN, QWEN_JOB.vocabulary):
            times |= {f"{_schedule(job)} with {name}": own.seconds for name, own in found.items()}
    yield ""
    yield f"For Qwen3 with a vocabulary of {QWEN_JOB.vocabulary:,}, {fastest(times)}"


def _schedule(job: Scenario) -> str:
    """Return the schedule of a job in words."""
    name, _, chunks = job.schedule.partition("/")
    return f"{name} ({chunks} chunks)" if chunks else name


def imbalances(rows: Rows) -> Iterator[str]:
    """Yield the table of imbalances."""
    found = ((name, rows[job]) for name, job in IMBALANCES.items())
    cells = ((name, f"{own.seconds:.2f}", own.memory) for name, own in found)
    yield from table(("the busiest rank has", "s an iteration", "GiB at most"), cells)


def deepseek(rows: Rows) -> Iterator[str]:
    """Yield the table of DeepSeek-V3; its rows are compared with the first one."""
    yield "| vocabulary | computed again | s an iteration | against the first row | GiB at most |"
    yield tables.rule(5, "llr")
    first = rows[DEEPSEEKS[0]]
    for job in DEEPSEEKS:
        own = rows[job]
        part = own.seconds / first.seconds - 1
        against = "" if own == first else percent(part, "+") + _tie(part)
        again = "every layer" if "recompute" in job.more else "nothing"
        yield cells_of((job.treatment, again, f"{own.seconds:.1f}", against, own.memory))
    redis, none = (rows[job] for job in DEEPSEEKS[1:3])
    yield ""
    yield f"With every layer computed again, redis {change(redis, none, 'none')}."


def pairs(rows: Rows, passes: PassTimes) -> Iterator[str]:
    """Yield the times of passes, the table of pairs, and which schedules gain from pairs."""
    yield (
        f"For a chunk of three layers, a forward takes {_ms(passes.forward)} "
        f"({_ms(passes.forward_wait)} of them exchange), an input gradient "
        f"{_ms(passes.backward)} ({_ms(passes.backward_wait)} of them exchange) and W "
        f"{_ms(passes.weight)}. Each cell has the predicted seconds and the microbatches in flight:"
    )
    yield ""
    limited = f"with pairs and a limit of {LIMIT}"
    yield from table(("schedule", "without pairs", "with pairs", limited), ())
    times, idle = {}, []
    for schedule in PAIRED_SCHEDULES:
        name = f"`{schedule.partition('/')[0]}`"
        yield pair_row(schedule, rows)
        alone, joined = (rows[job] for job in paired(schedule)[:2] if job is not None)
        times[name] = joined.seconds
        if f"{alone.seconds:.3f}" == f"{joined.seconds:.3f}":
            idle.append(name)
    yield ""
    yield (
        f"With pairs and without the limit, {fastest(times)} These schedules gain nothing from "
        f"pairs with at most one microbatch more than they promise: {', '.join(idle)}."
    )


def _ms(seconds: float) -> str:
    """Return a time in milliseconds."""
    return f"{1e3 * seconds:.1f} ms"


def pair_row(schedule: str, rows: Rows) -> str:
    """Return a schedule's row of the table of pairs."""
    cells = [f"`{schedule.partition('/')[0]}`"]
    for job in paired(schedule):
        own = None if job is None else rows[job]
        over = "" if own is None or own.fits else ", does not fit"
        cells.append("" if own is None else f"{own.seconds:.3f}, {own.in_flight:.4g}{over}")
    return cells_of(cells)


def parts(rows: Rows, passes: PassTimes) -> list[str]:
    """Return all parts of the page that this tool writes, in their order."""
    made = (layouts(rows), vocabularies(rows), imbalances(rows), deepseek(rows))
    return ["\n".join(_folded(own)) for own in (*made, pairs(rows, passes))]


def _folded(lines: Iterator[str]) -> Iterator[str]:
    """Yield lines, those of sentences folded to the width of the page."""
    for line in lines:
        table = line.startswith("|")
        yield line if table else fill(line, 120, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class PageFlags(tables.PartFlags):
    """Tables."""


def main() -> None:
    """Predict all rows, and print or write the tables."""
    flags = read(None, __doc__, PageFlags)[PageFlags]
    rows = {}
    for job in jobs():
        rows[job] = predicted(job, flags.keep)
        print(job.words, f"{rows[job].seconds:.3f} s", file=sys.stderr, flush=True)
    tables.put(parts(rows, pass_times(flags.keep)), TOOL, update=flags.update, page=PAGE)


if __name__ == "__main__":
    main()
