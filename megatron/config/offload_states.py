"""States of the optimizer on the host: Megatron-LM's flags, and what they exclude."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from megatron.config.parallelism import on_cuda
from megatron.config.train import TrainFlags
from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.ranges import PROBABILITY
from megatron.flags.rules import notes, notes_in, refuses
from megatron.optimizer.settings import HostStates, OptimizerSettings

STATES: Final = "--optimizer-cpu-offload"


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class StateOffloadFlags:
    """States of the optimizer on the host."""

    optimizer_cpu_offload: bool = flag(False,
        "Keep master weights and moments in the host's memory, and update them on the CPU.",
        idle_with="--skip-train")
    optimizer_offload_fraction: float = flag(1.0,
        "Share of a rank's parameters whose states are on the host. Whole parameters are chosen, "
        "so it may be a little more.", PROBABILITY, idle_without=STATES)
    overlap_cpu_optimizer_d2h_h2d: bool = flag(False,
        "Copy gradients to the host and weights to the device while the CPU updates other "
        "parameters.", idle_without=STATES)
    no_pin_cpu_grads: bool = flag(False,
        "Do not pin the host's memory for gradients. Copies then hold up the host, and are slower.",
        idle_without=STATES)
    no_pin_cpu_params: bool = flag(False,
        "Do not pin the host's memory for weights. Copies then hold up the host, and are slower.",
        idle_without=STATES)
# fmt: on


def host_states(flags: Flags) -> HostStates | None:
    """Return which states of the optimizer are on the host; ``None``: none are."""
    own = flags[StateOffloadFlags]
    asked = own.optimizer_cpu_offload and not flags[TrainFlags].skip_train
    if not asked or own.optimizer_offload_fraction == 0:
        return None
    return HostStates(
        own.optimizer_offload_fraction,
        own.overlap_cpu_optimizer_d2h_h2d,
        not own.no_pin_cpu_grads,
        not own.no_pin_cpu_params,
    )


@refuses
def _muon(flags: Flags) -> Iterator[str]:
    if host_states(flags) is not None and flags[OptimizerSettings].optimizer == "muon":
        yield (
            f"{STATES} beside --optimizer muon: the matrix products of Muon's updates would run on "
            "the CPU; take --optimizer adam or sgd, or leave it out"
        )


@notes
def _no_share(flags: Flags) -> Iterator[str]:
    own = flags[StateOffloadFlags]
    if own.optimizer_cpu_offload and own.optimizer_offload_fraction == 0:
        yield f"{STATES} changes nothing with --optimizer-offload-fraction 0"


@notes_in("real")
def _unpinned(flags: Flags) -> Iterator[str]:
    own = flags[StateOffloadFlags]
    if host_states(flags) is None or on_cuda(flags):
        return
    for name, given in (
        ("--no-pin-cpu-grads", own.no_pin_cpu_grads),
        ("--no-pin-cpu-params", own.no_pin_cpu_params),
    ):
        if given:
            yield f"{name} changes nothing: only memory that a GPU copies from or to is pinned"
