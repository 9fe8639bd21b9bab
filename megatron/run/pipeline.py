"""Rules about the pipeline: its schedule, the treatment of the vocabulary, the stages' layers.

Flags that ask for different things are refused.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

from megatron.flags.groups import Flags, faults_of, result_of
from megatron.flags.rules import notes, refuses
from megatron.model.distribution import distribute
from megatron.model.settings import ShapeSettings
from megatron.model.stage_settings import StageSettings
from megatron.parallel.settings import PipelineRankSettings
from megatron.run.schedule import (
    ACCOUNTS,
    AUTO_FLAG,
    CHUNKS,
    FILE_SCHEDULES,
    LAYOUT,
    Ask,
    chunks_of,
    compares_treatments,
    distributions,
    given_flags,
    schedule_of,
    schedules_asked,
    treatment_of,
    treatments_asked,
    treatments_of,
    uses_limit,
)
from megatron.run.stages import distribution_of
from megatron.run.train import TrainSettings, batch_share
from megatron.schedules.block_options import BlockOptions, GivenOption
from megatron.schedules.catalogue import TRAITS
from megatron.schedules.limits import GIB_FLAG, PENDING_FLAG, PERCENT_FLAG
from megatron.schedules.plan import Plan
from megatron.schedules.plan_file import load_any_plan, misfits
from megatron.schedules.plan_file import treatments_of as treatments_of_plan
from megatron.schedules.request import MOST_FORWARDS
from megatron.schedules.settings import (
    DEFAULT_SCHEDULE,
    PlanSettings,
    ScheduleSettings,
    SliceSettings,
)

_GROUP: Final = "microbatch_group_size_per_virtual_pipeline_stage"


@refuses
def _plan_size(flags: Flags) -> Iterator[str]:
    """Refuse a plan with too many passes before a search for it begins.

    The line begins with the flag of the largest number: microbatches, chunks or ranks.
    """
    microbatches, ranks = batch_share(flags).microbatches, flags[PipelineRankSettings].size
    chunks = chunks_of(flags) or TRAITS[schedule_of(flags)].chunks
    forwards = ranks * chunks * microbatches
    if forwards <= MOST_FORWARDS:
        return
    asked = [
        *given_flags(flags[ScheduleSettings], *CHUNKS),
        *given_flags(flags[StageSettings], LAYOUT),
        "--pipeline-schedule",
    ][0]
    worst = max(
        (microbatches, f"--global-batch-size {flags[TrainSettings].global_batch_size}"),
        (chunks, asked),
        (ranks, f"--pipeline-model-parallel-size {ranks}"),
    )[1]
    yield (
        f"{worst} is too much: {microbatches:,} microbatches x {chunks:,} chunk(s) x {ranks:,} "
        f"rank(s) are {forwards:,} forward passes an iteration, and a plan has at most "
        f"{MOST_FORWARDS:,}: lower it, or raise --micro-batch-size"
    )


@refuses
def _one_schedule(flags: Flags) -> Iterator[str]:
    yield from _contradictions(schedules_asked(flags))


@refuses
def _one_treatment(flags: Flags) -> Iterator[str]:
    yield from _contradictions(treatments_asked(flags))


def _contradictions(asks: Iterable[Ask]) -> Iterator[str]:
    given = list(asks)
    for other in given[1:]:
        if not set(other.wishes) & set(given[0].wishes):
            yield (
                f"{given[0].flag} asks for {given[0].wishes[0]} here and {other.flag} for "
                f"{other.wishes[0]}: give one of them"
            )


@refuses
def _auto_treatment_rule(flags: Flags) -> Iterator[str]:
    """Refuse to compare treatments with a flag, a plan or costs that belong to one treatment."""
    if not compares_treatments(flags):
        return
    for ask in treatments_asked(flags):
        if ask.flag != AUTO_FLAG:
            yield f"{AUTO_FLAG} compares treatments, and {ask.flag} names one: give one of them"
    for given in given_flags(flags[PlanSettings], "schedule_file", "measured_costs"):
        yield (
            f"{given} belongs to one treatment of the vocabulary, and {AUTO_FLAG} compares "
            "several: name one"
        )
    if len(left := treatments_of(flags)) == 1:
        others = ", ".join(given_flags(flags[StageSettings], *ACCOUNTS))
        yield f"{AUTO_FLAG} has nothing to compare with {left[0]} beside {others}: leave that out"


@notes
def _auto_treatment_note(flags: Flags) -> Iterator[str]:
    if compares_treatments(flags) and (others := distributions(flags)):
        yield (f"{AUTO_FLAG} does not compare redis: {others[0]} says how many layers a stage has")


@refuses
def _costs_of_one_schedule(flags: Flags) -> Iterator[str]:
    costs, schedule = flags[PlanSettings].measured_costs, schedule_of(flags)
    if TRAITS[schedule].compares and costs is not None:
        yield (
            f"--measured-costs {costs} are those of one schedule's stages, and "
            f"--pipeline-schedule {schedule} compares several: name one, or measure in this run "
            "with --profile-schedule-start and --replan"
        )


@refuses
def _file_of_schedule(flags: Flags) -> Iterator[str]:
    schedule = schedule_of(flags)
    if schedule in FILE_SCHEDULES and flags[PlanSettings].schedule_file is None:
        yield (
            f"--pipeline-schedule {schedule}: which one? Give --schedule-file FILE; "
            "tools/simulate.py --save-plan writes such files"
        )


@refuses
def _limit_of_schedule(flags: Flags) -> Iterator[str]:
    schedule, planning = schedule_of(flags), flags[PlanSettings]
    if TRAITS[schedule].needs_memory_limit and not planning.is_limited:
        yield (
            f"--pipeline-schedule {schedule} fills the memory it is given: add "
            f"{PENDING_FLAG} MICROBATCHES, {PERCENT_FLAG} PERCENT, or {GIB_FLAG} GIB"
        )


@refuses
def _two_limits(flags: Flags) -> Iterator[str]:
    """Refuse a limit in GiB beside one in microbatches; the fork notes one in percent there."""
    planning = flags[PlanSettings]
    if planning.memory_limit is not None:
        for given in given_flags(planning, "zero_bubble_memory_limit_gib"):
            yield (
                f"{given} does not go with {PENDING_FLAG} {planning.memory_limit:g}: give one of "
                f"them, or {PENDING_FLAG} auto"
            )


@notes
def _idle_limit_by_memory(flags: Flags) -> Iterator[str]:
    """Note a limit by memory beside one in microbatches, or where no plan depends on it."""
    planning = flags[PlanSettings]
    percent = given_flags(planning, "zero_bubble_adaptive_memory_limit_percentile")
    if planning.memory_limit is not None:
        for given in percent:
            yield (
                f"{given} changes nothing: {PENDING_FLAG} {planning.memory_limit:g} gives the "
                "limit in microbatches"
            )
    elif planning.is_limited_by_memory and not uses_limit(flags):
        pending = given_flags(planning, "zero_bubble_max_pending_backward")
        gib = given_flags(planning, "zero_bubble_memory_limit_gib")
        for given in (*pending, *percent, *gib):
            yield (
                f"{given} changes nothing: {schedule_of(flags)} holds as much as its order of "
                "passes needs; zb-auto, zb-v, auto and others fill memory"
            )


@refuses
def _options_of_schedule(flags: Flags) -> Iterator[str]:
    """Refuse options of blocks that the schedule does not take.

    Where nothing asks for another schedule than the default, they have no effect, as in Megatron.
    """
    schedule = schedule_of(flags)
    for given in _useless_options(flags) if _asks_for_schedule(flags) else ():
        yield (
            f"{given.written}: {schedule} has no use for it, because {given.unused}: leave it out, "
            f"or take --pipeline-schedule {given.takers}"
        )


@notes
def _idle_options(flags: Flags) -> Iterator[str]:
    """Note options that the default schedule does not take, if nothing asks for another one."""
    schedule = schedule_of(flags)
    for given in () if _asks_for_schedule(flags) else _useless_options(flags):
        yield (
            f"{given.written} changes nothing: {schedule} has no use for it, because {given.unused}"
        )


@refuses
def _faulty_options(flags: Flags) -> Iterator[str]:
    """Refuse options of blocks with which the schedule has no block on these ranks."""
    useless, ranks = [*_useless_options(flags)], flags[PipelineRankSettings].size
    for given in flags[BlockOptions].given:
        if given not in useless and (fault := given.fault(ranks)):
            yield (
                f"{given.written} with --pipeline-model-parallel-size {ranks}: {fault}, or leave "
                "it out"
            )


def _useless_options(flags: Flags) -> Iterator[GivenOption]:
    """Yield the options of blocks that the schedule does not take; ``auto`` takes all."""
    traits = TRAITS[schedule_of(flags)]
    for given in flags[BlockOptions].given:
        if not given.is_taken_by(traits) and not traits.compares:
            yield given


def _asks_for_schedule(flags: Flags) -> bool:
    """Return whether a flag names a schedule, or a layout of the stages implies one."""
    return any(schedules_asked(flags)) or schedule_of(flags) != DEFAULT_SCHEDULE


@notes
def _idle_groups(flags: Flags) -> Iterator[str]:
    """Note groups of microbatches that are as they would be without the flag."""
    size = flags[BlockOptions].microbatch_group_size_per_virtual_pipeline_stage
    ranks = flags[PipelineRankSettings].size
    for given in given_flags(flags[BlockOptions], _GROUP) if _asks_for_schedule(flags) else ():
        if size == ranks:
            yield f"{given} changes nothing: groups are as large as the pipeline anyway"
        elif 0 < (units := _units(flags)) <= ranks:
            yield f"{given} changes nothing: an iteration has {units} microbatches or slices"


def _units(flags: Flags) -> int:
    """Return the slices of all microbatches of a replica in an iteration."""
    return batch_share(flags).microbatches * flags[SliceSettings].num_seq_splits


@refuses
def _plan_file(flags: Flags) -> Iterator[str]:
    """Compare a plan's file with the flags; every difference has a line of its own."""
    file = flags[PlanSettings].schedule_file
    if file is None:
        return
    try:
        plan = load_any_plan(file)
    except ValueError as error:
        yield f"--schedule-file: {error}"
        return
    share, slices = batch_share(flags), flags[SliceSettings].num_seq_splits
    ranks = flags[PipelineRankSettings].size
    for misfit in misfits(plan, ranks, share.microbatches, treatment_of(flags), slices):
        way_out = {
            "ranks": f"--pipeline-model-parallel-size {plan.ranks}",
            "microbatches": f"--global-batch-size {plan.microbatches * share.at_once}",
            "slices": f"--num-seq-splits {plan.slices}",
            "vocabulary": f"--vocab-parallel {treatments_of_plan(plan)[0]}",
        }[misfit.field]
        yield f"--schedule-file {file} {misfit.fault}: give {way_out}, or another file"
    yield from _layers_of_plan(plan, flags)


def _layers_of_plan(plan: Plan, flags: Flags) -> Iterator[str]:
    """Refuse layers that do not fit the stages of a plan's file.

    Layers that depend on costs are not judged here.
    """
    layers = result_of(lambda: distribution_of(flags, treatment_of(flags)))
    if layers is not None and not layers.needs_times:
        spread = partial(distribute, layers, flags[ShapeSettings].num_layers, len(plan.stages))
        yield from faults_of(spread)
