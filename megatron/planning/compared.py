"""The table of all that ``auto`` compares on a GPU: schedules, treatments and other choices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.planning.candidate import Candidate
from megatron.planning.forecast_run import RunForecast
from megatron.planning.known import NEAR, best_known
from megatron.schedules.search.fastest import look_closer
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.units import MEMORY, TIME, percent


@dataclass(frozen=True)
class Table:
    """The candidates of a comparison, and which of them is taken.

    Attributes:
        taken: the candidate that is taken: the best of all that are planned.
        others: the other planned candidates: first those that fit, the fastest first.
        unknown: candidates that may fit and have no plan, because a limit was reached; the
            candidate with the lowest bound of time first.
        impossible: candidates of which no plan fits.
    """

    taken: Candidate
    others: Sequence[Candidate]
    unknown: Sequence[Candidate]
    impossible: Sequence[Candidate]


def completed(
    first: Candidate, compared: Sequence[Candidate], watch: Watch, *, every: bool
) -> Table:
    """Plan candidates that have no plan yet, and choose again from all that are planned.

    A race compares estimates, and ends when its time is up. So a plan that is made here may be
    better than ``first``, and then it is taken: no plan is taken that its own table dominates.

    Args:
        first: the planned candidate that the race has chosen.
        compared: all candidates, ``first`` among them.
        watch: limits the time or the work; each candidate without a plan gets an equal part of
            the rest, the candidate with the lowest bound of time first.
        every: whether candidates are planned that can only be slower than ``first``.
    """
    planned = [each for each in compared if each.is_planned]
    waiting = [each for each in compared if not each.is_planned and each.can_fit]
    if not every and first.fits:
        waiting = [each for each in waiting if each.least_time * (1 - NEAR) <= first.time]
    number = len(waiting)

    def plan(candidate: Candidate) -> None:
        timed = replace(candidate, watch=watch.part(watch.left / len(waiting)))
        _ = timed.forecast  # planned within its part of the time
        planned.append(timed)
        waiting[:] = [each for each in waiting if each is not candidate]
        watch.show(1 - len(waiting) / number)

    watch.begin("the other schedules")
    look_closer(lambda: waiting, _bound, lambda candidate: watch.is_over, plan)
    fitting = [each for each in planned if each.fits]
    taken = best_known(fitting) or first
    others = [each for each in planned if each is not taken]
    others.sort(key=lambda each: (not each.fits, each.time))
    impossible = [each for each in compared if not each.is_planned and not each.can_fit]
    return Table(taken, others, sorted(waiting, key=_bound), impossible)


def _bound(candidate: Candidate) -> tuple[float]:
    return (candidate.least_time,)


def compared_lines(
    table: Table,
    gpu: Gpu,
    limit: str,
    untried: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> str:
    """Return the planned candidates, the one that is taken first, then the other candidates.

    ``limit`` is the limit for the plans of the table, in words. ``untried`` are the words of
    alternatives of which no candidate was made before a limit was reached, and ``left_out`` those
    of alternatives that cannot be planned.
    """
    lines = [_words(table, gpu, untried), *_table([table.taken, *table.others])]
    if table.unknown:
        named = "; ".join(f"{each.named} ({TIME.write(each.least_time)})" for each in table.unknown)
        lines.append(
            f"not planned in {limit} (--advice-seconds), with the least time that each could take: "
            f"{named}"
        )
    if table.impossible:
        lines.append(f"no plan fits of {'; '.join(each.named for each in table.impossible)}")
    lines += not_looked_at(untried)
    if left_out:
        lines.append(f"left out: {'; '.join(left_out)}")
    return "\n".join(lines)


def not_looked_at(untried: Sequence[str]) -> list[str]:
    """Return the line that names alternatives beyond the limit, if there are any."""
    if not untried:
        return []
    return [f"not looked at (--search-seconds N gives more time): {'; '.join(untried)}"]


def _words(table: Table, gpu: Gpu, untried: Sequence[str]) -> str:
    """Return the sentence on how the first row was chosen.

    Of the alternatives ``untried`` no candidate was made.
    """
    by, taken = f"auto compares by the seconds of {gpu.name}", table.taken
    if not taken.fits:
        return f"{by}; no plan fits, so it takes the one that holds the least, the first"
    least = taken.time * (1 - NEAR)
    known = not untried and all(each.least_time >= least for each in table.unknown)
    none = "no other that fits is" if known else "no other that was planned and fits is"
    cut = "; a longer search (--search-seconds) may find a faster plan" * taken.watch.was_cut
    return (
        f"{by}, and takes the first: {none} more than {NEAR:.0%} faster, and none as fast holds "
        f"less{cut}"
    )


def _table(rows: Sequence[Candidate]) -> Iterator[str]:
    known = [(row, row.forecast) for row in rows if row.forecast is not None]
    time = TIME.unit(*(forecast.outcome.seconds for _, forecast in known))
    memory = MEMORY.unit(*(row.peak for row, _ in known))
    yield (
        f"{'schedule':<12} {'vocabulary':<10} {time.name:>8} {'MFU':>6} {'idle':>7} "
        f"{memory.name:>6} {'in flight':>9}"
    )
    for row, forecast in known:
        outcome = forecast.outcome
        yield (
            f"{row.schedule:<12} {row.treatment:<10} {TIME.number(outcome.seconds, time):>8} "
            f"{percent(outcome.mfu):>6} {outcome.idle:>7.1%} "
            f"{MEMORY.number(row.peak, memory):>6} {row.in_flight:>9.1f}"
            f"{'  ' * bool(row.others)}{row.others}{''.join(_faults(row, forecast))}"
        )


def _faults(row: Candidate, forecast: RunForecast) -> Iterator[str]:
    if not row.is_within_limit:
        yield f"  exceeds {row.config.parallel.planning.limiting_flag}"
    if not forecast.fits:
        yield "  does not fit"
    if row.watch.was_cut:
        yield "  search cut short"
