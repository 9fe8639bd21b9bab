"""Costs of stages from a file of measured times, for any distribution of the layers."""

from collections.abc import Sequence
from dataclasses import replace

from megatron.schedules.costs import Time
from megatron.schedules.counted import counted
from megatron.schedules.passes import CHUNKED_KINDS, PassKind
from megatron.simulator.costs.cost_file import CostFile, check_measured
from megatron.simulator.costs.stage_costs import StageCosts, Stages


def measured_costs(file: CostFile, assumed: StageCosts) -> StageCosts:
    """Return the costs of a file, for any distribution of the layers.

    The cost of a layer is its mean on the stages that have only layers. If there are no such
    stages, the time of each stage is divided between its layers and its other work in proportion to
    their FLOPs.

    Raises:
        ValueError: if the file does not fit the stages, was measured with another treatment of the
            vocabulary, or lacks a time that is needed.
    """
    check_measured(file, assumed.treatment)
    counts = _by_stage(file.layers, assumed.stages, "layers")
    layer, extras = {}, [dict[PassKind, float]() for _ in counts]
    for kind in CHUNKED_KINDS:
        if kind not in _passes_of_layers(file, assumed):
            continue
        times = _by_stage(file.costs.passes.get(kind), assumed.stages, kind)
        worth = assumed.weighed(kind, counts)
        layer[kind] = _layer_time(kind, times, worth, assumed)
        for extra, time, count in zip(extras, times, worth, strict=True):
            extra[kind] = time - count * layer[kind]
    others = {kind: file.costs.passes[kind] for kind in assumed.others}
    if "U" in file.costs.passes:
        others["U"] = file.costs.passes["U"]
    return replace(
        assumed,
        layer=layer,
        extras=extras,
        others=others,
        comms=file.costs.comms,
        exchanges=file.costs.exchanges,
        weights={kind: own for kind, own in assumed.weights.items() if kind in layer},
    )


def _passes_of_layers(file: CostFile, assumed: StageCosts) -> set[PassKind]:
    """Return the kinds of passes of layers whose measured times are used.

    A file has no times of W if the backward was not split, and no times of R if R was part of B.
    Times of R are used only if layers are computed again.
    """
    kinds: set[PassKind] = {"F", "B"}
    measured: set[PassKind] = {"W", "R"} if "R" in assumed.layer else {"W"}
    return kinds | measured.intersection(file.costs.passes)


def _layer_time(
    kind: PassKind, times: Sequence[float], counts: Sequence[float], assumed: StageCosts
) -> float:
    """Return the time of one layer in a kind of pass, as the mean over stages."""
    busy = [any(extra.values()) for extra in assumed.extras]
    pure = [not other and count > 0 for other, count in zip(busy, counts, strict=True)]
    time = total = 0.0
    for own, count, extra, alone in zip(times, counts, assumed.extras, pure, strict=True):
        if alone or not any(pure):
            flops = count * assumed.layer.get(kind, 1.0)  # R has no other work
            time += own * flops / max(flops + extra[kind], 1.0)
            total += count
    return time / max(total, 1.0)


def _by_stage(value: Time | None, stages: Stages, name: str) -> list[float]:
    """Return the entries of a table by rank and chunk in the order of the stages.

    Raises:
        ValueError: if there is no table, or the table is for other ranks or chunks.
    """
    table = [
        [own] if isinstance(own, (int, float)) else list(own)
        for own in (value if isinstance(value, Sequence) else ())
    ]
    ranks, chunks = (1 + max(numbers) for numbers in zip(*stages, strict=True))
    if [len(row) for row in table] != [chunks] * ranks:
        raise ValueError(
            f"{name} is no table for {counted(ranks, 'rank')} with "
            f"{counted(chunks, 'chunk')} each: measure with the schedule that is planned for"
        )
    return [table[rank][chunk] for rank, chunk in stages]
