"""Which ranks have which experts: the rules of the flags."""

from megatron.flags.groups import Flags
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.settings import ExpertRankSettings, TensorRankSettings
from megatron.run.experts import is_mixture


def expert_ranks(flags: Flags) -> ExpertRankSettings:
    """Return the ranks of experts; for a model without experts, the defaults."""
    return flags[ExpertRankSettings] if is_mixture(flags) else ExpertRankSettings()


def sizes_of_experts(flags: Flags) -> tuple[int, int]:
    """Return e and etp: ranks over which experts are spread, and ranks that share one."""
    own, tensor = flags[ExpertRankSettings], flags[TensorRankSettings].size
    return own.expert_model_parallel_size, own.expert_tensor_parallel_size or tensor


def replicas_exchange(flags: Flags) -> bool:
    """Return whether tokens travel between replicas, to experts."""
    size, tensor = sizes_of_experts(flags)
    alike = flags[TensorRankSettings].size * flags[ContextRankSettings].size
    return is_mixture(flags) and size * tensor > alike
