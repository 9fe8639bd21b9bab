"""``--cp-comm-type auto``: how context-parallel ranks see all tokens, by predicted seconds.

The passes of a microbatch are counted under every exchange that the run could take, and priced for
the job's GPUs and links. No plan is needed for that: the exchange changes how long a pass of the
layers takes, and neither the passes nor their order.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Final

import torch

from megatron.config.parallel_config import ParallelConfig
from megatron.config.parallelism import ContextChoice
from megatron.config.run_config import RunConfig
from megatron.parallel.context import CONTEXT_EXCHANGES
from megatron.planning.candidate import Candidate
from megatron.planning.run_plan import asked, candidates
from megatron.schedules.catalogue import TRAITS, compared_schedules
from megatron.schedules.passes import CHUNKED_KINDS
from megatron.simulator.units import TIME

FLAG: Final = "--cp-comm-type auto"


def with_context_exchange(config: RunConfig) -> RunConfig:
    """Return the run with the exchange of context-parallel ranks that takes the least time.

    A run that names its exchange is returned unchanged. All ranks find the same exchange: it
    follows from the flags and the kind of GPU. Where the GPU is not known, or the run is in fp32,
    nothing tells exchanges apart, so the first one, all_gather, is taken.
    """
    choices = config.context_choices
    if not choices:
        return config
    if len(choices) == 1:
        return _with(config, choices, f"{FLAG} takes {choices[0].exchange}: no other one goes")
    if config.parallel.gpu is None or config.train.dtype == torch.float32:
        reason = "times need a known GPU and 16 bits"
        return _with(config, choices, f"{FLAG} takes {choices[0].exchange}: {reason}")
    times = {choice: _seconds(_with(config, [choice])) for choice in choices}
    best = sorted(times, key=times.__getitem__)
    told = ", ".join(f"{own.exchange} {TIME.write(time)}" for own, time in times.items())
    found = _with(config, best)
    layouts = [own.parallel for own in found.alternatives if own.parallel.num_seq_splits > 1]
    of_slices = {own.context_exchange for own in layouts} - {best[0].exchange}
    others = f" for whole microbatches and {', '.join(of_slices)} for slices" if of_slices else ""
    note = f"{FLAG} takes {best[0].exchange}{others}; passes of a microbatch on one rank: {told}"
    return replace(found, notes=(*found.notes, note))


def _with(config: RunConfig, best: Sequence[ContextChoice], *notes: str) -> RunConfig:
    """Return the run with the first of its choices, which are in the order of preference.

    An alternative with slices has the first choice that is no ring (``config/slices.py`` refuses
    slices with rings). Without such a choice it is dropped.
    """

    def chosen(layout: ParallelConfig) -> Iterator[ParallelConfig]:
        for exchange, heads_size in best:
            if layout.num_seq_splits == 1 or not CONTEXT_EXCHANGES[exchange].has_ring:
                yield replace(layout, context_exchange=exchange, context_heads_size=heads_size)

    return replace(
        config,
        parallel=next(chosen(config.parallel)),
        alternatives=tuple(
            own._replace(parallel=parallel)
            for own in config.alternatives
            for parallel in islice(chosen(own.parallel), 1)
        ),
        context_choices=(),
        notes=(*config.notes, *notes),
    )


def _first(config: RunConfig) -> Candidate:
    """Return the run's schedule; for ``auto``, the first schedule whose stages suit the layers."""
    parallel = config.parallel
    if TRAITS[parallel.pipeline_schedule].compares:
        for name in compared_schedules(parallel.memory_limit):
            with suppress(ValueError):
                return candidates(config, names=(name,))[0]
    return asked(config)[0]


def _seconds(config: RunConfig) -> float:
    """Return the time of a microbatch's passes of layers on the rank where they take longest.

    Any schedule tells which exchange is the fastest, so the first one that can be had is looked at.
    """
    counted = replace(config.parallel, measured_costs=None)
    first = _first(replace(config, parallel=counted, alternatives=()))
    costs, ranks = first.request.costs, first.request.ranks
    kinds = [kind for kind in CHUNKED_KINDS if kind in costs.passes]
    chunks = range(len(first.layers) // ranks)
    return max(
        sum(costs.time(kind, rank, chunk) for kind in kinds for chunk in chunks)
        for rank in range(ranks)
    )
