"""The pipeline that the flags ask for: schedule, treatment of the vocabulary, layers of the stages.

Several flags can say the same thing in Megatron's, the zero-bubble fork's and our words. Every one
given asks for something; those that ask for different things are refused together.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.config.flags import Flags, ParallelFlags, PipelineFlags
from megatron.model.distribution import LayerDistribution
from megatron.schedules.catalogue import TRAITS
from megatron.schedules.treatments import TREATMENTS

V_SCHEDULES = {"zb": "zb-v", "half": "v-half", "min": "v-min"}
"""Schedule of every --zero-bubble-v-schedule-mem-setup."""


class Pipeline(NamedTuple):
    """What the flags ask for.

    Attributes:
        schedule: a name of ``TRAINABLE_SCHEDULES``.
        treatment: of the vocabulary.
        virtual_stages: chunks of a rank, for a schedule that takes them.
        layers: how they are spread over the stages.
    """

    schedule: str
    treatment: str
    virtual_stages: int | None
    layers: LayerDistribution


class _Ask(NamedTuple):
    """A flag with its value, and what it asks for."""

    flag: str
    wish: str


def settle_pipeline(flags: Flags) -> Pipeline:
    """Return the pipeline that the flags ask for.

    Raises:
        ValueError: if two flags contradict each other, one has no effect, or a value is no good.
    """
    pipeline = flags.pipeline
    schedule = _agreed(_schedules(pipeline), "1f1b")
    _check_schedule(pipeline, schedule)
    treatment = _agreed(_treatments(flags.parallel, pipeline), "none")
    _check_fusion(flags.parallel)
    _check_ends(pipeline, schedule, treatment)
    return Pipeline(
        schedule,
        treatment,
        _virtual_stages(flags, schedule),
        _distribution(flags, treatment),
    )


def _agreed(asks: Iterator[_Ask], otherwise: str) -> str:
    """Return the one wish of all flags that are given."""
    first = next(asks, None)
    for other in asks:
        assert first is not None
        if other.wish != first.wish:
            raise ValueError(
                f"{first.flag} asks for {first.wish} here and {other.flag} for {other.wish}: give "
                "one of them"
            )
    return otherwise if first is None else first.wish


def _schedules(flags: PipelineFlags) -> Iterator[_Ask]:
    if flags.zero_bubble_v_schedule:
        setup = flags.zero_bubble_v_schedule_mem_setup
        name = "--zero-bubble-v-schedule"
        if setup is not None:
            name += f" {name}-mem-setup {setup}"
        yield _Ask(name, V_SCHEDULES[setup or "zb"])
    elif flags.enable_zero_bubble:
        limited = flags.zero_bubble_max_pending_backward is not None
        yield _Ask("--enable-zero-bubble", "zb-auto" if limited else "zb-1p")
    for name in ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"):
        if getattr(flags, name) is not None:
            named = TRAITS.get(flags.pipeline_schedule or "")
            told = named is not None and named.takes_chunks
            yield _Ask(_given(flags, name), flags.pipeline_schedule if told else "interleaved")
    if flags.schedule_file is not None:
        yield _Ask(_given(flags, "schedule_file"), "file")
    if flags.pipeline_schedule is not None:
        yield _Ask(_given(flags, "pipeline_schedule"), flags.pipeline_schedule)


def _check_schedule(flags: PipelineFlags, schedule: str) -> None:
    setup = flags.zero_bubble_v_schedule_mem_setup
    if setup is not None and not flags.zero_bubble_v_schedule:
        raise ValueError(
            f"--zero-bubble-v-schedule-mem-setup {setup} has no effect by itself: add "
            "--zero-bubble-v-schedule"
        )
    traits = TRAITS[schedule]
    if not traits.trainable:
        raise ValueError(
            f"--pipeline-schedule {schedule} searches for as long as it may, and not every rank "
            f"would find the same plan: save one with tools/simulate.py --schedule {schedule} "
            "--save-plan FILE, and train it with --schedule-file FILE"
        )
    if schedule == "auto" and flags.measured_costs is not None:
        raise ValueError(
            f"--measured-costs {flags.measured_costs} are those of one schedule's stages, and "
            "--pipeline-schedule auto compares several: name one, or measure in this run with "
            "--profile-schedule-start and --replan"
        )
    if schedule == "file" and flags.schedule_file is None:
        raise ValueError(
            "--pipeline-schedule file: which one? Give --schedule-file FILE; tools/simulate.py "
            "--save-plan writes such files"
        )
    if traits.needs_memory_limit and flags.zero_bubble_max_pending_backward is None:
        raise ValueError(
            f"--pipeline-schedule {schedule} fills the memory it is given: add "
            "--zero-bubble-max-pending-backward MICROBATCHES"
        )


def _treatments(parallel: ParallelFlags, pipeline: PipelineFlags) -> Iterator[_Ask]:
    if parallel.use_interlaced_schedule:
        yield _Ask("--use-interlaced-schedule", "interlaced")
    elif parallel.enable_vocab_parallel:
        if parallel.disable_backward_fusion:
            yield _Ask("--enable-vocab-parallel --disable-backward-fusion", "vocab-1")
        else:
            yield _Ask("--enable-vocab-parallel", "vocab-2")
    if pipeline.enable_layer_redistribution:
        yield _Ask("--enable-layer-redistribution", "redis")
    if pipeline.layer_distribution == "redis":
        yield _Ask("--layer-distribution redis", "redis")
    if parallel.vocab_parallel is not None:
        yield _Ask(f"--vocab-parallel {parallel.vocab_parallel}", parallel.vocab_parallel)


def _check_fusion(parallel: ParallelFlags) -> None:
    if not parallel.disable_backward_fusion:
        return
    if parallel.use_interlaced_schedule:
        raise ValueError(
            "--disable-backward-fusion has no effect with --use-interlaced-schedule, which has two "
            "barriers by itself: leave it out"
        )
    if not parallel.enable_vocab_parallel:
        raise ValueError(
            "--disable-backward-fusion has no effect without --enable-vocab-parallel: add that, "
            "or use --vocab-parallel vocab-1 for both"
        )


def _virtual_stages(flags: Flags, schedule: str) -> int | None:
    """Return the chunks of a rank, if ``schedule`` is told how many."""
    pipeline, ranks = flags.pipeline, flags.parallel.pipeline_model_parallel_size
    chunks = pipeline.num_virtual_stages_per_pipeline_rank
    of_chunk = pipeline.num_layers_per_virtual_pipeline_stage
    if chunks is not None and of_chunk is not None:
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {chunks} and "
            f"--num-layers-per-virtual-pipeline-stage {of_chunk} both say how many stages there "
            "are: give one of them"
        )
    given = "num_virtual_stages_per_pipeline_rank"
    if of_chunk is not None:
        given = "num_layers_per_virtual_pipeline_stage"
        _refuse_beside(_given(pipeline, given), _distributions(flags))
        layers = flags.model.num_layers
        chunks, rest = divmod(layers, ranks * of_chunk)
        if rest:
            raise ValueError(
                f"{_given(pipeline, given)} does not divide the --num-layers {layers} of {ranks} "
                "rank(s): change one of them, or give --num-virtual-stages-per-pipeline-rank and "
                "--layer-distribution"
            )
    if chunks is not None and chunks < 2:
        raise ValueError(
            f"{_given(pipeline, given)} leaves every rank one stage, which is 1f1b, not "
            f"{schedule}: leave it out, or take more stages"
        )
    fault = None if chunks is None else TRAITS[schedule].chunks_fault(chunks)
    if fault is not None:
        raise ValueError(f"{_given(pipeline, given)}: {schedule} {fault}")
    return chunks


def _check_ends(pipeline: PipelineFlags, schedule: str, treatment: str) -> None:
    """Refuse what says how many layers the first or the last stage has, where that is no help."""
    ends = _ends(pipeline)
    if ends and TRAITS[schedule].takes_chunks:
        raise ValueError(
            f"{ends[0]} is about one of several stages of a rank with --pipeline-schedule "
            f"{schedule}: give the layers of every stage with --layer-distribution N,N,..."
        )
    accounts = _accounts(pipeline)
    if accounts and ends:
        raise ValueError(
            f"{ends[0]} says how many layers that stage has, {accounts[0]} what counts as one: "
            "give one of them"
        )
    if accounts and TREATMENTS[treatment].is_sharded:
        raise ValueError(
            f"{accounts[0]} counts a vocabulary layer as a transformer layer of its stage, but "
            f"{treatment} spreads it over all ranks: leave it out"
        )


def _distribution(flags: Flags, treatment: str) -> LayerDistribution:
    pipeline = flags.pipeline
    text, last = pipeline.layer_distribution, pipeline.final_stage_num_layers
    if TREATMENTS[treatment].redistributed:
        by, *others = _distributions(flags)
        _refuse_beside(by, [other for other in others if other not in _redistributed_by(flags)])
        return LayerDistribution("redis", last=last)
    if last is not None:
        raise ValueError(
            f"--final-stage-num-layers {last} has no effect by itself: add "
            "--enable-layer-redistribution"
        )
    if text in (None, "even"):
        return LayerDistribution(
            "even",
            first=pipeline.decoder_first_pipeline_num_layers,
            last=pipeline.decoder_last_pipeline_num_layers,
            embedding_counts=pipeline.account_for_embedding_in_pipeline_split,
            loss_counts=pipeline.account_for_loss_in_pipeline_split,
        )
    _refuse_beside(_given(pipeline, "layer_distribution"), _ends(pipeline) + _accounts(pipeline))
    if text == "remainder":
        return LayerDistribution("remainder")
    return LayerDistribution("explicit", counts=_counts(text))


def _counts(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(
            f"--layer-distribution {text}: give even, remainder, redis, or a number of layers for "
            "every stage, as in 3,4,4,1"
        )
    return tuple(map(int, words))


def _refuse_beside(flag: str, others: Sequence[str]) -> None:
    if others:
        raise ValueError(
            f"{flag} and {others[0]} both say how many layers a stage has: give one of them"
        )


def _distributions(flags: Flags) -> list[str]:
    """All that is given of what says how many layers stages have, redistribution first."""
    pipeline = flags.pipeline
    listed = pipeline.layer_distribution not in (None, "redis")
    return [
        *_redistributed_by(flags),
        *([_given(pipeline, "layer_distribution")] if listed else []),
        *_ends(pipeline),
        *_accounts(pipeline),
    ]


def _redistributed_by(flags: Flags) -> list[str]:
    asks = _treatments(flags.parallel, flags.pipeline)
    return [ask.flag for ask in asks if TREATMENTS[ask.wish].redistributed]


def _ends(flags: PipelineFlags) -> list[str]:
    names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    return [_given(flags, name) for name in names if getattr(flags, name) is not None]


def _accounts(flags: PipelineFlags) -> list[str]:
    names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return [_given(flags, name) for name in names if getattr(flags, name)]


def _given(flags: PipelineFlags, name: str) -> str:
    """A flag as it stands on the command line."""
    value = getattr(flags, name)
    return "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
