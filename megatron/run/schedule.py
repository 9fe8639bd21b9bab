"""Flags of the pipeline: they ask for a schedule, a treatment of the vocabulary, and chunks.

Several flags can ask for the same thing, under names of Megatron, of the zero-bubble fork (Sea AI
Lab's version of Megatron) or of this project.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from megatron.flags.declare import flag, option_of
from megatron.flags.groups import Flags
from megatron.flags.ranges import DEPTH, DEPTH_OR_NONE
from megatron.model.settings import ShapeSettings
from megatron.parallel.settings import PipelineRankSettings
from megatron.run.dimension import Dimension, NamedChoice
from megatron.run.edit import set_to
from megatron.run.pipeline_layout import PipelineLayout, readable_layout
from megatron.run.treatment import AUTO_TREATMENT, DEFAULT_TREATMENT, TreatmentFlags
from megatron.schedules.catalogue import CHUNKED_SCHEDULES, TRAINABLE_SCHEDULES, TRAITS
from megatron.schedules.settings import PlanSettings
from megatron.schedules.treatments import TREATMENTS

DEFAULT_SCHEDULE: Final = "1f1b"
_ACCOUNTS: Final = (
    "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split"
)

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

AUTO_FLAG: Final = f"--vocab-parallel {AUTO_TREATMENT}"
COMPARED_TREATMENTS: Final = tuple(name for name in TREATMENTS if name != "naive")
"""The treatments that ``AUTO_FLAG`` compares. It leaves out naive.

naive is slower than vocab-1, and needs as much memory.
"""


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class PipelineFlags:
    """The pipeline's schedule, and the layers of its stages."""

    pipeline_schedule: str | None = flag(None,
        "Schedule of the passes; auto takes the fastest of all, or one nearly as fast that holds "
        "less.", choices=TRAINABLE_SCHEDULES,
        instead="for any other, save its plan with tools/simulate.py --save-plan FILE and train it "
        "with --schedule-file FILE", unset=DEFAULT_SCHEDULE)
    enable_zero_bubble: bool = flag(False,
        "With --zero-bubble-max-pending-backward: schedule zb-auto. Without: zb-1p, which holds "
        "as many microbatches as 1f1b.")
    zero_bubble_v_schedule: bool = flag(False,
        "Schedule zb-v, or the one that --zero-bubble-v-schedule-mem-setup names; with or without "
        "--enable-zero-bubble.")
    zero_bubble_v_schedule_mem_setup: Literal["half", "min", "zb"] | None = flag(None,
        "Schedule that --zero-bubble-v-schedule takes: half is v-half, min is v-min, zb is zb-v.",
        unset="zb", idle_without="--zero-bubble-v-schedule")
    num_virtual_stages_per_pipeline_rank: int | None = flag(None,
        "Model chunks of a rank. Without --pipeline-schedule the flag implies interleaved.", DEPTH,
        unset=f"the schedule's least; for {' or '.join(CHUNKED_SCHEDULES)}",
        excludes="--num-layers-per-virtual-pipeline-stage")
    num_layers_per_virtual_pipeline_stage: int | None = flag(None,
        "Layers of a chunk: another way to give the number of chunks of a rank.", DEPTH,
        unset="by --num-virtual-stages-per-pipeline-rank")
    layer_distribution: str | None = flag(None,
        "How layers are spread over the stages. even: equally many on each; remainder: one more "
        "on the first stages; cost: so that the layers of the slowest rank take as little time as "
        "possible; redis: the same, vocabulary layers included; or a list of numbers, in the order "
        "in which the data flows.",
        unset="even; cost if some layers have experts and others none",
        metavar="{even,remainder,cost,redis}|N,N,...")
    pipeline_model_parallel_layout: str | None = flag(None,
        "The stages in Megatron-Core's form, in the order in which the data flows, as in "
        "'Et*2|(t*2|)*6t*2L'. E is the embedding, t a transformer layer, m a layer of "
        "--mtp-num-layers, L the loss; | ends a stage. All m are in one stage, after the last t. "
        "More stages than ranks imply interleaved.", unset="none", metavar="LAYOUT")
    enable_layer_redistribution: bool = flag(False,
        "Another name of --vocab-parallel redis, from the paper's code.")
    final_stage_num_layers: int | None = flag(None,
        "With redis: layers of the last stage.",
        DEPTH_OR_NONE, unset="balanced by cost",
        idle_without="--enable-layer-redistribution or --vocab-parallel redis or "
        "--layer-distribution redis or --vocab-parallel auto")
    decoder_first_pipeline_num_layers: int | None = flag(None,
        "Layers of the first stage; the others share the rest.", DEPTH_OR_NONE,
        unset="as the others", excludes=_ACCOUNTS)
    decoder_last_pipeline_num_layers: int | None = flag(None,
        "Layers of the last stage; the others share the rest.", DEPTH_OR_NONE,
        unset="as the others", excludes=_ACCOUNTS)
    account_for_embedding_in_pipeline_split: bool = flag(False,
        "Count the embedding as one of the first stage's layers.")
    account_for_loss_in_pipeline_split: bool = flag(False,
        "Count the output layer as one of the last stage's layers.")
# fmt: on


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
    return flags[TreatmentFlags].vocab_parallel == AUTO_TREATMENT


def treatments_of(flags: Flags) -> tuple[str, ...]:
    """Return the treatments that the plan may choose from; only one if the flags name it.

    Flags that say how many layers a stage has exclude redis. Flags that count a vocabulary layer as
    a transformer layer of its stage exclude the treatments that split it over all ranks.
    """
    if not compares_treatments(flags):
        return (treatment_of(flags),)
    whole = bool(given_flags(flags[PipelineFlags], *ACCOUNTS))
    fixed = bool(distributions(flags))
    known = (TREATMENTS[name] for name in COMPARED_TREATMENTS)
    return tuple(
        own.name
        for own in known
        if not (own.redistributed and fixed) and not (own.is_sharded and whole)
    )


def _choices(flags: Flags) -> list[NamedChoice]:
    return [NamedChoice((set_to("--vocab-parallel", name),)) for name in treatments_of(flags)]


VOCABULARY: Final = Dimension(AUTO_FLAG, compares_treatments, _choices, by_flops=True)
"""The treatment of the vocabulary as a dimension that the plan chooses in."""


def distributions(flags: Flags) -> list[str]:
    """Return all given flags that decide the layers of the stages, the flags for redis first."""
    listed = flags[PipelineFlags].layer_distribution != "redis"
    names = (*(["layer_distribution"] if listed else []), LAYOUT, *ENDS, *ACCOUNTS)
    return [*redistributing(flags), *given_flags(flags[PipelineFlags], *names)]


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
    pipeline = flags[PipelineFlags]
    if pipeline.zero_bubble_v_schedule:
        setup = pipeline.zero_bubble_v_schedule_mem_setup
        name = "--zero-bubble-v-schedule"
        if setup is not None:
            name += f" {name}-mem-setup {setup}"
        yield Ask(name, (V_SCHEDULES[setup or "zb"],))
    elif pipeline.enable_zero_bubble:
        unlimited = flags[PlanSettings].zero_bubble_max_pending_backward is None
        yield Ask("--enable-zero-bubble", (ZERO_BUBBLE["unlimited" if unlimited else "limited"],))
    for given in () if leaves_one_chunk(flags) else given_flags(pipeline, *CHUNKS):
        yield Ask(given, CHUNKED_SCHEDULES)
    for given in given_flags(flags[PlanSettings], "schedule_file"):
        yield Ask(given, FILE_SCHEDULES)
    if (named := pipeline.pipeline_schedule) is not None:
        yield Ask(f"--pipeline-schedule {named}", (named,))


def treatments_asked(flags: Flags) -> Iterator[Ask]:
    """Yield the flags that ask for a treatment of the vocabulary."""
    treatment, pipeline = flags[TreatmentFlags], flags[PipelineFlags]
    if treatment.use_interlaced_schedule:
        yield Ask("--use-interlaced-schedule", ("interlaced",))
    elif treatment.enable_vocab_parallel and treatment.disable_backward_fusion:
        yield Ask("--enable-vocab-parallel --disable-backward-fusion", ("vocab-1",))
    elif treatment.enable_vocab_parallel:
        yield Ask("--enable-vocab-parallel", ("vocab-2",))
    if pipeline.enable_layer_redistribution:
        yield Ask("--enable-layer-redistribution", ("redis",))
    if pipeline.layer_distribution == "redis":
        yield Ask("--layer-distribution redis", ("redis",))
    if (name := treatment.vocab_parallel) is not None:
        compared = name == AUTO_TREATMENT
        yield Ask(f"--vocab-parallel {name}", COMPARED_TREATMENTS if compared else (name,))


def chunks_of(flags: Flags) -> int | None:
    """Return the number of chunks of a rank.

    ``None``: no flag gives the number. 0: by the flags it would not be a whole number.
    """
    pipeline, ranks = flags[PipelineFlags], flags[PipelineRankSettings].size
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
    named = flags[PipelineFlags].pipeline_schedule in CHUNKED_SCHEDULES
    return not named and chunks_of(flags) == 1


def layout_of(flags: Flags) -> PipelineLayout | None:
    """Return the given layout; ``None``: no layout is given, or it has a fault."""
    return readable_layout(flags[PipelineFlags].pipeline_model_parallel_layout)


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
