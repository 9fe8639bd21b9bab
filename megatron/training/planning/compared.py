"""The table of all that ``auto`` compares on a GPU: schedules, treatments and other choices."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.units import MEMORY, TIME, percent
from megatron.training.planning.candidate import Candidate
from megatron.training.planning.forecast_run import RunForecast
from megatron.training.planning.race import NEAR


def compared_lines(
    first: Candidate,
    compared: Sequence[Candidate],
    gpu: Gpu,
    watch: Watch,
    untried: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> str:
    """Return the table of planned candidates in order of preference, then the other candidates.

    ``watch`` limits the time for further plans; each gets an equal part of the time that is left.
    ``untried`` are the words of alternatives of which no candidate was made, for lack of time, and
    ``left_out`` those of alternatives that cannot be planned.
    """
    impossible = [each for each in compared if not each.is_planned and not each.can_fit]
    waiting = [each for each in compared if not each.is_planned and each.can_fit]
    waiting.sort(key=lambda each: each.least_time)
    others = [each for each in compared if each.is_planned and each is not first]
    unknown = list[Candidate]()
    watch.begin("the other schedules")
    for at, candidate in enumerate(waiting):
        if watch.is_over:
            unknown = waiting[at:]
            break
        part = watch.part(watch.left / (len(waiting) - at))
        timed = replace(candidate, watch=part)
        others.append(timed)
        _ = timed.forecast  # planned within its part of the time
        watch.show((at + 1) / len(waiting))
    watch.close("the schedules that were planned are shown")
    others.sort(key=lambda each: (not each.fits, each.time))
    words = _words(first, others, unknown, gpu, untried)
    lines = [words, *_table([first, *others])]
    if unknown:
        named = "; ".join(f"{each.named} ({TIME.write(each.least_time)})" for each in unknown)
        lines.append(
            f"not planned in {watch.seconds:g} s (--advice-seconds), with the least time that each "
            f"could take: {named}"
        )
    if impossible:
        lines.append(f"no plan fits of {'; '.join(each.named for each in impossible)}")
    lines += not_looked_at(untried)
    if left_out:
        lines.append(f"left out: {'; '.join(left_out)}")
    return "\n".join(lines)


def not_looked_at(untried: Sequence[str]) -> list[str]:
    """Return the line that names alternatives which no time was left for, if there are any."""
    if not untried:
        return []
    return [f"not looked at for lack of time (--search-seconds): {'; '.join(untried)}"]


def _words(
    first: Candidate,
    others: Sequence[Candidate],
    unknown: Sequence[Candidate],
    gpu: Gpu,
    untried: Sequence[str],
) -> str:
    """Return the sentence on how the first row was chosen.

    ``others`` are the other rows: first the candidates that fit, the fastest first. ``unknown`` are
    candidates without a plan; of the alternatives ``untried`` no candidate was made.
    """
    by = f"auto compares by the seconds of {gpu.name}"
    if not first.fits:
        return f"{by}; no plan fits, so it takes the one that holds the least, the first"
    if first.watch.was_cut:
        return f"{by}, and takes the best plan that it found in --search-seconds, the first"
    least = first.time * (1 - NEAR)
    fastest = others[0] if others else first
    if fastest.fits and fastest.time < least:
        return (
            f"{by}, and takes the first; its own plan shows {fastest.named} to be "
            f"{1 - fastest.time / first.time:.1%} faster: ask for it by name"
        )
    known = not untried and all(each.least_time >= least for each in unknown)
    none = "no other that fits is" if known else "of those it compared none is expected to be"
    return f"{by}, and takes the first: {none} more than {NEAR:.0%} faster"


def _table(rows: Sequence[Candidate]) -> Iterator[str]:
    known = [(row, row.forecast) for row in rows if row.forecast is not None]
    time = TIME.unit(*(forecast.outcome.seconds for _, forecast in known))
    memory = MEMORY.unit(*(max(forecast.outcome.peak) for _, forecast in known))
    yield (
        f"{'schedule':<12} {'vocabulary':<10} {time.name:>8} {'MFU':>6} {'idle':>7} "
        f"{memory.name:>6} {'in flight':>9}"
    )
    for row, forecast in known:
        outcome = forecast.outcome
        yield (
            f"{row.schedule:<12} {row.treatment:<10} {TIME.number(outcome.seconds, time):>8} "
            f"{percent(outcome.mfu):>6} {outcome.idle:>7.1%} "
            f"{MEMORY.number(max(outcome.peak), memory):>6} {row.in_flight:>9.1f}"
            f"{'  ' * bool(row.others)}{row.others}{''.join(_faults(row, forecast))}"
        )


def _faults(row: Candidate, forecast: RunForecast) -> Iterator[str]:
    if not row.is_within_limit:
        yield "  exceeds --zero-bubble-max-pending-backward"
    if not forecast.fits:
        yield "  does not fit"
    if row.watch.was_cut:
        yield "  search cut short"
