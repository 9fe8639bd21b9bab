"""The schedule, the treatment of the vocabulary and the chunks that the flags ask for.

Several flags can ask for the same thing, under names of Megatron, of the zero-bubble fork (Sea AI
Lab's version of Megatron) or of this project.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from megatron.flags.declare import option_of
from megatron.flags.groups import Flags
from megatron.model.settings import ShapeSettings
from megatron.model.stage_settings import StageSettings
from megatron.parallel.settings import PipelineRankSettings
from megatron.run.dimension import Auto, Dimension
from megatron.run.edit import Choice, set_to
from megatron.run.pairs import pairs_of
from megatron.run.pipeline_layout import PipelineLayout, readable_layout
from megatron.schedules.catalogue import CHUNKED_SCHEDULES, SCHEDULES, TRAITS
from megatron.schedules.settings import DEFAULT_SCHEDULE, PlanSettings, ScheduleSettings
from megatron.schedules.treatment_settings import (
    AUTO_TREATMENT,
    DEFAULT_TREATMENT,
    TreatmentSettings,
)
from megatron.schedules.treatments import TREATMENTS

V_SCHEDULES: Final = {"zb": "zb-v", "half": "v-half", "min": "v-min"}
"""Schedule for each value of the zero-bubble fork's --zero-bubble-v-schedule-mem-setup."""

ZERO_BUBBLE: Final = {"unlimited": "zb-1p", "limited": "zb-auto"}
"""Schedule of the zero-bubble fork's --enable-zero-bubble, without and with a memory limit."""

FILE_SCHEDULES: Final = tuple(name for name, t in TRAITS.items() if "file" in t.options)
"""The schedules that read their plan from a file."""

CHUNKS: Final = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
"""The flags that give every rank several chunks."""

LAYOUT: Final = "pipeline_model_parallel_layout"
"""The flag that lists the layers of all stages."""

ENDS: Final = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
"""The flags on the layers of the first and the last stage."""

ACCOUNTS: Final = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""The flags that count a vocabulary layer as a transformer layer of its stage."""

_VOCABULARY: Final = "--vocab-parallel"
ASKING_FOR_TREATMENTS: Final = (
    _VOCABULARY,
    "--enable-vocab-parallel",
    "--use-interlaced-schedule",
    "--enable-layer-redistribution",
)
"""The flags of which each one alone names a treatment."""

AUTO_FLAG: Final = f"{_VOCABULARY} {AUTO_TREATMENT}"
COMPARED_TREATMENTS: Final = tuple(name for name in TREATMENTS if name != "naive")
"""The treatments that ``AUTO_FLAG`` compares. It leaves out naive.

naive is slower than vocab-1, and needs as much memory.
"""


class Ask(NamedTuple):
    """A flag that asks for a schedule or a treatment.

    Attributes:
        flag: the flag with its value, as it stands on the command line.
        wishes: the names that the flag can mean. Without other flags it means the first.
    """

    flag: str
    wishes: tuple[str, ...]


def schedule_of(flags: Flags) -> str:
    """Return the schedule that the flags ask for."""
    whole = len(stages_of_layout(flags)) <= flags[PipelineRankSettings].size
    return _agreed(schedules_asked(flags), DEFAULT_SCHEDULE if whole else CHUNKED_SCHEDULES[0])


def treatment_of(flags: Flags) -> str:
    """Return the treatment of the vocabulary that the flags ask for."""
    return _agreed(treatments_asked(flags), DEFAULT_TREATMENT)


def compares_treatments(flags: Flags) -> bool:
    """Whether the flags let the plan choose the treatment of the vocabulary."""
    return flags[TreatmentSettings].vocab_parallel == AUTO_TREATMENT


def treatments_of(flags: Flags) -> tuple[str, ...]:
    """Return the treatments that the plan may choose from; only one if the flags name it.

    Flags that say how many layers a stage has exclude redis. Flags that count a vocabulary layer as
    a transformer layer of its stage exclude the treatments that split it over all ranks.
    """
    if not compares_treatments(flags):
        return (treatment_of(flags),)
    whole = bool(given_flags(flags[StageSettings], *ACCOUNTS))
    fixed = bool(distributions(flags))
    known = (TREATMENTS[name] for name in COMPARED_TREATMENTS)
    return tuple(
        own.name
        for own in known
        if not (own.redistributed and fixed) and not (own.is_sharded and whole)
    )


def _choices(flags: Flags) -> list[Choice]:
    return [(set_to(_VOCABULARY, name),) for name in treatments_of(flags)]


VOCABULARY: Final = Dimension(
    "vocabulary",
    "order",
    (_VOCABULARY,),
    _choices,
    closing=ASKING_FOR_TREATMENTS,
    auto=Auto(AUTO_FLAG, compares_treatments),
    by_flops=True,
)
"""The treatment of the vocabulary as a dimension that the plan chooses in."""


def distributions(flags: Flags) -> list[str]:
    """Return all given flags that decide the layers of the stages, the flags for redis first."""
    listed = flags[StageSettings].layer_distribution != "redis"
    names = (*(["layer_distribution"] if listed else []), LAYOUT, *ENDS, *ACCOUNTS)
    return [*redistributing(flags), *given_flags(flags[StageSettings], *names)]


def redistributing(flags: Flags) -> list[str]:
    """Return all given flags that ask for redis, which moves layers away from the vocabulary."""
    asks = (ask for ask in treatments_asked(flags) if ask.flag != AUTO_FLAG)
    return [ask.flag for ask in asks if TREATMENTS[ask.wishes[0]].redistributed]


def _agreed(asks: Iterable[Ask], otherwise: str) -> str:
    """Return the first name that all flags can mean, else the first flag's first name.

    Without flags the name is ``otherwise``.
    """
    wishes = [ask.wishes for ask in asks]
    if not wishes:
        return otherwise
    return next((name for name in wishes[0] if all(name in w for w in wishes)), wishes[0][0])


def schedules_asked(flags: Flags) -> Iterator[Ask]:
    """Yield the flags that ask for a schedule."""
    pipeline = flags[ScheduleSettings]
    if pipeline.zero_bubble_v_schedule:
        setup = pipeline.zero_bubble_v_schedule_mem_setup
        name = "--zero-bubble-v-schedule"
        if setup is not None:
            name += f" {name}-mem-setup {setup}"
        yield Ask(name, (V_SCHEDULES[setup or "zb"],))
    elif pipeline.enable_zero_bubble:
        limited = flags[PlanSettings].is_limited
        yield Ask("--enable-zero-bubble", (ZERO_BUBBLE["limited" if limited else "unlimited"],))
    for given in () if leaves_one_chunk(flags) else given_flags(pipeline, *CHUNKS):
        yield Ask(given, CHUNKED_SCHEDULES)
    for given in given_flags(flags[PlanSettings], "schedule_file"):
        yield Ask(given, FILE_SCHEDULES)
    if (named := pipeline.pipeline_schedule) is not None:
        yield Ask(f"--pipeline-schedule {named}", (named,))


def uses_limit(flags: Flags) -> bool:
    """Whether a limit of memory can change the plan.

    It can where the schedule fills memory, where schedules are compared, and where pairs may take
    more microbatches.
    """
    name, pairs = schedule_of(flags), pairs_of(flags)
    fills = name in SCHEDULES and SCHEDULES[name].fills
    traits = TRAITS[name]
    return fills or traits.needs_memory_limit or traits.compares or pairs.joins


def treatments_asked(flags: Flags) -> Iterator[Ask]:
    """Yield the flags that ask for a treatment of the vocabulary."""
    treatment = flags[TreatmentSettings]
    if treatment.use_interlaced_schedule:
        yield Ask("--use-interlaced-schedule", ("interlaced",))
    elif treatment.enable_vocab_parallel and treatment.disable_backward_fusion:
        yield Ask("--enable-vocab-parallel --disable-backward-fusion", ("vocab-1",))
    elif treatment.enable_vocab_parallel:
        yield Ask("--enable-vocab-parallel", ("vocab-2",))
    if treatment.enable_layer_redistribution:
        yield Ask("--enable-layer-redistribution", ("redis",))
    if flags[StageSettings].layer_distribution == "redis":
        yield Ask("--layer-distribution redis", ("redis",))
    if (name := treatment.vocab_parallel) is not None:
        compared = name == AUTO_TREATMENT
        yield Ask(f"--vocab-parallel {name}", COMPARED_TREATMENTS if compared else (name,))


def chunks_of(flags: Flags) -> int | None:
    """Return the number of chunks of a rank.

    ``None``: no flag gives the number. 0: by the flags it would not be a whole number.
    """
    pipeline, ranks = flags[ScheduleSettings], flags[PipelineRankSettings].size
    if (layers := pipeline.num_layers_per_virtual_pipeline_stage) is not None:
        chunks, rest = divmod(flags[ShapeSettings].num_layers, layers * ranks)
    elif (given := pipeline.num_virtual_stages_per_pipeline_rank) is not None:
        return given
    elif layout := stages_of_layout(flags):
        chunks, rest = divmod(len(layout), ranks)
    else:
        return None
    return 0 if rest else chunks


def leaves_one_chunk(flags: Flags) -> bool:
    """Return whether flags on chunks give every rank one chunk, which is as good as no such flag.

    This is so in Megatron too.
    """
    named = flags[ScheduleSettings].pipeline_schedule in CHUNKED_SCHEDULES
    return not named and chunks_of(flags) == 1


def layout_of(flags: Flags) -> PipelineLayout | None:
    """Return the given layout; ``None``: no layout is given, or it has a fault."""
    return readable_layout(flags[StageSettings].pipeline_model_parallel_layout)


def stages_of_layout(flags: Flags) -> tuple[int, ...]:
    """Return the layers of a layout's stages; empty: no layout is given, or it has a fault."""
    layout = layout_of(flags)
    return () if layout is None else layout.layers


def given_flags(flags: object, *names: str) -> list[str]:
    """Return the named flags that are given, as they stand on the command line."""
    shown = []
    for name in names:
        value = getattr(flags, name)
        if value is not None and value is not False:
            shown.append(option_of(name) + ("" if value is True else f" {value}"))
    return shown
