"""The dependencies of a pipeline and its times, written out a second time, from the papers.

Nothing here asks ``needs``, ``sources`` or ``earliest``: a plan is read as rows of labels, its
edges are listed one sentence at a time, and times are longest paths. ``graphlib`` orders the passes
and finds the cycles.
"""

import graphlib
from collections import defaultdict
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from megatron.schedules.costs import Costs
from megatron.schedules.plan import Plan

Node = tuple[int, str]
"""(rank, label of a pass); rank -1 for a communication, whose label begins with its kind."""


class Unit(NamedTuple):
    """A slice of a microbatch, as labels name it."""

    microbatch: int
    slice: int

    def __str__(self) -> str:
        return f"{self.microbatch}/{self.slice}" if self.slice else f"{self.microbatch}"


def label(kind: str, of: int | Unit, chunk: int) -> str:
    if isinstance(of, int):
        return f"{kind}{of}" if chunk == 0 else f"{kind}{of}.{chunk}"
    return label(kind, of.microbatch, chunk) + (f"/{of.slice}" if of.slice else "")


def predecessors(plan: Plan) -> dict[Node, set[Node]]:
    """Return what every pass must come after, the pass before it in its row included."""
    before: dict[Node, set[Node]] = defaultdict(set)
    for rank, row in enumerate(plan.rows):
        labels = [(rank, str(item)) for item in row]
        before.update({node: set() for node in labels})
        for earlier, later in pairwise(labels):
            before[later].add(earlier)
    for unit in (Unit(i, s) for i in range(plan.microbatches) for s in range(plan.slices)):
        _flow(plan, unit, before)
        if unit.slice:
            _slices(plan, Unit(unit.microbatch, unit.slice - 1), unit, before)
        if plan.treatment.name != "none":
            _input_layer(plan, unit, before)
            _output_layer(plan, unit, before)
    return before


def _slices(plan: Plan, one: Unit, following: Unit, before: dict[Node, set[Node]]) -> None:
    """Keys go from a slice's forward to the next one's, their gradients come back."""
    for rank, chunk in plan.stages:
        before[rank, label("F", following, chunk)].add((rank, label("F", one, chunk)))
        if not plan.forward_only:
            before[rank, label("B", one, chunk)].add((rank, label("B", following, chunk)))


def _flow(plan: Plan, i: Unit, before: dict[Node, set[Node]]) -> None:
    """The forward goes up the stages, the backward comes down, both within the microbatch."""
    forwards = [(rank, label("F", i, chunk)) for rank, chunk in plan.stages]
    for source, target in pairwise(forwards):
        _send("X", source, target, before)
    if plan.forward_only:
        return
    backwards = [(rank, label("B", i, chunk)) for rank, chunk in plan.stages]
    for forward, backward in zip(forwards, backwards, strict=True):
        before[backward].add(forward)
    if any(p.kind == "R" for row in plan.rows for p in row):
        for (rank, chunk), forward, backward in zip(plan.stages, forwards, backwards, strict=True):
            again = rank, label("R", i, chunk)
            before[again].add(forward)
            before[backward].add(again)
    for target, source in pairwise(backwards):
        _send("G", source, target, before)
    if any(p.kind == "W" for row in plan.rows for p in row):
        for (rank, chunk), backward in zip(plan.stages, backwards, strict=True):
            before[rank, label("W", i, chunk)].add(backward)


def _send(kind: str, source: Node, target: Node, before: dict[Node, set[Node]]) -> None:
    """A message takes time between two ranks, and does not exist within one."""
    if source[0] == target[0]:
        before[target].add(source)
    else:
        message = -1, f"{kind} {source}"
        before[message] = {source}
        before[target].add(message)


def _input_layer(plan: Plan, i: Unit, before: dict[Node, set[Node]]) -> None:
    """IF of all ranks ahead of the first F; IB of every rank behind the B of that stage.

    If a stage looks ahead, the same with both stages.
    """
    ranks, readers = range(plan.ranks), {plan.stages[0]}
    if plan.ahead_stage is not None:
        readers.add(plan.stages[plan.ahead_stage])
    before[-1, f"CIF {i}"] = {(rank, f"IF{i}") for rank in ranks}
    for first, chunk in readers:
        before[first, label("F", i, chunk)].add((-1, f"CIF {i}"))
    if plan.forward_only:
        return
    backwards = {(first, label("B", i, chunk)) for first, chunk in readers}
    before[-1, f"CIB {i}"] = backwards
    for rank in ranks:
        has_all = all(first == rank for first, _ in readers)
        before[rank, f"IB{i}"] |= backwards if has_all else {(-1, f"CIB {i}")}
        before[rank, f"IB{i}"].add((rank, f"IF{i}"))


_STEPS = {
    "vocab-2": ["ST"],
    "vocab-1": ["ST", "T"],
    "interlaced": ["ST", "T"],
    "naive": ["SE", "ET", "T"],
}
"""For each barrier of a treatment the pass that it merges, and the pass after it on every rank."""


def _output_layer(plan: Plan, i: Unit, before: dict[Node, set[Node]]) -> None:
    """S after the last F, and from barrier to barrier over E and T to the last stage's B."""
    ranks, (last, chunk) = range(plan.ranks), plan.stages[-1]
    synchronous = plan.treatment.name == "interlaced"
    before[-1, f"C0 {i}"] = {(last, label("F", i, chunk))}
    for rank in ranks:
        own = rank == last and not synchronous  # it has what it broadcasts
        before[rank, f"S{i}"].add((last, label("F", i, chunk)) if own else (-1, f"C0 {i}"))
    steps = _STEPS[plan.treatment.name]
    for number, step in enumerate(steps, 1):
        merged, following = step[0], step[1:]
        before[-1, f"C{number} {i}"] = {(rank, f"{merged}{i}") for rank in ranks}
        for rank in ranks:
            for kind in following:
                before[rank, f"{kind}{i}"] |= {(-1, f"C{number} {i}"), (rank, f"{merged}{i}")}
    if plan.forward_only:
        return
    before[last, label("B", i, chunk)].add((-1, f"C{len(steps)} {i}"))
    if synchronous:  # and nobody works while C2 runs
        for rank, row in enumerate(plan.rows):
            for item, after in pairwise(row):
                if (item.kind, item.microbatch, item.slice) == ("T", *i):
                    before[rank, str(after)].add((-1, f"C2 {i}"))


def end_times(plan: Plan, costs: Costs) -> list[list[float]]:
    """Return when every pass of every row ends, if communications never wait: longest paths.

    Raises:
        graphlib.CycleError: if the plan deadlocks.
    """
    before = predecessors(plan)
    lengths = {
        (rank, str(item)): costs.of_pass(plan, rank, item)
        for rank, row in enumerate(plan.rows)
        for item in row
    }
    comms: dict[str, Any] = {str(kind): time for kind, time in costs.comms.items()}
    ends: dict[Node, float] = {}
    for node in graphlib.TopologicalSorter(before).static_order():
        start = max((ends[earlier] for earlier in before[node]), default=0.0)
        whole = comms.get(node[1].split()[0], 0.0) if node[0] < 0 else 0.0
        ends[node] = start + (whole / plan.slices if node[0] < 0 else lengths[node])
    return [[ends[rank, str(p)] for p in row] for rank, row in enumerate(plan.rows)]


def span(plan: Plan, costs: Costs) -> float:
    """Return the longest time between a rank's first start and last end; no pass may be free."""
    ends = end_times(plan, costs)
    begins = [
        row[0] - costs.of_pass(plan, rank, plan.rows[rank][0]) for rank, row in enumerate(ends)
    ]
    return max(row[-1] - begin for row, begin in zip(ends, begins, strict=True))


def one_f_one_b_row(ranks: int, rank: int, microbatches: int) -> list[str]:
    """Return a row of 1F1B as Megatron's loop runs it: warm-up, steady state, cool-down."""
    warm_up = min(ranks - rank - 1, microbatches)
    row = [f"F{i}" for i in range(warm_up)]
    for i in range(microbatches - warm_up):
        row += [f"F{warm_up + i}", f"B{i}"]
    return row + [f"B{i}" for i in range(microbatches - warm_up, microbatches)]


def gpipe_row(microbatches: int) -> list[str]:
    """Return a row of GPipe: all forwards, then all backwards, in the order of the microbatches."""
    return [f"{kind}{i}" for kind in "FB" for i in range(microbatches)]


def interleaved_row(
    ranks: int, rank: int, microbatches: int, chunks: int, size: int | None = None
) -> list[str]:
    """Return a row of interleaved 1F1B (arXiv 2104.04473, section 2.2).

    Groups of ``size`` microbatches, else of p, take one chunk after the other, backwards from the
    last chunk down. The last group has the microbatches that are left over, and Megatron-LM asks
    that they be at least p. The warm-up is that of Megatron-LM.
    """
    size = size or ranks
    assert microbatches % size == 0 or microbatches % size >= ranks
    order = [
        (i, chunk)
        for first in range(0, microbatches, size)
        for chunk in range(chunks)
        for i in range(first, min(first + size, microbatches))
    ]
    forwards = [label("F", i, chunk) for i, chunk in order]
    backwards = [label("B", i, chunks - 1 - chunk) for i, chunk in order]
    warm_up = min(2 * (ranks - rank - 1) + (chunks - 1) * size, len(order))
    row = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += [forward, backward]
    return row + backwards[len(order) - warm_up :]


def zb_h1_row(ranks: int, rank: int, microbatches: int) -> list[str]:
    """Return a row of ZB-H1: 1F1B, and rank i is i microbatches late with its weight gradients.

    They all fill the cool-down then, and every rank holds p microbatches (arXiv 2401.10241,
    section 2.2.1 and figure 3).
    """
    row = []
    for item in one_f_one_b_row(ranks, rank, microbatches):
        row.append(item)
        if item[0] == "B" and int(item[1:]) >= rank:
            row.append(f"W{int(item[1:]) - rank}")
    return row + [f"W{i}" for i in range(max(microbatches - rank, 0), microbatches)]


def wave_by_wave_row(ranks: int, rank: int, microbatches: int, waves: int) -> list[str]:
    """Return a row of waves that all microbatches take before any of them takes the next one.

    This is the order of ``generate_hanayo_schedule`` in github.com/topal-team/elf
    (elf/scheduling/schedulers.py, which cites Hanayo's paper). Forwards up the ranks alternate with
    forwards down them, and with backwards of the way up when these are over; backwards of the way
    down alternate with the backwards of the way up that are left.
    """
    order = [(i, wave) for wave in range(waves) for i in range(microbatches)]
    back = [(i, waves - 1 - wave) for i, wave in order]
    down = [label("F", i, 2 * wave) for i, wave in order]
    up = [label("F", i, 2 * wave + 1) for i, wave in order]
    up_again = [label("B", i, 2 * wave + 1) for i, wave in back]
    down_again = [label("B", i, 2 * wave) for i, wave in back]
    first = min(ranks - rank, microbatches)
    between = down[first:] + up_again
    row = down[:first]
    for forward, other in zip(up, between, strict=False):
        row += [forward, other]
    for backward, other in zip_longest(down_again, between[len(up) :]):
        row += [backward, *([] if other is None else [other])]
    return row
