"""The words of a dry run on measured runs: how far predictions were off for runs like this one."""

from collections.abc import Iterator
from itertools import starmap

from megatron.schedules.counted import counted
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.accuracy import (
    ALLOCATED_WITHIN,
    OWN,
    PAPER,
    PUBLISHED,
    RunClass,
    TimeErrors,
)
from megatron.training.planning.forecast_run import RunForecast


def checked(found: RunForecast) -> str:
    """Return how far predictions were off for measured runs like this run, or the nearest runs."""
    config, parallel = found.config, found.config.parallel
    family, shared = found.gpu.name.partition("-")[0], parallel.tensor_size > 1
    own = RunClass(family, shared, across=parallel.placement.machines > 1)
    known = {own: PUBLISHED[own]} if own in PUBLISHED else _nearest(own)
    found_out = [*_of_this_code(own), *starmap(_of_others, known.items())]
    alone = own in OWN and parallel.grid.world_size == 1
    runs, measured = "; ".join(found_out), own in PUBLISHED or alone
    if not measured:
        runs = f"nothing like this ({own}) was measured" + (
            f"; the nearest: {runs}" if runs else ""
        )
    split = TREATMENTS[parallel.vocab_parallel].is_sharded and own not in PAPER
    experts = config.model.num_experts > 0 and not alone
    lacking = ["split the vocabulary"] * split + ["had experts"] * experts
    without = f"; none of them {' or '.join(lacking)}" if lacking and measured else ""
    return (
        f"checked: {runs}{without}. Memory is within {ALLOCATED_WITHIN:.1%} of what this project's "
        "code allocates"
    )


def _of_others(like: RunClass, errors: TimeErrors) -> str:
    """Return the errors of published runs of a class in words."""
    return (
        f"{counted(errors.runs, 'run')} of Megatron-LM that others published ({like}) were off by "
        f"{errors.mean:g}% in the mean, {errors.most:g}% at most"
    )


def _of_this_code(own: RunClass) -> Iterator[str]:
    """Yield the errors of this project's own runs of a class, if there are any, in words."""
    if errors := OWN.get(own):
        yield (
            f"{counted(errors.runs, 'run')} of this code on one {own.gpu}, for seconds, were off "
            f"by {errors.mean:g}% in the mean, {errors.most:g}% at most, and most were faster than "
            "predicted (docs/predictions.md)"
        )


def _nearest(own: RunClass) -> dict[RunClass, TimeErrors]:
    """Return the classes on the same kind of GPU with one difference: in sharing or in machines."""
    return {
        like: errors
        for like, errors in PUBLISHED.items()
        if like.gpu == own.gpu and (like.shared == own.shared) != (like.across == own.across)
    }
