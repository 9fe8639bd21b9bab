"""Draw a gallery of schedules, or a recorded run.

draw-schedule --into FOLDER                # the pictures of docs/schedules.md, with their figures
draw-schedule --timeline timeline.json     # what --record-timeline wrote, to timeline.svg

Every picture compares equal work: the vocabulary's layers on the first and the last stage, and the
same layers as passes of all ranks. The output layer is that of V = 256k at hidden size 4096,
sequence length 2048 and 4 transformer layers per stage: V / (12 h + 2 s) = 4.8 layers (arXiv
2411.05288, section 2), or 1.2 stages. F, B and W of a rank's transformer layers take one unit
each. Communications and the input layer are free, except in the first picture, 1f1b_vocab,
which shows them. The picture ``pairs`` has no output layer: it shows when tokens of experts travel,
and pairs that hide this, in segments.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from megatron.commands.arguments import window_flag, write_picture
from megatron.flags.command import read
from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.readable import told_as_error
from megatron.native.files import replace_text
from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.costs import Costs
from megatron.schedules.needs import CommKind
from megatron.schedules.request import Request
from megatron.simulator.compare import idle, total
from megatron.simulator.draw.picture import Panel, Picture, lay_out
from megatron.simulator.draw.stretches import Window
from megatron.simulator.metrics import definitions, headline
from megatron.simulator.scenario import Scenario, Simulation, run
from megatron.simulator.timeline_file import load_timeline

RANKS: Final = 8
MICROBATCHES: Final = 16
OUTPUT_LAYER: Final = 1.2
COMMS: Final[Mapping[CommKind, float]] = {
    "X": 0.1, "G": 0.1, "C0": 0.2, "C1": 0.3, "C2": 0.2, "CIF": 0.2, "CIB": 0.2
}  # fmt: skip
WITH_COMMS: Final = Costs({"F": 1.0, "B": 2.0, "E": 0.2, "IF": 0.1, "IB": 0.1}, COMMS)

TREATMENT_TITLES: Final[Mapping[str, str]] = {
    "none": "vocabulary on the first and the last stage",
    "naive": "vocabulary over all ranks, three barriers (naive)",
    "vocab-1": "vocabulary over all ranks, two barriers (vocab-1)",
    "vocab-2": "vocabulary over all ranks, one barrier (vocab-2)",
}
PAIR: Final = ("none", "vocab-2")

WITH_EXPERTS: Final = Costs({"F": 1.5, "B": 1.5, "W": 1.0}, waits={"F": 0.5, "B": 0.5})
"""Of a chunk with one layer: its tokens travel twice in F, and twice in B."""

TRANSFORMER_COSTS: Final = Costs({"F": 1.0, "B": 1.0, "W": 1.0, "E": 0.0, "IF": 0.0, "IB": 0.0})

PAGE: Final = f"""# Pictures of the schedules

Simulated at p = {RANKS} and m = {MICROBATCHES} (1f1b_vocab: p = 4, m = 8, with communications that
take time); F = B = W = 1 for the transformer layers of a rank, and an output layer whose forward
takes {OUTPUT_LAYER}. So both panels of a schedule do the same work. In pairs (p = 4, m = 8) each
chunk is a layer with experts: F = B = 1.5, of which tokens travel for 0.5, W = 1, no output layer.
Drawn, and this page written, by `python tools/draw.py`.

{{definitions}}

{{table}}
"""

Panels = Mapping[str, Scenario]
"""For the title of each panel, the scenario that it shows."""


def panels_of(
    schedule: str,
    treatments: Iterable[str],
    ranks: int = RANKS,
    microbatches: int = MICROBATCHES,
    costs: Costs | None = None,
) -> Panels:
    """Return a panel of ``schedule`` for each of ``treatments``. All panels do the same work.

    Args:
        schedule: name of the schedule.
        treatments: treatments of the vocabulary.
        ranks: pipeline ranks.
        microbatches: of an iteration.
        costs: of the passes of a chunk and of communications, without the output layer.
    """
    traits = SCHEDULES[schedule]
    costs = costs or TRANSFORMER_COSTS.per_chunk(traits.chunks)
    return {
        f"{traits.title}, {TREATMENT_TITLES[treatment]}": Scenario(
            Request(schedule, treatment, ranks, microbatches, costs), OUTPUT_LAYER
        )
        for treatment in treatments
    }


def pairs_panels() -> Panels:
    """Return the panels of a schedule without and with pairs."""
    request = Request("dualpipe-v", "none", 4, 8, WITH_EXPERTS)
    return {
        "DualPipeV, every pass alone": Scenario(request),
        "DualPipeV, F and B in pairs": Scenario(replace(request, joined=True)),
    }


def pictures() -> dict[str, Panels]:
    """Return the panels of every picture, by the name of the picture's file."""
    return {
        "1f1b_vocab.svg": panels_of("1f1b", PAIR, 4, 8, WITH_COMMS),
        "pairs.svg": pairs_panels(),
        "treatments.svg": panels_of("1f1b", ("naive", "vocab-1", "vocab-2")),
        **{
            f"{name}.svg": panels_of(name, PAIR)
            for name, schedule in SCHEDULES.items()
            if not schedule.searched
        },
    }


def draw(panels: Mapping[str, Simulation]) -> Picture:
    """Return a picture with a panel for each title and simulation."""
    return lay_out(
        [
            Panel(f"{title}: {headline(done.timeline, done.in_flight)}", done.timeline)
            for title, done in panels.items()
        ]
    )


def figures(drawn: Mapping[str, Mapping[str, Simulation]]) -> str:
    """Return the page of a gallery: the figures of every panel, and their definitions."""
    lines = ["| picture | panel | time | idle | in flight |", "|---|---|--:|--:|--:|"]
    for name, panels in drawn.items():
        for number, (title, done) in enumerate(panels.items()):
            link = "" if number else f"[{Path(name).stem}]({name})"
            held, time = max(done.in_flight), done.timeline.end
            cells = f"{link} | {title} | {time:.4g} | {done.timeline.idle():.1%} | {held:.4g}"
            lines.append(f"| {cells} |")
    return PAGE.format(table="\n".join(lines), definitions=definitions("time", "idle", "in flight"))


def draw_recorded(path: Path, window: Window) -> None:
    """Draw the part of a recorded timeline in ``window``, and write the picture beside its file.

    Raises:
        ValueError: if the file holds no timeline, or nothing runs in the window.
        OSError: if the timeline cannot be read, or the picture cannot be written.
    """
    timeline = load_timeline(path)
    title = f"{path.stem}: time {total(timeline):.4g} s, idle {idle(timeline):.1%}"
    picture = lay_out([Panel(title, timeline)], unit="s", window=window)
    write_picture(picture, path.with_suffix(".svg"), is_own_name=True)
    print(path.with_suffix(".svg"))


def draw_gallery(folder: Path) -> None:
    """Draw all pictures into ``folder``, and write a page of their figures there.

    The folder is made if it is missing.

    Raises:
        OSError: if a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        name: {title: run(case) for title, case in panels.items()}
        for name, panels in pictures().items()
    }
    for name, panels in drawn.items():
        write_picture(draw(panels), folder / name, is_own_name=True)
        print(folder / name)
    replace_text(folder / "README.md", figures(drawn))
    print(folder / "README.md")


@dataclass(frozen=True)
class DrawFlags:
    """What is drawn."""

    into: Path | None = flag(None, "Draw the gallery into this folder.", unset="none")
    timeline: Path | None = flag(
        None, "Draw this recorded timeline.", unset="none", excludes="--into"
    )
    window: Window = window_flag("--timeline")


def something_to_draw(flags: Flags) -> Iterator[str]:
    """Yield a line if there is nothing to draw."""
    if flags[DrawFlags].into is None and flags[DrawFlags].timeline is None:
        yield "nothing to draw: give --into FOLDER or --timeline FILE"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. After an error, print one line and end the process."""
    flags = read(argv, __doc__, DrawFlags, rules=(something_to_draw,))[DrawFlags]
    with told_as_error(OSError, ValueError):
        if flags.timeline is not None:
            draw_recorded(flags.timeline, flags.window)
        elif flags.into is not None:
            draw_gallery(flags.into)
