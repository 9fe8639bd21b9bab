"""Runs that agree to the last bit on GPUs: flags and variables that stand against it."""

from collections.abc import Iterator

from megatron.flags.groups import Flags
from megatron.flags.rules import notes_in, refuses, refuses_in
from megatron.parallel.environment import variables_of_any_order
from megatron.parallel.settings import DeviceSettings
from megatron.run.expert_ranks import expert_ranks
from megatron.run.log import LogSettings
from megatron.run.parallelism import on_cuda
from megatron.schedules.settings import PlanSettings

_MODE = "--deterministic-mode"


@refuses
def _plans_by_the_clock(flags: Flags) -> Iterator[str]:
    """Refuse plans that differ from run to run: gradients are summed in the order of the passes."""
    if not flags[DeviceSettings].deterministic_mode:
        return
    if flags[LogSettings].replan:
        yield (
            f"--replan does not go with {_MODE}: the new plan follows from measured times, and the "
            "order in which gradients are summed from the plan; save the costs with "
            "--save-measured-costs, and give them to the run with --measured-costs"
        )
    if flags[PlanSettings].search_seconds is not None:
        yield (
            f"--search-seconds {flags[PlanSettings].search_seconds:g} does not go with {_MODE}: a "
            "clock that ends the search decides the plan, and with it the order in which gradients "
            "are summed; leave it out"
        )


@refuses
def _packages_of_any_order(flags: Flags) -> Iterator[str]:
    if flags[DeviceSettings].deterministic_mode and expert_ranks(flags).visits:
        yield (
            f"--moe-token-dispatcher-type flex does not go with {_MODE}: DeepEP promises no order "
            "of the tokens that arrive; take alltoall"
        )


@refuses_in("real")
def _variables(flags: Flags) -> Iterator[str]:
    if flags[DeviceSettings].deterministic_mode and on_cuda(flags):
        yield from (f"{_MODE}: {line}" for line in variables_of_any_order())


@notes_in("dry")
def _predicted_as_without(flags: Flags) -> Iterator[str]:
    if flags[DeviceSettings].deterministic_mode:
        yield f"{_MODE} changes nothing in a dry run: kernels are counted as without it"
