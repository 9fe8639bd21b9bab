"""Which ranks have which experts: the rules of the flags."""

from megatron.flags.groups import Flags
from megatron.parallel.settings import ExpertRankSettings
from megatron.run.experts import is_mixture
from megatron.run.parallelism import ParallelFlags


def expert_ranks(flags: Flags) -> ExpertRankSettings:
    """Return the ranks of experts; for a model without experts, the defaults."""
    return flags[ExpertRankSettings] if is_mixture(flags) else ExpertRankSettings()


def sizes_of_experts(flags: Flags) -> tuple[int, int]:
    """Return e and etp: ranks over which experts are spread, and ranks that share one."""
    own, tensor = flags[ExpertRankSettings], flags[ParallelFlags].tensor_model_parallel_size
    return own.expert_model_parallel_size, own.expert_tensor_parallel_size or tensor


def replicas_exchange(flags: Flags) -> bool:
    """Return whether tokens travel between replicas, to experts."""
    (size, tensor), sizes = sizes_of_experts(flags), flags[ParallelFlags]
    alike = sizes.tensor_model_parallel_size * sizes.context_parallel_size
    return is_mixture(flags) and size * tensor > alike
