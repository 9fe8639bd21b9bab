"""For a run that does not fit, names similar settings that fit, the fastest first.

Lower bounds of all settings are computed before any setting is planned. The bound of memory rules
out most settings, and the bound of time puts the most promising settings first. Plans have few
microbatches (``estimate``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from typing import Final, NamedTuple

from megatron.config.precision import NARROW_SUMS
from megatron.config.run_config import RunConfig
from megatron.planning.candidate import BOUND
from megatron.planning.estimate import Estimate
from megatron.planning.neighbours import Setting, neighbours
from megatron.planning.run_memory import Fullest
from megatron.schedules.counted import counted
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import GPUS, Gpu
from megatron.simulator.units import MEMORY, percent

ALTERNATIVES: Final = 5
"""Number of fitting settings that are named if the settings of the command line do not fit."""

SEARCH_SECONDS: Final = 0.5
"""Seconds of work for the first plan of a setting. The rest of the limit, after all first plans,
goes to better plans of the settings that are named."""


class _Tried(NamedTuple):
    """A setting with a plan, and its estimated time and memory."""

    setting: Setting
    found: Estimate


@dataclass
class _Search:
    """The state of the search: all settings, sorted by result.

    Attributes:
        gpu: the GPU of every rank.
        watch: limits the work of the advice.
        tried: settings with a plan.
        unknown: settings that were not looked at, because the limit was reached.
        impossible: settings whose least memory is too large, so none of their plans fits.
    """

    gpu: Gpu
    watch: Watch
    tried: list[_Tried] = field(default_factory=list)
    unknown: list[Setting] = field(default_factory=list)
    impossible: list[Setting] = field(default_factory=list)

    @property
    def fitting(self) -> list[_Tried]:
        """The settings that fit, the fastest first."""
        fitting = [each for each in self.tried if each.found.fits]
        return sorted(fitting, key=lambda each: -each.found.samples_per_second)

    def bound(self, settings: Sequence[Setting]) -> list[Setting]:
        """Return the settings that may fit, the most promising first.

        Settings whose guessed memory fits come first, by their least time. The others follow by
        their guessed memory. Half of the limit is for plans.
        """
        able, looking = list[Setting](), self.watch.part(self.watch.left / 2)
        for at, setting in enumerate(settings):
            if looking.is_over:
                self.unknown += settings[at:]
                break
            self.watch.did(BOUND)
            try:
                candidate = setting.candidate
            except ValueError:  # the schedule cannot train the model
                continue
            if candidate.least_memory.fits(self.gpu):
                _ = candidate.least_time  # computed here, as ``BOUND`` counts
                able.append(setting)
            else:
                self.impossible.append(setting)
        usable = self.gpu.usable
        return sorted(
            able, key=lambda each: (max(each.expected, usable), each.candidate.least_time)
        )

    def plan(self, able: Sequence[Setting]) -> None:
        """Plan settings until the limit is reached; skip those that are too slow to be named."""
        self.watch.expect(len(able))
        rate = inf  # the least ratio of estimated seconds to the lower bound
        for setting in able:
            enough = self.fitting[ALTERNATIVES - 1 : ALTERNATIVES]
            if enough and rate * setting.candidate.least_time >= enough[0].found.seconds:
                continue  # too slow to be named
            if self.watch.is_over:
                self.unknown.append(setting)
            else:
                found = self.try_one(setting, SEARCH_SECONDS)
                rate = min(rate, found.seconds / setting.candidate.least_time)

    def try_one(self, setting: Setting, seconds: float) -> Estimate:
        """Plan a setting within ``seconds``, and show the result to the reader of the watch."""
        self.watch.next_plan()
        found = setting.candidate.estimate(self.watch.part(seconds), self.gpu)
        told = f"{found.samples_per_second:.3g} samples/s" if found.fits else "does not fit"
        self.watch.planned(setting.flags, told)
        self.tried.append(_Tried(setting, found))
        return found

    def improve(self) -> None:
        """Search longer for the plans of the settings that are named, with the work that is left.

        A longer search may find a plan that holds more memory. A plan that does not fit never
        replaces a plan that fits.
        """
        cut = [each for each in self.fitting[:ALTERNATIVES] if each.found.cut]
        for at, each in enumerate(cut):
            seconds = self.watch.left / (len(cut) - at)
            if seconds <= 2 * SEARCH_SECONDS:
                return
            found = self.try_one(each.setting, seconds)
            better = found.fits and found.seconds <= each.found.seconds
            self.tried.remove(each if better else self.tried[-1])


def what_would_fit(
    config: RunConfig,
    gpu: Gpu,
    own: Fullest,
    watch: Watch,
    more: str = "--advice-seconds N gives more time",
) -> str:
    """Return the fastest similar settings that fit, or the reason why none does.

    ``own`` is the fullest rank of the run itself. When ``watch`` is over, a bound or plan that was
    begun is still finished. ``more`` tells the user how to have more settings tried.
    """
    search = _Search(gpu, watch)
    search.plan(search.bound(list(neighbours(config))))
    search.improve()
    watch.close("the settings that were tried are named")
    lines = [*(_named(search) if search.fitting else _nothing_fits(search, own))]
    return "\n".join([*lines, *_not_tried(search, more)])


def _named(search: _Search) -> Iterator[str]:
    """Yield the settings that fit, and how far their figures can be trusted."""
    shown = search.fitting[:ALTERNATIVES]
    yield "what would fit, the fastest first:"
    for setting, found in shown:
        yield (
            f"  {setting.flags}: {MEMORY.write(found.fullest.peak)}, "
            f"{found.samples_per_second:.3g} samples/s, MFU {percent(found.mfu)}"
        )
    few = {found.planned for _, found in shown if found.planned < found.microbatches}
    if few:
        yield (
            f"plans have {' or '.join(map(str, sorted(few)))} microbatches: the interval of their "
            "steady state extends their times to those of all"
        )
    if any(NARROW_SUMS in setting.flags for setting, _ in shown):
        yield "--main-grads-dtype bf16 rounds every sum of gradients to the 8 bits of a bf16 number"
    if any(found.cut for _, found in shown):
        yield "a longer search may find faster plans of these settings"


def _nothing_fits(search: _Search, own: Fullest) -> Iterator[str]:
    """Yield that no similar setting fits, the memory that is too large, and the way out."""
    if search.tried:
        setting, found = min(search.tried, key=lambda each: each.found.fullest.peak)
        held = found.fullest
        named = counted(len(search.tried), "setting")
        said = (
            f"of {named} with a plan the smallest is {setting.flags}: it holds "
            f"{MEMORY.write(held.peak)} on rank {held.rank}, and {held.room_in_words(search.gpu)}"
        )
        if held.fits(search.gpu):
            yield f"no setting that fits the hosts (--host-memory) was found: {said}"
            return
    else:
        bounds = [own, *(setting.candidate.least_memory for setting in search.impossible)]
        held = min(bounds, key=lambda each: each.peak)
        said = (
            f"the least is {MEMORY.write(held.peak)} on rank {held.rank}, which no plan goes "
            f"below and of which {MEMORY.write(held.static)} are there all the time, and "
            f"{held.room_in_words(search.gpu)}"
        )
    if search.unknown:
        yield f"no setting that fits was found in {search.watch.limit}"
        if search.tried:
            yield said
        return
    larger = " or ".join(known.name for known in GPUS.values() if held.fits(known))
    yield (
        f"nothing nearby fits either: {said}: take "
        + (f"GPUs with that much memory ({larger}), " if larger else "")
        + "more ranks (--pipeline-model-parallel-size, --tensor-model-parallel-size), or a smaller "
        "model"
    )


def _not_tried(search: _Search, more: str) -> Iterator[str]:
    """Yield the number of settings beyond the limit that were not tried, and their flags."""
    if not search.unknown:
        return
    number = counted(len(search.unknown), "setting")
    yield f"not tried in {search.watch.limit}: {number} ({more})"
    ordered = sorted(search.unknown, key=lambda each: each.others)
    for others, settings in groupby(ordered, key=lambda each: each.others):
        schedules = ", ".join(each.schedule for each in settings if each.schedule)
        named = f"--pipeline-schedule {schedules}" if schedules else ""
        yield f"  {', '.join(filter(None, (others, named)))}"
