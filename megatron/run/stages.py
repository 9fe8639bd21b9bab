"""How the layers are spread over the stages: chunks, a layout, the first and the last stage.

Several flags do this, each in its own way. Flags that contradict each other are refused.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from megatron.flags.groups import Flags, Rule, faults_of
from megatron.flags.readable import nearest
from megatron.flags.rules import notes, refuses
from megatron.model.distribution import LayerDistribution, distribute
from megatron.model.settings import FurtherTokensSettings, ShapeSettings
from megatron.model.stage_settings import StageSettings
from megatron.parallel.settings import PipelineRankSettings
from megatron.run.experts import mixes_kinds
from megatron.run.pipeline_layout import LAYOUT_FLAG, layout_faults
from megatron.run.schedule import (
    ACCOUNTS,
    CHUNKS,
    ENDS,
    LAYOUT,
    chunks_of,
    distributions,
    given_flags,
    layout_of,
    leaves_one_chunk,
    redistributing,
    schedule_of,
    treatment_of,
)
from megatron.schedules.catalogue import CHUNKED_SCHEDULES, TRAITS
from megatron.schedules.counted import counted
from megatron.schedules.settings import DEFAULT_SCHEDULE, ScheduleSettings
from megatron.schedules.treatments import TREATMENTS

_NAMED: Final = ("even", "remainder", "cost", "redis")
"""The distributions that have a name."""

_LONGEST_COUNT: Final = 8
"""Characters of the longest number of layers; a longer number is mistyped."""


def distribution_of(flags: Flags, treatment: str) -> LayerDistribution:
    """Return how the layers are spread over the stages under a treatment of the vocabulary."""
    pipeline = flags[StageSettings]
    text = pipeline.layer_distribution
    if TREATMENTS[treatment].redistributed:
        return LayerDistribution("redis", last=pipeline.final_stage_num_layers)
    if layout := layout_of(flags):
        written = f"{LAYOUT_FLAG} {pipeline.pipeline_model_parallel_layout}"
        return LayerDistribution(
            "explicit", counts=layout.layers, written=written, further_stage=layout.further_stage
        )
    if text == "remainder":
        return LayerDistribution("remainder")
    if text == "cost" or costs_decide(flags):
        return LayerDistribution("cost")
    if text not in (None, "even", "redis"):  # redis beside another treatment is refused
        return LayerDistribution("explicit", counts=tuple(map(int, text.split(","))))
    return LayerDistribution(
        first=pipeline.decoder_first_pipeline_num_layers,
        last=pipeline.decoder_last_pipeline_num_layers,
        embedding_counts=pipeline.account_for_embedding_in_pipeline_split,
        loss_counts=pipeline.account_for_loss_in_pipeline_split,
    )


def costs_decide(flags: Flags) -> bool:
    """Whether layers are spread by their cost, because no flag spreads them and they differ.

    Layers differ if some have experts and others have none.
    """
    chunks = given_flags(flags[ScheduleSettings], "num_layers_per_virtual_pipeline_stage")
    return not chunks and not distributions(flags) and mixes_kinds(flags)


@notes
def _whole_note(flags: Flags) -> Iterator[str]:
    if leaves_one_chunk(flags):
        for given in given_flags(flags[ScheduleSettings], *reversed(CHUNKS)):
            yield f"{given} changes nothing: it leaves every rank one stage"


@refuses
def _chunk_rule(flags: Flags) -> Iterator[str]:
    chunks = chunks_of(flags)
    for given in given_flags(flags[ScheduleSettings], *reversed(CHUNKS))[:1]:
        if chunks == 0:
            yield (
                f"{given} does not divide the --num-layers {flags[ShapeSettings].num_layers} of "
                f"{counted(flags[PipelineRankSettings].size, 'rank')}: change one "
                "of them, or give --num-virtual-stages-per-pipeline-rank and --layer-distribution"
            )
        if chunks == 1 and not leaves_one_chunk(flags):
            yield (
                f"{given} leaves every rank one stage, which is {DEFAULT_SCHEDULE}, not "
                f"{schedule_of(flags)}: leave it out, or take more stages"
            )
        if chunks and chunks > 1 and (fault := TRAITS[schedule_of(flags)].chunks_fault(chunks)):
            yield f"{given}: {schedule_of(flags)} {fault}"


@refuses
def _chunk_layers_rule(flags: Flags) -> Iterator[str]:
    for given in given_flags(flags[ScheduleSettings], "num_layers_per_virtual_pipeline_stage"):
        yield from _beside(given, distributions(flags))


@refuses
def _layout_rule(flags: Flags) -> Iterator[str]:
    pipeline = flags[StageSettings]
    if (text := pipeline.pipeline_model_parallel_layout) is not None:
        yield from layout_faults(
            text,
            num_layers=flags[ShapeSettings].num_layers,
            depths=flags[FurtherTokensSettings].mtp_num_layers,
            ranks=flags[PipelineRankSettings].size,
            chunks=flags[ScheduleSettings].num_virtual_stages_per_pipeline_rank,
            schedule=schedule_of(flags),
        )


@notes
def _cost_note(flags: Flags) -> Iterator[str]:
    if costs_decide(flags) and flags[PipelineRankSettings].size > 1:
        yield (
            "some layers have experts and others none, so stages get layers of equal cost, not "
            "equally many; --layer-distribution even changes that"
        )


@notes
def _layout_note(flags: Flags) -> Iterator[str]:
    treatment = treatment_of(flags)
    if layout_of(flags) and TREATMENTS[treatment].is_sharded:
        yield (
            f"{LAYOUT_FLAG} {flags[StageSettings].pipeline_model_parallel_layout} says where "
            f"layers (t and m) are and nothing else: {treatment} splits the embedding (E) and the "
            "output layer with its loss (L) over all ranks"
        )


@refuses
def _end_rule(flags: Flags) -> Iterator[str]:
    """Refuse flags on the layers of the first or the last stage if a rank has several stages."""
    schedule = schedule_of(flags)
    if schedule in CHUNKED_SCHEDULES:
        for end in given_flags(flags[StageSettings], *ENDS):
            yield (
                f"{end} is about one of several stages of a rank with --pipeline-schedule "
                f"{schedule}: give the layers of every stage with --layer-distribution N,N,..."
            )


@refuses
def _last_stage_rule(flags: Flags) -> Iterator[str]:
    """Refuse a number of layers of the last stage that the model cannot give it, with redis."""
    last, layers = flags[StageSettings].final_stage_num_layers, flags[ShapeSettings].num_layers
    if last is None or not TREATMENTS[treatment_of(flags)].redistributed:
        return
    chunks = chunks_of(flags) or TRAITS[schedule_of(flags)].chunks
    if flags[PipelineRankSettings].size * chunks == 1 and last != layers:
        yield (
            f"--final-stage-num-layers {last} is not --num-layers {layers}, and there is one "
            "stage: leave it out"
        )
    elif last > layers:
        yield (
            f"--final-stage-num-layers {last} is more than --num-layers {layers}: give 0 to "
            f"{layers}"
        )


@refuses
def _account_rule(flags: Flags) -> Iterator[str]:
    """Refuse to count a vocabulary layer among a stage's layers if it is split over all ranks."""
    treatment = treatment_of(flags)
    if TREATMENTS[treatment].is_sharded:
        for account in given_flags(flags[StageSettings], *ACCOUNTS):
            yield (
                f"{account} counts a vocabulary layer as a transformer layer of its stage, but "
                f"{treatment} spreads it over all ranks: leave it out"
            )


@refuses
def _distribution_rule(flags: Flags) -> Iterator[str]:
    text = flags[StageSettings].layer_distribution
    redistributed = redistributing(flags)
    if redistributed:
        others = [flag for flag in distributions(flags) if flag not in redistributed]
        yield from _beside(redistributed[0], others)
    elif layout := given_flags(flags[StageSettings], LAYOUT):
        yield from _beside(layout[0], [flag for flag in distributions(flags) if flag != layout[0]])
    elif text not in (None, "even"):
        yield from _beside(
            f"--layer-distribution {text}", given_flags(flags[StageSettings], *ENDS, *ACCOUNTS)
        )


@refuses
def _distribution_words(flags: Flags) -> Iterator[str]:
    text = flags[StageSettings].layer_distribution
    words = [] if text in (None, *_NAMED) else text.split(",")
    if not all(word.strip().isdecimal() and len(word) <= _LONGEST_COUNT for word in words):
        near = nearest(text or "", _NAMED) if len(words) == 1 else ""
        yield (
            f"--layer-distribution {text}: {near}give {', '.join(_NAMED)}, "
            "or a number of layers for every stage, as in 3,4,4,1"
        )


@refuses
def _spread_rule(flags: Flags) -> Iterator[str]:
    """Refuse layers that do not fit the stages, if the flags on stages have no other mistake."""
    traits = TRAITS[schedule_of(flags)]
    others = (fault for rule in _FLAG_RULES for fault in rule(flags))
    if traits.compares or "file" in traits.options or any(others):
        return
    distribution = distribution_of(flags, treatment_of(flags))
    if distribution.needs_times:
        return
    chunks = chunks_of(flags) or traits.chunks
    stages = flags[PipelineRankSettings].size * chunks
    yield from faults_of(lambda: distribute(distribution, flags[ShapeSettings].num_layers, stages))


def _beside(flag: str, others: Sequence[str]) -> Iterator[str]:
    for other in others:
        yield f"{flag} and {other} both say how many layers a stage has: give one of them"


_FLAG_RULES: Final[tuple[Rule, ...]] = (
    _chunk_rule,
    _chunk_layers_rule,
    _layout_rule,
    _end_rule,
    _last_stage_rule,
    _account_rule,
    _distribution_rule,
    _distribution_words,
)
"""The rules about single flags on stages, and about flags that contradict each other."""
