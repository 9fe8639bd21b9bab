"""States of the optimizer on the host."""

from megatron.flags.groups import Flags
from megatron.optimizer.settings import HostStateSettings
from megatron.run.train import TrainSettings


def host_states(flags: Flags) -> HostStateSettings | None:
    """Return which states of the optimizer are on the host; ``None``: none are."""
    own = flags[HostStateSettings]
    asked = own.optimizer_cpu_offload and not flags[TrainSettings].skip_train
    return own if asked and own.optimizer_offload_fraction else None
