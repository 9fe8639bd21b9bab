"""The words of a dry run on measured runs: how far predictions were off for runs like this one."""

from itertools import starmap
from typing import Final

from megatron.planning.forecast_run import RunForecast
from megatron.schedules.counted import counted
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.accuracy import (
    ALLOCATED_WITHIN,
    OWN,
    PAPER,
    PUBLISHED,
    SHARED,
    RunClass,
    TimeErrors,
    nearest_shared,
)

_BY_OTHERS: Final = ", every family by constants that were fitted to the other families"


def checked(found: RunForecast) -> str:
    """Return how far predictions were off for measured runs like this run, or the nearest runs.

    Only runs to which no constant of the model was fitted are named, and always this project's own.
    """
    config, parallel = found.config, found.config.parallel
    family, shared = found.gpu.name.partition("-")[0], parallel.tensor.size > 1
    own = RunClass(family, shared, across=parallel.domains.machines > 1)
    known = {own: PUBLISHED[own]} if own in PUBLISHED else _nearest(own)
    alone = own in OWN and parallel.grid.world_size == 1
    found_out = [*starmap(_of_others, known.items()), *starmap(_of_this_code, OWN.items())]
    if alone:
        found_out.reverse()
    runs, measured = "; ".join(found_out), own in PUBLISHED or alone
    if not measured:
        runs = f"nothing like this ({own}) was measured; the nearest: {runs}"
    split = TREATMENTS[parallel.vocab_parallel].is_sharded and own not in PAPER
    experts = config.model.experts.num_experts > 0 and not alone
    lacking = ["split the vocabulary"] * split + ["had experts"] * experts
    families = _of_families(found)
    without = f"; none of them {' or '.join(lacking)}" if lacking and measured else ""
    return (
        f"checked: {runs}{without}{families}. No constant was fitted to "
        f"{'the other' if _BY_OTHERS in families else 'these'} runs, but all were seen while the "
        "model was made. Memory is within "
        f"{ALLOCATED_WITHIN:.1%} of what this project's code allocates on pretended GPUs"
    )


def _of_families(found: RunForecast) -> str:
    """Return the errors of the nearest class of runs by families of models, and their direction."""
    config = found.config
    kind = nearest_shared(
        found.gpu.name,
        eight_bits=config.train.eight_bits is not None,
        experts=config.model.experts.num_experts > 0,
    )
    if kind is None:
        return ""
    errors = SHARED[kind]
    aside = "faster" if errors.signed > 0 else "slower"
    return (
        f"; {counted(errors.runs, 'iteration')} of NeMo and Megatron-Bridge with "
        f"{counted(errors.families, 'family')} of models ({kind}) were off by {errors.mean:g}% in "
        f"the mean, {abs(errors.most):g}% at most, and in the mean {abs(errors.signed):g}% "
        f"{aside} than predicted{'' if kind.experts else _BY_OTHERS}"
    )


def _of_others(like: RunClass, errors: TimeErrors) -> str:
    """Return the errors of published runs of a class in words."""
    return (
        f"{counted(errors.runs, 'run')} of Megatron-LM that others published ({like}) "
        f"{_off(errors)}"
    )


def _of_this_code(own: RunClass, errors: TimeErrors) -> str:
    """Return the errors of this project's own runs of a class in words."""
    return (
        f"{counted(errors.runs, 'run')} of this code on one {own.gpu}, for seconds, "
        f"{_off(errors)}, and most were faster than predicted (docs/predictions.md)"
    )


def _off(errors: TimeErrors) -> str:
    """Return the errors of one run, or of several."""
    if errors.runs == 1:
        return f"was off by {errors.most:g}%"
    return f"were off by {errors.mean:g}% in the mean, {errors.most:g}% at most"


def _nearest(own: RunClass) -> dict[RunClass, TimeErrors]:
    """Return the classes on the same kind of GPU with one difference: in sharing or in machines."""
    return {
        like: errors
        for like, errors in PUBLISHED.items()
        if like.gpu == own.gpu and (like.shared == own.shared) != (like.across == own.across)
    }
