r"""Simulate a schedule: its time, its idle share and its microbatches in flight.

simulate-schedule --pipeline-schedule 1f1b --vocab-parallel vocab-2 -p 4 -m 8 --text
simulate-schedule --pipeline-schedule zb-v --vocab-parallel vocab-2 -p 8 -m 24 --draw zb-v.svg
simulate-schedule --pipeline-schedule zb-v -p 8 -m 64 --text --window m20:m24
simulate-schedule --schedule-file my.plan --measured-costs costs.json
simulate-schedule --cost F=1,B=2:2:2:4.4,p2p=0.1 --json
simulate-schedule --vocab-parallel vocab-1 --num-seq-splits 4 --attention-share 0.2
simulate-schedule --vocab-parallel redis --output-layer 1.2 --num-layers 32
simulate-schedule --pipeline-schedule dualpipe-v --overlap-moe-expert-parallel-comm \
  --cost F=1.5,B=1.5,W=1 --waits F=0.5,B=0.5
simulate-schedule --pipeline-schedule zb-v --replicas 4 --cost F=1,B=1,W=1,RG=4 \
  --overlap-grad-reduce
simulate-schedule --replicas 64 --parameters 1e9 --replica-bandwidth 50e9 --replica-latency 1e-5 \
  --use-distributed-optimizer --overlap-param-gather --cost F=0.01,B=0.02,U=0.001

Flags of a plan have the names that they have in training; their second names mean the same.

Costs may have any unit, and the results have the same unit. A cost is the time of one pass of one
chunk; for 'auto', which compares schedules, it is the time for all chunks of a rank together. If W
is given, B is the input gradient, and schedules that do not split the backward run B + W as one
pass. If W is absent, B is the whole backward. If R is given, layers are computed again; without
--recompute-ahead B then takes R + B. 'none' and 'redis' have no passes of the output layer: there
only --output-layer adds its time, to the last stage.

Replicas of the pipeline reduce the gradients of buckets (RG), and with a sharded optimizer each
updates a part of the parameters (U) and gathers the others (AG). The costs have the time of all
buckets of a rank together; or RG and AG follow from --parameters and the link. All chunks of a
rank, and all vocabulary layers that are split, have equally many parameters.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Final

from megatron.commands.arguments import (
    PLAN_GROUPS,
    PlanFlags,
    picture_flag,
    request_of,
    window_flag,
    write_picture,
)
from megatron.commands.replica_flags import ReplicaFlags, about_replicas, with_exchange
from megatron.commands.simulation_notes import notes
from megatron.commands.whole_process import reader_may_stop_early, without_garbage_collection
from megatron.flags.command import read
from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.ranges import DEPTH, DEPTH_OR_NONE, NOT_NEGATIVE, SHARE
from megatron.flags.readable import told_as_error
from megatron.schedules.catalogue import TRAITS
from megatron.schedules.counted import counted
from megatron.schedules.needs import COMM_KINDS
from megatron.schedules.passes import PASS_KINDS
from megatron.schedules.plan_flags import PLAN_FLAGS
from megatron.schedules.request import Request
from megatron.schedules.search.watch import Watch
from megatron.schedules.slice_lengths import SLICE_STRATEGIES
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.cost_file import (
    DEFAULT_COSTS,
    CostFile,
    check_measured,
    load_costs,
    parse_costs,
    parse_waits,
)
from megatron.simulator.costs.peak_bytes import peak_bytes
from megatron.simulator.draw.picture import Panel, lay_out
from megatron.simulator.draw.stretches import Window
from megatron.simulator.draw.text import draw_text
from megatron.simulator.draw.trace import chrome_trace
from megatron.simulator.metrics import DEFINITIONS, headline
from megatron.simulator.scenario import LAYERS_PER_STAGE, Scenario, Simulation, run


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class CostFlags:
    """Costs."""

    cost: str | None = flag(None,
        f"Times of passes ({' '.join(PASS_KINDS)}; several for the ranks, as in F=1:1:2) and "
        f"communications ({' '.join(COMM_KINDS)}, and p2p for X and G); F and B are required; if "
        "not given, R takes as long as F and the others no time.", metavar="KIND=TIME,...",
        unset="F=1,B=1,W=1,S=0.25,T=0.25", excludes="--measured-costs")
    waits: str | None = flag(None,
        "The part of the times of F, R, B and W in which the pass waits for an exchange of tokens "
        "with other ranks of its stage. Pairs (--overlap-moe-expert-parallel-comm) hide it.",
        metavar="KIND=TIME,...", unset="none", needs="--cost", lack="is a part of those times")
    measured_costs: Path | None = flag(None,
        "Costs by rank and chunk, as --save-measured-costs of training saves them, or written by "
        "hand, with bytes: see megatron/simulator/costs/cost_file.py.", metavar="FILE.json",
        names=PLAN_FLAGS["costs"][1:], unset="none")
    output_layer: float | None = flag(None,
        "Forward of the whole output layer: S and T have their times from it.", NOT_NEGATIVE,
        metavar="TIME", unset="by the costs")
    vocab_recompute: bool = flag(False,
        "The backward of --output-layer computes the logits again, which takes TIME once more.",
        needs="--output-layer", lack="adds to the time of the output layer")
    attention_share: float = flag(0.0,
        "Share of the time of F, R and B that causal attention takes: a later slice reads more "
        "keys, so it takes longer.", SHARE, needs="--num-seq-splits",
        lack="makes later slices of a microbatch dearer")
    seq_split_strategy: str = flag("uniform",
        "Slices of equal length (uniform), or of equal time (balanced).", metavar="STRATEGY",
        choices=SLICE_STRATEGIES, needs="--attention-share", lack="is about later slices")
    num_layers: int | None = flag(None, "Layers of the model, for redis.", DEPTH,
        names=PLAN_FLAGS["layers"][1:], unset=f"{LAYERS_PER_STAGE} a stage")
    final_stage_num_layers: int | None = flag(None, "Layers of the last stage, for redis.",
        DEPTH_OR_NONE, names=PLAN_FLAGS["last_stage_layers"][1:], unset="balanced")


@dataclass(frozen=True)
class OutputFlags:
    """Output."""

    json: bool = flag(False, "Print the figures and rows as one JSON object.")
    text: bool = flag(False, "Draw the timeline as text.")
    draw: Path | None = picture_flag("Draw it.")
    window: Window = window_flag("--text or --draw")
    trace: Path | None = flag(None,
        "Write a Chrome trace, for Perfetto; a unit of time is shown as a microsecond.",
        metavar="FILE.json", unset="none")
    save_plan: Path | None = flag(None,
        "Write the plan in text form, to be edited and given to --schedule-file.", unset="none")
# fmt: on

GROUPS: Final = (*PLAN_GROUPS, CostFlags, ReplicaFlags, OutputFlags)


def _epilog() -> str:
    """Return the definitions of the figures, and the descriptions of all schedules."""
    lines = []
    for name, traits in TRAITS.items():
        paper = f" ({traits.paper})" if traits.paper else ""
        lines.append(f"  {name:<12} {traits.description}{paper}")
    meanings = [
        fill(f"{name}: {DEFINITIONS[name]}", 100, initial_indent="  ", subsequent_indent="    ")
        for name in ("time", "idle", "in flight", "bubble")
    ]
    return "\n".join(["figures:", *meanings, "", "schedules:", *lines])


def costs_of_file(path: Path, vocabulary: str) -> CostFile:
    """Return the content of a file of costs.

    Raises:
        ValueError: if the file holds no costs, or costs that were measured with another treatment
            than ``vocabulary``. The message names the file.
    """
    file = load_costs(path)
    if file.layers is not None:
        try:
            check_measured(file, TREATMENTS[vocabulary])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return file


def read_costs(flags: CostFlags, vocabulary: str) -> CostFile:
    """Return the costs that the flags give.

    Raises:
        ValueError: if the flags give no valid costs, or costs that were measured with another
            treatment than ``vocabulary``. The message names the flag.
    """
    try:
        if flags.cost is not None:
            costs = parse_costs(flags.cost)
            waits = {} if flags.waits is None else parse_waits(flags.waits)
            return CostFile(replace(costs, waits=waits), None)
        if flags.measured_costs is not None:
            return costs_of_file(flags.measured_costs, vocabulary)
    except ValueError as error:
        name = "--cost" if flags.measured_costs is None else "--measured-costs"
        raise ValueError(f"{name}: {error}") from error
    return CostFile(DEFAULT_COSTS, None)


def read_case(flags: Flags, request: Request) -> Scenario:
    """Return the scenario that the flags ask for.

    Args:
        flags: flags of the command.
        request: the plan that the flags ask for, with its costs.

    Raises:
        ValueError: if the flags give the time of the output layer twice.
    """
    own, replicas, times = flags[CostFlags], flags[ReplicaFlags], request.costs.passes
    given = own.cost is not None or own.measured_costs is not None
    if own.output_layer is not None and given and (times["S"] or times["T"]):
        raise ValueError(
            f"--output-layer {own.output_layer:g} and the costs of S and T both give the "
            "time of the output layer: give only one of them"
        )
    return Scenario(
        request,
        own.output_layer,
        own.num_layers,
        own.final_stage_num_layers,
        replicas.replicas,
        replicas.cut,
        own.vocab_recompute,
        own.attention_share,
        next(name for name in SLICE_STRATEGIES if name == own.seq_split_strategy),
    )


def figures(
    scenario: Scenario, done: Simulation, held: Sequence[float] | None
) -> dict[str, object]:
    """Return the object that ``--json`` prints; ``held``: every rank's peak in bytes, if known."""
    return {
        "schedule": scenario.request.schedule,
        "taken": done.schedule,
        "vocab": scenario.request.vocabulary,
        "p": scenario.request.ranks,
        "m": scenario.request.microbatches,
        "slices": scenario.request.slices,
        "replicas": scenario.replicas,
        "iteration_time": done.timeline.end,
        "idle": done.timeline.idle(),
        "bubble_rate": done.timeline.bubble_rate(),
        "peak_in_flight": list(done.in_flight),
        "peak_bytes": held,
        "hidden": {kind: own.share for kind, own in done.hidden.items()},
        "rows": [done.plan.row_text(rank) for rank in range(done.plan.ranks)],
    }


def heading(scenario: Scenario, done: Simulation) -> str:
    """Return the results of a simulation in one line."""
    request = scenario.request
    taken = f" takes {done.schedule}" if request.traits.compares else ""
    slices = "" if request.slices == 1 else f", n = {request.slices}"
    replicas = "" if scenario.replicas == 1 else f", d = {scenario.replicas}"
    return (
        f"{request.schedule}{taken}, vocabulary {request.vocabulary}, p = {request.ranks}, "
        f"m = {request.microbatches}{slices}{replicas}: {headline(done.timeline, done.in_flight)}"
    )


def report(scenario: Scenario, done: Simulation, held: Sequence[float] | None) -> str:
    """Return the heading, a line for each rank, and the bubble as the papers count it."""
    lines = [heading(scenario, done)]
    for rank, peak in enumerate(done.in_flight):
        work = f"  rank {rank}: works {done.timeline.work(rank):.6g}"
        lines.append(
            f"{work}, holds up to {counted(peak, 'microbatch')}"
            + (f", {held[rank] / 2**30:.4g} GiB" if held else "")
        )
    for kind, own in done.hidden.items():
        lines.append(
            f"  {kind}: takes {own.alone:.6g} by itself, of which {own.share:.0%} is hidden"
        )
    lines.append(f"  bubble of the zero-bubble papers: {done.timeline.bubble_rate():.1%}")
    return "\n".join(lines)


def write_files(flags: OutputFlags, scenario: Scenario, done: Simulation) -> None:
    """Write the files that the flags ask for in addition to the report."""
    if flags.draw is not None:
        panel = Panel(heading(scenario, done), done.timeline)
        write_picture(lay_out([panel], window=flags.window), flags.draw)
    if flags.trace is not None:
        flags.trace.write_text(json.dumps(chrome_trace(done.plan, done.timeline)))
    if flags.save_plan is not None:
        flags.save_plan.write_text(done.plan.to_text())


def simulate_schedule(argv: Sequence[str] | None) -> None:
    """Simulate the scenario of the command line, print the report and write the files.

    Raises:
        ValueError: if the flags describe no scenario that can be simulated.
        OSError: if a file cannot be written.
    """
    flags = read(argv, f"{__doc__}\n{_epilog()}", *GROUPS, rules=(about_replicas,))
    shown, plan = flags[OutputFlags], flags[PlanFlags]
    request = request_of(flags)
    given = read_costs(flags[CostFlags], request.vocabulary)
    costs = with_exchange(given.costs, flags[ReplicaFlags], request.ranks)
    scenario = read_case(flags, replace(request, costs=costs))
    watch = Watch(plan.search_seconds, sys.stderr)
    done = run(scenario, watch)
    watch.close()
    held = None if given.sizes is None else peak_bytes(done.program, given.sizes)
    write_files(shown, scenario, done)
    print(
        json.dumps(figures(scenario, done, held), indent=1)
        if shown.json
        else report(scenario, done, held)
    )
    besides = sys.stderr if shown.json else sys.stdout
    for note in notes(scenario, done):
        print(f"note: {note}", file=besides)
    if done.bound is not None:
        print(f"no plan within the memory limit ends before {done.bound:.6g}", file=besides)
    if shown.text:
        print(draw_text(done.timeline, window=shown.window), file=besides)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. After an error, print one line and end the process."""
    # Garbage collection took a fifth of the time.
    with told_as_error(ValueError), reader_may_stop_early(), without_garbage_collection():
        try:
            simulate_schedule(argv)
        except OSError as error:
            reason = f"cannot write {error.filename}: {error.strerror}"
            raise ValueError(f"{reason}: name another file") from error
