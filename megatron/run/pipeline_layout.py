"""Megatron-Core's text form of a pipeline: ``Et*2|(t*2|)*6t*2L`` has eight stages.

E is the embedding, t a transformer layer, m a layer that predicts a further token, L the loss, and
| stands between two stages. ``x*n`` and ``(...)*n`` repeat n times; commas mean nothing. The stages
are in the order in which the data flows, so two chunks of a rank do not stand side by side.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from megatron.flags.declare import cut
from megatron.flags.groups import result_of
from megatron.schedules.catalogue import TRAITS

LAYOUT_FLAG: Final = "--pipeline-model-parallel-layout"
LONGEST: Final = 100_000
"""Letters of the longest layout when all is written out; more letters are a mistyped number."""

_GROUP: Final = re.compile(r"\(([^()]*)\)\*(\d+)")
_LETTER: Final = re.compile(r"([A-Za-z|])\*(\d+)")


class PipelineLayout(NamedTuple):
    """The layers of a pipeline's stages.

    Attributes:
        layers: transformer layers of every stage; a stage may have none.
        further: number of further tokens that are predicted, each by a layer of its own.
        further_stage: the stage with these layers; ``None``: there are none.
    """

    layers: tuple[int, ...]
    further: int = 0
    further_stage: int | None = None


def parse_layout(text: str) -> PipelineLayout:
    """Read a layout whose first stage has the embedding and whose last stage has the loss.

    Raises:
        ValueError: the text is no layout, or has layers that do not exist here, or has layers in
            stages where they cannot stand here. The message begins with the flag and names the way
            out.
    """
    fault = f"{LAYOUT_FLAG} {text}: "
    try:
        letters = _written_out(text.replace(",", ""))
    except OverflowError as error:
        raise ValueError(f"{fault}{error}") from error
    for letter in letters:
        if letter not in "EtmL|":
            raise ValueError(fault + _unknown(letter))
    if letters.strip("tm|") != letters or (letters.count("E"), letters.count("L")) != (1, 1):
        raise ValueError(
            f"{fault}the first stage begins with the embedding and the last one ends with the "
            "loss, and nowhere else is one: write E once, at the very beginning, and L once, at "
            "the very end"
        )
    if "t" in letters.partition("m")[2]:
        raise ValueError(
            f"{fault}further tokens are predicted from what the last layer knows: write m after "
            "the last t, in the stage of that t or in a later one"
        )
    stages = letters.split("|")
    predicting = [number for number, stage in enumerate(stages) if "m" in stage]
    if len(predicting) > 1:
        raise ValueError(
            f"{fault}one stage predicts all further tokens, and m is in {len(predicting)} stages: "
            "write them one behind the other, as in m*2"
        )
    return PipelineLayout(
        tuple(stage.count("t") for stage in stages),
        letters.count("m"),
        predicting[0] if predicting else None,
    )


def readable_layout(text: str | None) -> PipelineLayout | None:
    """Return ``parse_layout`` of a text; ``None`` if there is no text, or it has a fault."""
    return None if text is None else result_of(lambda: parse_layout(text))


def layout_faults(
    text: str, *, num_layers: int, depths: int, ranks: int, chunks: int | None, schedule: str
) -> Iterator[str]:
    """Find the mistakes in a layout, by itself and together with the model and the pipeline.

    Args:
        text: the value of the flag.
        num_layers: transformer layers of the model.
        depths: further tokens that the model predicts.
        ranks: pipeline ranks.
        chunks: stages of a rank that another flag asks for; ``None``: no flag does.
        schedule: name of the schedule of the passes.

    Yields:
        A line on each mistake. The line begins with the flag and names the way out.
    """
    try:
        layers, named, _ = parse_layout(text)
    except ValueError as error:
        yield str(error)
        return
    stages, traits = f"{LAYOUT_FLAG} {text} has {len(layers)} stages", TRAITS[schedule]
    if sum(layers) != num_layers:
        yield (
            f"{LAYOUT_FLAG} {text} has {sum(layers)} transformer layers, and --num-layers is "
            f"{num_layers}: change one of them"
        )
    if named != depths:
        yield (
            f"{LAYOUT_FLAG} {text} has m {named} times, and --mtp-num-layers is {depths}: change "
            "one of them"
        )
    own, rest = divmod(len(layers), ranks)
    takes_any = traits.compares or "file" in traits.options
    if rest:
        yield (
            f"{stages}, which is no multiple of --pipeline-model-parallel-size {ranks}: give every "
            "rank as many"
        )
    elif chunks not in (None, own):
        yield (
            f"{stages}, not --num-virtual-stages-per-pipeline-rank {chunks} on each of {ranks} "
            "rank(s): leave that out, or change one of them"
        )
    elif not takes_any and (fault := traits.chunks_fault(own)):
        yield (
            f"{stages}, {own} a rank, and {schedule} {fault}, or write {traits.chunks * ranks} "
            "stages"
        )


def _written_out(text: str) -> str:
    """Write out all repetitions, first groups from the inside out, then letters.

    Raises:
        OverflowError: the result is longer than ``LONGEST``.
    """

    def repeated(found: re.Match[str]) -> str:
        part, times = found[1], found[2].lstrip("0") or "0"
        if len(times) > len(str(LONGEST)) or len(part) * int(times) > LONGEST:
            shown = cut(times, 20)
            raise OverflowError(f"{part}*{shown} is too long a pipeline: lower the {shown}")
        return part * int(times)

    groups = 1
    while groups:
        text, groups = _GROUP.subn(repeated, text)
    return _LETTER.sub(repeated, text)


def _unknown(letter: str) -> str:
    """Return the fault of an unknown letter, with the way out."""
    if letter in "()*":
        return f"{letter} repeats nothing where it stands: write x*n or (...)*n"
    return (
        f"{letter!r} is no layer: write E for the embedding, t for a transformer layer, m for one "
        "that predicts a further token, L for the loss, and | between stages"
    )
