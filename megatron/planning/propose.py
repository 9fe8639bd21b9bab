"""From the question "which line for my GPUs?" to its answer, by two searches.

The second search finds the best way without a split vocabulary, to compare with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from megatron.flags.words import split
from megatron.planning.answer import Answer, Obstacle, Proposal, Seen
from megatron.planning.asked.question import Question, dry_run_words
from megatron.planning.asked.unwanted import without
from megatron.planning.known import NEAR
from megatron.planning.search.dimensions import CHOSEN, DIMENSIONS, UNSPLIT, VOCABULARY
from megatron.planning.search.runs import Runs
from megatron.planning.search.search import Search
from megatron.planning.search.ways import Found, Way, best_of, by_seconds, distinct
from megatron.run.edit import Edit, left_out
from megatron.run.line import Key, Line, opened
from megatron.run.offload import HOST, HOST_FLAG
from megatron.schedules.counted import counted
from megatron.schedules.search.watch import Watch
from megatron.simulator.units import MEMORY
from megatron.simulator.ways_folder import Role

RUNNERS_UP: Final = 3
OBSTACLES: Final = 2

_USUAL: Final = (
    Edit("--use-distributed-optimizer"),
    Edit("--overlap-grad-reduce"),
    Edit("--overlap-param-gather"),
)
"""Flags that a job with replicas has, if its command line does not say otherwise."""


def propose(question: Question, watch: Watch | None = None, processes: int = 1) -> Answer:
    """Return the way to run a job that is expected to be the fastest that fits.

    Args:
        question: the job.
        watch: shows the progress; if it has a limit of time, it ends the searches early.
        processes: processes that look at ways at once; the answer does not depend on them.

    Raises:
        ValueError: no way to run the job was found that fits, or none at all; the error says what
            is missing.
    """
    watch = Watch() if watch is None else watch
    question = _without_auto(question)
    runs = Runs(
        question.gpus.gpu,
        watch,
        keeps_timelines=question.explore is not None,
        processes=processes,
    )
    try:
        return _answer(question, runs, watch)
    finally:
        runs.close()


def _answer(question: Question, runs: Runs, watch: Watch) -> Answer:
    """Return the answer of two searches."""
    line = _line(question)
    found = _first(question, line, runs, watch)
    if found.taken is None:
        raise ValueError(_nothing_fits(question, found))
    best, other = found, _unsplit(question, line, runs, watch, found)
    is_open = bool(opened((VOCABULARY,), line))
    if is_open and other.taken and best_of((found.taken, other.taken)) is other.taken:
        best = replace(other, ways=by_seconds((*other.ways, *found.ways)))
    taken = best.taken
    assert taken is not None, "the first search has an answer"
    rest = distinct([way for way in best.ways if way.line.key != taken.line.key])[:RUNNERS_UP]
    too_large = [way for way in best.too_large if way.known.seconds < taken.known.seconds]
    obstacles = distinct(too_large)[:OBSTACLES]
    named: dict[Role, Sequence[Way]] = {
        "obstacle": obstacles,
        "runner-up": rest,
        "unsplit": [other.taken] if other.taken else [],
        "taken": [taken],
    }
    return Answer(
        question,
        _proposal(taken, best, runs),
        None if other.taken is None else _proposal(other.taken, other, runs),
        [_proposal(way, best, runs) for way in rest],
        [Obstacle(_proposal(way, best, runs), tuple(_remedies(way, best))) for way in obstacles],
        _effort(found, is_planned=best.candidate is not None),
        _seen((found, other), named, runs),
    )


def _first(question: Question, line: Line, runs: Runs, watch: Watch) -> Found:
    """Return all ways, with any treatment of the vocabulary.

    Raises:
        ValueError: nothing makes a run; the error names the flags that are not wanted, if any.
    """
    dimensions = without(DIMENSIONS, question.without)
    try:
        search = Search(question.gpus.gpu, dimensions, watch=watch, runs=runs)
        return search.run(line, meanwhile=partial(_unsplit, question, line, runs, watch))
    except ValueError as error:
        if not question.without:
            raise
        unwanted = " ".join(f"--without {own}" for own in question.without)
        raise ValueError(
            f"{unwanted}: {error}. A flag that every way has, such as a number of ranks, is given "
            "with the value that you want, or one of its values left out, as --without NAME=VALUE"
        ) from error


def _seen(searches: Sequence[Found], named: Mapping[Role, Sequence[Way]], runs: Runs) -> list[Seen]:
    """Return the ways that some searches have looked at, each once, the fastest first.

    ``named`` are the ways of the answer; of several roles of a way, the last counts.
    """
    roles = {way.line.key: role for role, ways in named.items() for way in ways}
    ways: dict[Key, tuple[Way, Found]] = {}
    for found in searches:
        for way in (*found.ways, *found.too_large):
            if way.line.key not in ways or way.known.level == "plan":
                ways[way.line.key] = way, found
    timelines = runs.timelines or {}
    return [
        Seen(_proposal(way, found, runs), way.known.fits, roles.get(key, ""), timelines.get(key))
        for key, (way, found) in sorted(ways.items(), key=lambda own: own[1][0].known.seconds)
    ]


def _without_auto(question: Question) -> Question:
    """Return the question without the word auto of flags that the search chooses in any case.

    Raises:
        ValueError: a flag leaves chunks on the host to the plan.
    """
    if HOST.is_open(Line.of(dry_run_words(question, (), 1), question.gpus.count).flags):
        raise ValueError(
            f"{HOST_FLAG}: this command tries none of a rank's chunks on the host and all of them, "
            "but not half; leave both flags out for that, or give a number"
        )
    given = (
        (option, *values)
        for option, values in split(question.words)
        if option not in CHOSEN or values != ["auto"]  # the search chooses these in any case
    )
    return replace(question, words=tuple(word for own in given for word in own))


def _line(question: Question) -> Line:
    """Return the flags of the job, without those of its layout."""
    line = Line.of(dry_run_words(question, (), 1), question.gpus.count)
    chosen = {"--dry-run-replicas", "--micro-batch-size"} - question.options
    given = {option: values for option, values in line.given.items() if option not in chosen}
    usual = tuple(edit for edit in _USUAL if edit.option not in given)
    return Line(given, question.gpus.count).edited(usual)


def _unsplit(question: Question, line: Line, runs: Runs, watch: Watch, found: Found) -> Found:
    """Return the ways without a split vocabulary.

    The search begins with the best ways of the other search, so that it is no worse than these. If
    the user wants no whole vocabulary, there are none.
    """
    whole = line.edited(tuple(left_out(option) for option in VOCABULARY.closing))
    assert found.taken is not None, "the other search has an answer"
    begin = found.ways
    if not opened((VOCABULARY,), line):  # the user has named a treatment
        begin = [way._replace(choices=(*way.choices, ())) for way in begin]
    search = Search(question.gpus.gpu, without(UNSPLIT, question.without), watch=watch, runs=runs)
    try:
        return search.run(whole, begin)
    except ValueError:
        if question.without:  # the flags that are not wanted leave no whole vocabulary
            return Found()
        raise


def _proposal(way: Way, found: Found, runs: Runs) -> Proposal:
    candidate = found.candidate if way is found.taken else None
    known = way.known
    return Proposal(
        way.line.edited_words,
        way.line.run(runs.gpu),
        known.seconds,
        known.held.peak,
        known.held.room(runs.gpu),
        None if candidate is None else candidate.in_flight,
        None if candidate is None else candidate.forecast,
        known.level == "plan",
    )


def _remedies(way: Way, found: Found) -> Iterator[str]:
    """Yield ways that fit and differ from ``way`` in one choice, with their time."""
    for other in found.ways:
        differing = [
            own for own, mine in zip(other.choices, way.choices, strict=True) if own != mine
        ]
        if len(differing) == 1:
            words = " ".join(word for edit in differing[0] for word in edit.words)
            yield f"with {words or 'the usual choice'} it takes {other.known.seconds:.4g} s"
            return


def _effort(found: Found, *, is_planned: bool) -> str:
    estimated = counted(len(found.ways) + len(found.too_large), "plan")
    rest = "" if is_planned else _ESTIMATED
    return (
        f"{found.combinations:,} combinations of layout, memory and schedule were ranked by a "
        f"rough count, and {estimated} of few microbatches made, the most promising first; of the "
        f"ways within {NEAR:.0%} of the fastest, those come first that neither round gradients to "
        "bf16 nor copy activations to the host nor run passes in pairs, and of these the one that "
        f"holds the least is taken{rest}"
    )


_ESTIMATED: Final = (
    "; its figures are those of a plan of few microbatches, extended by its steady state: a dry "
    "run of the line makes the whole plan"
)


def _nothing_fits(question: Question, found: Found) -> str:
    smallest = min(found.too_large, key=lambda way: way.known.held.peak)
    return (
        f"--gpus {question.gpus}: of {counted(len(found.too_large), 'plan')} none fits; the "
        f"smallest holds {MEMORY.write(smallest.known.held.peak)} with "
        f"{' '.join(smallest.line.edited_words)}: take more GPUs, GPUs with more memory, or a "
        "smaller global batch"
    )
