"""The settings of parallel axes, which say what the ranks of an axis share."""

from dataclasses import dataclass
from typing import Final, Literal

from megatron.flags.declare import flag
from megatron.flags.ranges import RANKS, up_to
from megatron.parallel.experts import Dispatcher

_EXPERTS: Final = "--num-experts"
_FLEX: Final = "--moe-token-dispatcher-type flex"


@dataclass(frozen=True)
class ExpertRankSettings:
    """Ranks that have the experts of a layer."""

    # fmt: off
    expert_model_parallel_size: int = flag(1,
        "Ranks over which the experts of a layer are spread, each with equally many. They are "
        "tensor-, context- or data-parallel ranks of a stage, which have different tokens.", RANKS,
        idle_without=_EXPERTS)
    expert_tensor_parallel_size: int | None = flag(None,
        "Ranks that share an expert, by its columns.", RANKS,
        unset="--tensor-model-parallel-size", idle_without=_EXPERTS)
    moe_token_dispatcher_type: Dispatcher = flag("allgather",
        "How tokens come to experts on other ranks. allgather: these ranks get all tokens of each "
        "other. alltoall: a token goes to the ranks of its experts only; the host waits until they "
        "have told each other how many tokens come. flex: by the package DeepEP, on GPUs in bf16; "
        "a token goes once to each rank of its experts, and the host waits as with alltoall.",
        idle_without=_EXPERTS)
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] = flag("deepep",
        "What moves tokens: the class Buffer of the package DeepEP. hybridep, another class of "
        "that package, is refused.", idle_without=_FLEX)
    moe_deepep_num_sms: int = flag(20,
        "Multiprocessors of a GPU that move tokens; an even number.", up_to(1024),
        idle_without=_FLEX)
    # fmt: on

    @property
    def visits(self) -> bool:
        """Whether tokens travel by the package DeepEP."""
        return self.moe_token_dispatcher_type == "flex" and self.expert_model_parallel_size > 1
