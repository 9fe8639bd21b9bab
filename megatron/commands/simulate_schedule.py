"""Simulate a schedule: its time, its idle share and its microbatches in flight.

simulate-schedule --pipeline-schedule 1f1b --vocab-parallel vocab-2 -p 4 -m 8 --text
simulate-schedule --pipeline-schedule zb-v --vocab-parallel vocab-2 -p 8 -m 24 --draw zb-v.svg
simulate-schedule --pipeline-schedule zb-v -p 8 -m 64 --text --window m20:m24
simulate-schedule --schedule-file my.plan --measured-costs costs.json
simulate-schedule --cost F=1,B=2:2:2:4.4,p2p=0.1 --json
simulate-schedule --vocab-parallel redis --output-layer 1.2 --num-layers 32
simulate-schedule --pipeline-schedule zb-v --replicas 4 --cost F=1,B=1,W=1,RG=4 \
  --overlap-grad-reduce
simulate-schedule --replicas 64 --parameters 1e9 --replica-bandwidth 50e9 --replica-latency 1e-5 \
  --use-distributed-optimizer --overlap-param-gather --cost F=0.01,B=0.02,U=0.001

Flags of a plan have the names that they have in training; their second names mean the same.

Costs may have any unit, and the results have the same. They are those of one pass of one chunk; for
'auto', which compares schedules, of all chunks of a rank together. If W is given, B is the input
gradient, and schedules that do not split the backward run B + W as one pass. If W is absent, B is
the whole backward. If R is given, layers are computed again; without --recompute-ahead that is a
part of B. 'none' and 'redis' have no passes of the output layer: there only --output-layer adds its
time, to the last stage.

Replicas of the pipeline reduce the gradients of buckets (RG), and with a sharded optimizer each
updates a part of the parameters (U) and gathers the others (AG). The costs have the time of all
buckets of a rank together; or RG and AG follow from --parameters and the link. A rank has as many
parameters in each chunk, and in each vocabulary layer that is split, as in the others.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill

from megatron.commands.arguments import (
    Parser,
    add_plan_flags,
    add_size_flags,
    add_window,
    check_window,
    number,
    picture_file,
    request_of,
    write_picture,
)
from megatron.commands.replica_flags import add_replica_flags, read_buckets, with_exchange
from megatron.commands.whole_process import reader_may_stop_early, without_garbage_collection
from megatron.schedules.catalogue import TRAITS
from megatron.schedules.counted import counted
from megatron.schedules.needs import COMM_KINDS
from megatron.schedules.passes import PASS_KINDS
from megatron.schedules.plan_flags import PLAN_FLAGS
from megatron.schedules.request import Request
from megatron.schedules.search.watch import Watch
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.cost_file import (
    DEFAULT_COSTS,
    CostFile,
    check_measured,
    load_costs,
    parse_costs,
)
from megatron.simulator.costs.peak_bytes import peak_bytes
from megatron.simulator.draw.picture import Panel, lay_out
from megatron.simulator.draw.text import draw_text
from megatron.simulator.draw.trace import chrome_trace
from megatron.simulator.metrics import DEFINITIONS, headline
from megatron.simulator.scenario import LAYERS_PER_STAGE, Scenario, Simulation, run


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(
        description=__doc__,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_size_flags(add)
    add_plan_flags(add)
    _add_cost_flags(parser)
    add_replica_flags(parser)
    add("--json", action="store_true", help="print the figures and rows as one JSON object")
    add("--text", action="store_true", help="draw the timeline as text")
    add("--draw", type=picture_file, metavar="FILE.svg", help="draw it")
    add_window(add)
    trace = "write a Chrome trace, for Perfetto; a unit of time is shown as a microsecond"
    add("--trace", type=Path, metavar="FILE.json", help=trace)
    save = "write the plan in text form, to be edited and given to --schedule-file"
    add("--save-plan", type=Path, metavar="FILE", help=save)
    return parser.parse_args(argv)


def _epilog() -> str:
    """Return what the figures mean, and the descriptions of all schedules, one per line."""
    lines = []
    for name, traits in TRAITS.items():
        paper = f" ({traits.paper})" if traits.paper else ""
        lines.append(f"  {name:<12} {traits.description}{paper}")
    meanings = [
        fill(f"{name}: {DEFINITIONS[name]}", 100, initial_indent="  ", subsequent_indent="    ")
        for name in ("time", "idle", "in flight", "bubble")
    ]
    return "\n".join(["figures:", *meanings, "", "schedules:", *lines])


def _add_cost_flags(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_mutually_exclusive_group()
    cost = (
        f"times of passes ({' '.join(PASS_KINDS)}; several for the ranks, as in F=1:1:2) and "
        f"communications ({' '.join(COMM_KINDS)}, and p2p for X and G); F and B are required; if "
        "not given, R takes as long as F and the others no time (default: "
        "F=1,B=1,W=1,S=0.25,T=0.25)"
    )
    costs.add_argument("--cost", metavar="KIND=TIME,...", help=cost)
    file = (
        "costs by rank and chunk, as --save-measured-costs of training saves them, or written by "
        "hand, with bytes: see megatron/simulator/costs/cost_file.py"
    )
    names = PLAN_FLAGS["costs"]
    costs.add_argument(*names, dest="costs", type=Path, metavar="FILE.json", help=file)
    add = parser.add_argument
    layer = "forward of the whole output layer: S and T have their times from it"
    add("--output-layer", type=number(0, float), metavar="TIME", help=layer)
    again = "the backward of --output-layer computes the logits again, which takes TIME once more"
    add("--vocab-recompute", action="store_true", help=again)
    layers = f"of the model, for redis (default: {LAYERS_PER_STAGE} a stage)"
    names = PLAN_FLAGS["layers"]
    add(*names, dest="layers", type=number(1), metavar="LAYERS", help=layers)
    last = "layers of the last stage, for redis (default: balanced)"
    names = PLAN_FLAGS["last_stage_layers"]
    add(*names, dest="last_stage_layers", type=number(0), metavar="LAYERS", help=last)


def costs_of_file(path: Path, vocabulary: str) -> CostFile:
    """Return the content of a file of costs.

    Raises:
        ValueError: if it holds no costs, or costs measured with another treatment than
            ``vocabulary``. The message names the file.
    """
    file = load_costs(path)
    if file.layers is not None:
        try:
            check_measured(file, TREATMENTS[vocabulary])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return file


def read_costs(arguments: argparse.Namespace, vocabulary: str) -> CostFile:
    """Return the costs that the flags give.

    Raises:
        ValueError: if the flags give no valid costs, or costs measured with another treatment than
            ``vocabulary``; the message names the flag.
    """
    flag = "--cost" if arguments.costs is None else "--measured-costs"
    try:
        if arguments.cost is not None:
            return CostFile(parse_costs(arguments.cost), None)
        if arguments.costs is not None:
            return costs_of_file(arguments.costs, vocabulary)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error
    return CostFile(DEFAULT_COSTS, None)


def read_case(arguments: argparse.Namespace, request: Request) -> Scenario:
    """Return the scenario that the flags ask for.

    Args:
        arguments: the flags.
        request: the plan that they ask for, with its costs.

    Raises:
        ValueError: if the flags give the time of the output layer twice, or not at all where it is
            needed.
    """
    given, costs = arguments.cost is not None or arguments.costs is not None, request.costs
    if arguments.output_layer is not None and given and (costs.passes["S"] or costs.passes["T"]):
        raise ValueError(
            f"--output-layer {arguments.output_layer:g} and the costs of S and T both give the "
            "time of the output layer: give only one of them"
        )
    if arguments.vocab_recompute and arguments.output_layer is None:
        raise ValueError("--vocab-recompute adds to --output-layer TIME: give it, or leave it out")
    return Scenario(
        request,
        arguments.output_layer,
        arguments.layers,
        arguments.last_stage_layers,
        arguments.replicas,
        read_buckets(arguments),
        arguments.vocab_recompute,
    )


def notes(scenario: Scenario) -> Iterator[str]:
    """Yield what the flags ask for and the costs leave without effect."""
    request, layer = scenario.request, scenario.output_layer
    alike = all(isinstance(time, (int, float)) for time in request.costs.passes.values())
    if request.treatment.redistributed and not layer and alike:
        yield (
            f"--vocab-parallel {request.vocabulary} spreads the layers by what the output layer "
            "takes, and that is nothing here, so this is 'none': add --output-layer TIME, or the "
            "costs of every rank (--cost F=TIME:TIME:..., --measured-costs)"
        )


def figures(
    scenario: Scenario, done: Simulation, held: Sequence[float] | None
) -> dict[str, object]:
    """Return what ``--json`` prints; ``held`` is every rank's peak in bytes, if known."""
    return {
        "schedule": scenario.request.schedule,
        "taken": done.schedule,
        "vocab": scenario.request.vocabulary,
        "p": scenario.request.ranks,
        "m": scenario.request.microbatches,
        "replicas": scenario.replicas,
        "iteration_time": done.timeline.end,
        "idle": done.timeline.idle(),
        "bubble_rate": done.timeline.bubble_rate(),
        "peak_in_flight": list(done.in_flight),
        "peak_bytes": held,
        "hidden": {kind: own.share for kind, own in done.hidden.items()},
        "rows": [" ".join(map(str, row)) for row in done.plan.rows],
    }


def heading(scenario: Scenario, done: Simulation) -> str:
    """Return the results of a simulation in one line."""
    request = scenario.request
    taken = f" takes {done.schedule}" if request.traits.compares else ""
    replicas = "" if scenario.replicas == 1 else f", d = {scenario.replicas}"
    return (
        f"{request.schedule}{taken}, vocabulary {request.vocabulary}, p = {request.ranks}, "
        f"m = {request.microbatches}{replicas}: {headline(done.timeline, done.in_flight)}"
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


def write_files(arguments: argparse.Namespace, scenario: Scenario, done: Simulation) -> None:
    """Write the files that are asked for in addition to the report."""
    if arguments.draw:
        panel = Panel(heading(scenario, done), done.timeline)
        write_picture(lay_out([panel], window=arguments.window), arguments.draw)
    if arguments.trace:
        arguments.trace.write_text(json.dumps(chrome_trace(done.plan, done.timeline)))
    if arguments.save_plan:
        arguments.save_plan.write_text(done.plan.to_text())


def simulate_schedule(argv: Sequence[str] | None) -> None:
    """Simulate the scenario of the command line, print the report and write the files.

    Raises:
        ValueError: for arguments that make no simulation.
        OSError: if a file cannot be written.
    """
    arguments = parse_arguments(argv)
    check_window(arguments.window, {"--text": arguments.text, "--draw": bool(arguments.draw)})
    request = request_of(arguments)
    given = read_costs(arguments, request.vocabulary)
    costs = with_exchange(given.costs, arguments, request.ranks)
    scenario = read_case(arguments, replace(request, costs=costs))
    watch = Watch(arguments.seconds, sys.stderr)
    done = run(scenario, watch)
    watch.close()
    held = None if given.sizes is None else peak_bytes(done.program.plan, given.sizes)
    write_files(arguments, scenario, done)
    print(
        json.dumps(figures(scenario, done, held), indent=1)
        if arguments.json
        else report(scenario, done, held)
    )
    besides = sys.stderr if arguments.json else sys.stdout
    for note in notes(scenario):
        print(f"note: {note}", file=besides)
    if done.bound is not None:
        print(f"no plan within the memory limit ends before {done.bound:.6g}", file=besides)
    if arguments.text:
        print(draw_text(done.timeline, window=arguments.window), file=besides)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; an error ends the process with one line."""
    try:
        with reader_may_stop_early(), without_garbage_collection():  # it took a fifth of the time
            simulate_schedule(argv)
    except OSError as error:
        sys.exit(f"error: cannot write {error.filename}: {error.strerror}: name another file")
    except ValueError as error:
        sys.exit(f"error: {error}")
