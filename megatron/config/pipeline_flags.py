"""The pipeline that the flags ask for: schedule, treatment of the vocabulary, layers of the stages.

Several flags can ask for the same thing, in the words of Megatron, of the zero-bubble fork or of
this project. Given flags that ask for different things are refused together.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from megatron.config.declare import option_of
from megatron.config.flags import (
    DEFAULT_SCHEDULE,
    DEFAULT_TREATMENT,
    Flags,
    ParallelFlags,
    PipelineFlags,
)
from megatron.config.pipeline_layout import LAYOUT_FLAG, layout_faults, readable_layout
from megatron.model.distribution import LayerDistribution
from megatron.schedules.catalogue import CHUNKED_SCHEDULES, TRAITS
from megatron.schedules.counted import counted
from megatron.schedules.request import MOST_FORWARDS
from megatron.schedules.treatments import TREATMENTS

V_SCHEDULES: Final = {"zb": "zb-v", "half": "v-half", "min": "v-min"}
"""Schedule for each value of the zero-bubble fork's --zero-bubble-v-schedule-mem-setup."""

ZERO_BUBBLE: Final = {"unlimited": "zb-1p", "limited": "zb-auto"}
"""Schedule of the fork's --enable-zero-bubble, without and with a memory limit."""

_FILE_SCHEDULES: Final = tuple(name for name, t in TRAITS.items() if "file" in t.options)


_LONGEST_COUNT: Final = 8
"""Characters of a number of layers."""


class Pipeline(NamedTuple):
    """The pipeline that the flags ask for.

    Attributes:
        schedule: a name of ``TRAINABLE_SCHEDULES``.
        treatment: treatment of the vocabulary.
        virtual_stages: chunks of a rank, for a schedule of ``CHUNKED_SCHEDULES``.
        layers: how the transformer layers are spread over the stages.
    """

    schedule: str
    treatment: str
    virtual_stages: int | None
    layers: LayerDistribution


class _Ask(NamedTuple):
    """A flag with its value, and the names that it can mean; alone it means the first."""

    flag: str
    wishes: tuple[str, ...]


def settle_pipeline(flags: Flags) -> Pipeline:
    """Return the pipeline that ``flags`` ask for; they must break no rule of ``PIPELINE_RULES``."""
    treatment = treatment_of(flags)
    chunks = None if _whole(flags) else _chunks(flags)
    return Pipeline(_schedule(flags), treatment, chunks, _distribution(flags, treatment))


def size_faults(flags: Flags, replicas: int) -> Iterator[str]:
    """Refuse numbers of which no plan can be made, before anybody waits for it.

    Args:
        flags: as given.
        replicas: of the model.

    Yields:
        A line that begins with the flag of the largest number.
    """
    train, ranks = flags.train, flags.parallel.pipeline_model_parallel_size
    of_a_microbatch = train.micro_batch_size * replicas
    microbatches = (train.global_batch_size or of_a_microbatch) // of_a_microbatch
    chunks = _chunks(flags) or TRAITS[_schedule(flags)].chunks
    forwards = ranks * chunks * microbatches
    if forwards <= MOST_FORWARDS:
        return
    asked = [*_given(flags.pipeline, *_CHUNKS, _LAYOUT), "--pipeline-schedule"][0]
    worst = max(
        (microbatches, f"--global-batch-size {train.global_batch_size}"),
        (chunks, asked),
        (ranks, f"--pipeline-model-parallel-size {ranks}"),
    )[1]
    yield (
        f"{worst} is too much: {microbatches:,} microbatches x {chunks:,} chunk(s) x {ranks:,} "
        f"rank(s) are {forwards:,} forward passes an iteration, and a plan has at most "
        f"{MOST_FORWARDS:,}: lower it, or raise --micro-batch-size"
    )


def _schedule(flags: Flags) -> str:
    whole = len(_layout(flags)) <= flags.parallel.pipeline_model_parallel_size
    return _agreed(_schedules(flags), DEFAULT_SCHEDULE if whole else CHUNKED_SCHEDULES[0])


def treatment_of(flags: Flags) -> str:
    """Return the treatment of the vocabulary that the flags ask for."""
    return _agreed(_treatments(flags), DEFAULT_TREATMENT)


def _agreed(asks: Iterable[_Ask], otherwise: str) -> str:
    """Return the one name that all flags can mean; if there is none, the name of the first flag."""
    wishes = [ask.wishes for ask in asks]
    if not wishes:
        return otherwise
    return next((name for name in wishes[0] if all(name in w for w in wishes)), wishes[0][0])


def _schedules(flags: Flags) -> Iterator[_Ask]:
    pipeline = flags.pipeline
    if pipeline.zero_bubble_v_schedule:
        setup = pipeline.zero_bubble_v_schedule_mem_setup
        name = "--zero-bubble-v-schedule"
        if setup is not None:
            name += f" {name}-mem-setup {setup}"
        yield _Ask(name, (V_SCHEDULES[setup or "zb"],))
    elif pipeline.enable_zero_bubble:
        unlimited = pipeline.zero_bubble_max_pending_backward is None
        yield _Ask("--enable-zero-bubble", (ZERO_BUBBLE["unlimited" if unlimited else "limited"],))
    for given in () if _whole(flags) else _given(pipeline, *_CHUNKS):
        yield _Ask(given, CHUNKED_SCHEDULES)
    for given in _given(pipeline, "schedule_file"):
        yield _Ask(given, _FILE_SCHEDULES)
    if (named := pipeline.pipeline_schedule) is not None:
        yield _Ask(f"--pipeline-schedule {named}", (named,))


def _treatments(flags: Flags) -> Iterator[_Ask]:
    return chain(_split_vocabulary(flags.parallel), _redistributed(flags.pipeline), _named(flags))


def _split_vocabulary(flags: ParallelFlags) -> Iterator[_Ask]:
    if flags.use_interlaced_schedule:
        yield _Ask("--use-interlaced-schedule", ("interlaced",))
    elif flags.enable_vocab_parallel and flags.disable_backward_fusion:
        yield _Ask("--enable-vocab-parallel --disable-backward-fusion", ("vocab-1",))
    elif flags.enable_vocab_parallel:
        yield _Ask("--enable-vocab-parallel", ("vocab-2",))


def _redistributed(flags: PipelineFlags) -> Iterator[_Ask]:
    if flags.enable_layer_redistribution:
        yield _Ask("--enable-layer-redistribution", ("redis",))
    if flags.layer_distribution == "redis":
        yield _Ask("--layer-distribution redis", ("redis",))


def _named(flags: Flags) -> Iterator[_Ask]:
    if (name := flags.parallel.vocab_parallel) is not None:
        yield _Ask(f"--vocab-parallel {name}", (name,))


def _one_schedule(flags: Flags) -> Iterator[str]:
    yield from _contradictions(_schedules(flags))


def _one_treatment(flags: Flags) -> Iterator[str]:
    yield from _contradictions(_treatments(flags))


def _contradictions(asks: Iterable[_Ask]) -> Iterator[str]:
    given = list(asks)
    for other in given[1:]:
        if not set(other.wishes) & set(given[0].wishes):
            yield (
                f"{given[0].flag} asks for {given[0].wishes[0]} here and {other.flag} for "
                f"{other.wishes[0]}: give one of them"
            )


def _costs_of_one_schedule(flags: Flags) -> Iterator[str]:
    costs, schedule = flags.pipeline.measured_costs, _schedule(flags)
    if TRAITS[schedule].compares and costs is not None:
        yield (
            f"--measured-costs {costs} are those of one schedule's stages, and "
            f"--pipeline-schedule {schedule} compares several: name one, or measure in this run "
            "with --profile-schedule-start and --replan"
        )


def _file_of_schedule(flags: Flags) -> Iterator[str]:
    schedule = _schedule(flags)
    if schedule in _FILE_SCHEDULES and flags.pipeline.schedule_file is None:
        yield (
            f"--pipeline-schedule {schedule}: which one? Give --schedule-file FILE; "
            "tools/simulate.py --save-plan writes such files"
        )


def _limit_of_schedule(flags: Flags) -> Iterator[str]:
    schedule, limit = _schedule(flags), flags.pipeline.zero_bubble_max_pending_backward
    if TRAITS[schedule].needs_memory_limit and limit is None:
        yield (
            f"--pipeline-schedule {schedule} fills the memory it is given: add "
            "--zero-bubble-max-pending-backward MICROBATCHES"
        )


_CHUNKS: Final = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
_LAYOUT: Final = "pipeline_model_parallel_layout"
_ENDS: Final = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_ACCOUNTS: Final = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def _chunks(flags: Flags) -> int | None:
    """Return the chunks of a rank if flags give them; 0 if they make no whole number."""
    pipeline, ranks = flags.pipeline, flags.parallel.pipeline_model_parallel_size
    if (layers := pipeline.num_layers_per_virtual_pipeline_stage) is not None:
        chunks, rest = divmod(flags.model.num_layers, layers * ranks)
    elif pipeline.num_virtual_stages_per_pipeline_rank is None and (layout := _layout(flags)):
        chunks, rest = divmod(len(layout), ranks)
    else:
        return pipeline.num_virtual_stages_per_pipeline_rank
    return 0 if rest else chunks


def _whole(flags: Flags) -> bool:
    """Whether flags give every rank one chunk, which asks for no chunks, as in Megatron."""
    named = flags.pipeline.pipeline_schedule in CHUNKED_SCHEDULES
    return not named and _chunks(flags) == 1


def _whole_note(flags: Flags) -> Iterator[str]:
    if _whole(flags):
        for given in _given(flags.pipeline, *reversed(_CHUNKS)):
            yield f"{given} changes nothing: it leaves every rank one stage"


def _chunk_rule(flags: Flags) -> Iterator[str]:
    chunks = _chunks(flags)
    for given in _given(flags.pipeline, *reversed(_CHUNKS))[:1]:
        if chunks == 0:
            yield (
                f"{given} does not divide the --num-layers {flags.model.num_layers} of "
                f"{counted(flags.parallel.pipeline_model_parallel_size, 'rank')}: change one of "
                "them, or give --num-virtual-stages-per-pipeline-rank and --layer-distribution"
            )
        if chunks == 1 and not _whole(flags):
            yield (
                f"{given} leaves every rank one stage, which is {DEFAULT_SCHEDULE}, not "
                f"{_schedule(flags)}: leave it out, or take more stages"
            )
        if chunks and chunks > 1 and (fault := TRAITS[_schedule(flags)].chunks_fault(chunks)):
            yield f"{given}: {_schedule(flags)} {fault}"


def _chunk_layers_rule(flags: Flags) -> Iterator[str]:
    for given in _given(flags.pipeline, "num_layers_per_virtual_pipeline_stage"):
        yield from _beside(given, _distributions(flags))


def _layout(flags: Flags) -> tuple[int, ...]:
    """Return the layers of a layout's stages; none if it is not given or cannot be read."""
    return readable_layout(flags.pipeline.pipeline_model_parallel_layout)


def _layout_rule(flags: Flags) -> Iterator[str]:
    pipeline = flags.pipeline
    if (text := pipeline.pipeline_model_parallel_layout) is not None:
        yield from layout_faults(
            text,
            num_layers=flags.model.num_layers,
            ranks=flags.parallel.pipeline_model_parallel_size,
            chunks=pipeline.num_virtual_stages_per_pipeline_rank,
            schedule=_schedule(flags),
        )


def _layout_note(flags: Flags) -> Iterator[str]:
    treatment = treatment_of(flags)
    if _layout(flags) and TREATMENTS[treatment].is_sharded:
        yield (
            f"{LAYOUT_FLAG} {flags.pipeline.pipeline_model_parallel_layout} says where the "
            f"transformer layers are and nothing else: {treatment} splits the embedding (E) and "
            "the output layer with its loss (L) over all ranks"
        )


def _end_rule(flags: Flags) -> Iterator[str]:
    """Refuse flags on the layers of the first or the last stage where they cannot apply."""
    schedule = _schedule(flags)
    if schedule in CHUNKED_SCHEDULES:
        for end in _given(flags.pipeline, *_ENDS):
            yield (
                f"{end} is about one of several stages of a rank with --pipeline-schedule "
                f"{schedule}: give the layers of every stage with --layer-distribution N,N,..."
            )


def _last_stage_rule(flags: Flags) -> Iterator[str]:
    """Refuse more layers of the last stage than there are, where its layers may be chosen."""
    last, layers = flags.pipeline.final_stage_num_layers, flags.model.num_layers
    if last is None or not TREATMENTS[treatment_of(flags)].redistributed:
        return
    chunks = _chunks(flags) or TRAITS[_schedule(flags)].chunks
    if flags.parallel.pipeline_model_parallel_size * chunks == 1 and last != layers:
        yield (
            f"--final-stage-num-layers {last} is not --num-layers {layers}, and there is one "
            "stage: leave it out"
        )
    elif last > layers:
        yield (
            f"--final-stage-num-layers {last} is more than --num-layers {layers}: give 0 to "
            f"{layers}"
        )


def _account_rule(flags: Flags) -> Iterator[str]:
    """Refuse to count a vocabulary layer as one of its stage's layers where no stage has it."""
    treatment = treatment_of(flags)
    if TREATMENTS[treatment].is_sharded:
        for account in _given(flags.pipeline, *_ACCOUNTS):
            yield (
                f"{account} counts a vocabulary layer as a transformer layer of its stage, but "
                f"{treatment} spreads it over all ranks: leave it out"
            )


def _distribution_rule(flags: Flags) -> Iterator[str]:
    text = flags.pipeline.layer_distribution
    redistributed = _redistributing(flags)
    if redistributed:
        others = [flag for flag in _distributions(flags) if flag not in redistributed]
        yield from _beside(redistributed[0], others)
    elif layout := _given(flags.pipeline, _LAYOUT):
        yield from _beside(layout[0], [flag for flag in _distributions(flags) if flag != layout[0]])
    elif text not in (None, "even"):
        yield from _beside(
            f"--layer-distribution {text}", _given(flags.pipeline, *_ENDS, *_ACCOUNTS)
        )


def _distribution_words(flags: Flags) -> Iterator[str]:
    text = flags.pipeline.layer_distribution
    words = [] if text in (None, "even", "remainder", "redis") else text.split(",")
    if not all(word.strip().isdecimal() and len(word) <= _LONGEST_COUNT for word in words):
        yield (
            f"--layer-distribution {text}: give even, remainder, redis, or a number of layers for "
            "every stage, as in 3,4,4,1"
        )


def _beside(flag: str, others: Sequence[str]) -> Iterator[str]:
    for other in others:
        yield f"{flag} and {other} both say how many layers a stage has: give one of them"


def _distributions(flags: Flags) -> list[str]:
    """Return all given flags on the layers of the stages, redistribution first."""
    listed = flags.pipeline.layer_distribution != "redis"
    names = (*(["layer_distribution"] if listed else []), _LAYOUT, *_ENDS, *_ACCOUNTS)
    return [*_redistributing(flags), *_given(flags.pipeline, *names)]


def _redistributing(flags: Flags) -> list[str]:
    return [ask.flag for ask in _treatments(flags) if TREATMENTS[ask.wishes[0]].redistributed]


def _distribution(flags: Flags, treatment: str) -> LayerDistribution:
    pipeline = flags.pipeline
    text = pipeline.layer_distribution
    if TREATMENTS[treatment].redistributed:
        return LayerDistribution("redis", last=pipeline.final_stage_num_layers)
    if layout := _layout(flags):
        written = f"{LAYOUT_FLAG} {pipeline.pipeline_model_parallel_layout}"
        return LayerDistribution("explicit", counts=layout, written=written)
    if text == "remainder":
        return LayerDistribution("remainder")
    if text is not None and text != "even":
        return LayerDistribution("explicit", counts=tuple(map(int, text.split(","))))
    return LayerDistribution(
        first=pipeline.decoder_first_pipeline_num_layers,
        last=pipeline.decoder_last_pipeline_num_layers,
        embedding_counts=pipeline.account_for_embedding_in_pipeline_split,
        loss_counts=pipeline.account_for_loss_in_pipeline_split,
    )


def _given(flags: PipelineFlags, *names: str) -> list[str]:
    """Return those of the named flags that are given, as they stand on the command line."""
    shown = []
    for name in names:
        value = getattr(flags, name)
        if value is not None and value is not False:
            shown.append(option_of(name) + ("" if value is True else f" {value}"))
    return shown


PIPELINE_NOTES: Final[tuple[Callable[[Flags], Iterator[str]], ...]] = (_whole_note, _layout_note)
"""The rules about flags of the pipeline that change nothing beside the others."""

PIPELINE_RULES: Final[tuple[Callable[[Flags], Iterator[str]], ...]] = (
    _one_schedule,
    _one_treatment,
    _costs_of_one_schedule,
    _file_of_schedule,
    _limit_of_schedule,
    _chunk_rule,
    _chunk_layers_rule,
    _layout_rule,
    _end_rule,
    _last_stage_rule,
    _account_rule,
    _distribution_rule,
    _distribution_words,
)
"""The rules about the flags of the pipeline; see ``megatron.config.rules``."""
