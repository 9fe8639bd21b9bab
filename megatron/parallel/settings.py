"""The settings of parallel axes, which say what the ranks of an axis share."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch

from megatron.flags.declare import flag, spelled, spells
from megatron.flags.groups import Flags
from megatron.flags.ranges import COUNT, MINUTES, RANKS, up_to
from megatron.flags.rules import notes
from megatron.parallel.grid import Order
from megatron.parallel.links import Link

Dispatcher = Literal["allgather", "alltoall", "flex"]
"""How tokens travel: by gathering, by an exchange, or by the package DeepEP (``deep_ep.py``). The
words are Megatron's."""

MOST_BLOCKS: Final = 64
"""Thread blocks of a communicator without a limit: NCCL's largest number of channels."""

_BLOCKS: Final = up_to(MOST_BLOCKS)
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


@dataclass(frozen=True)
class PipelineRankSettings:
    """Ranks that have different stages."""

    # fmt: off
    pipeline_model_parallel_size: int = flag(1, "Pipeline ranks.", RANKS)
    # fmt: on

    @property
    def size(self) -> int:
        """Pipeline ranks p."""
        return self.pipeline_model_parallel_size


@dataclass(frozen=True)
class TensorRankSettings:
    """Ranks that share every layer."""

    # fmt: off
    tensor_model_parallel_size: int = flag(1,
        "Tensor-parallel ranks. They share every layer, by its heads and columns.", RANKS)
    sequence_parallel: bool = flag(False,
        "Let tensor-parallel ranks also share the tokens, wherever they do not share a layer.")
    # fmt: on

    @property
    def size(self) -> int:
        """Tensor-parallel ranks t."""
        return self.tensor_model_parallel_size

    def resolved(self) -> "TensorRankSettings":
        """Return the settings of a run; a rank alone shares no tokens."""
        return replace(self, sequence_parallel=self.sequence_parallel and self.size > 1)


@dataclass(frozen=True)
class DeviceSettings:
    """The devices of the ranks, and what connects them."""

    # fmt: off
    device: Literal["auto", "cpu", "cuda"] = flag("auto",
        "Device to compute on; auto takes CUDA if there is a CUDA device.")
    distributed_backend: Literal["nccl", "gloo"] | None = flag(None, "Communication library.",
        unset="nccl on CUDA, gloo on CPUs")
    distributed_timeout_minutes: int = flag(10, "Minutes that a collective may wait.", MINUTES)
    deterministic_mode: bool = flag(False,
        "Add up in one order on GPUs too, so that two runs of a command line on the same GPUs "
        "agree to the last bit. Slower.")
    # fmt: on

    @property
    def on_cuda(self) -> bool:
        """Whether the ranks compute on CUDA devices."""
        return self.device != "cpu" and torch.cuda.is_available()

    def resolved(self) -> "DeviceSettings":
        """Return the settings of a run on this machine: neither value is open."""
        if self.on_cuda:
            return replace(self, device="cuda", distributed_backend="nccl")
        return replace(self, device="cpu", distributed_backend="gloo")


@dataclass(frozen=True)
class ReplicaSettings:
    """Data parallelism: as many replicas of the model as the ranks of the job make.

    Attributes:
        size: number of ranks with the same parameters: d x c, for d replicas that each split a
            sequence into c parts.
        gathers_eight_bits: gather the weights of layers that multiply in 8 bits as 8 bits; only
            with ``shard_optimizer``.
    """

    # fmt: off
    overlap: bool = spelled(False, spells("--overlap-grad-reduce", True,
        "Reduce gradients over the replicas while passes run, in every schedule."))
    ddp_bucket_size: int | None = flag(None,
        "Parameters of a bucket. The gradients of a bucket are reduced together.", up_to(10**12),
        unset="400,000,000, or 1,000,000 for each replica if that is more",
        excludes="--ddp-num-buckets")
    ddp_num_buckets: int | None = flag(None,
        "Buckets of a rank: another way to give their size. The number is approximate, because no "
        "parameter is cut.", COUNT,
        unset="by --ddp-bucket-size")
    shard_optimizer: bool = spelled(False, spells("--use-distributed-optimizer", True,
        "ZeRO-1: every replica keeps the optimizer's state of its own share of the parameters "
        "only. It updates this share, and gathers the other shares."))
    overlap_gather: bool = spelled(False, spells("--overlap-param-gather", True,
        "Gather updated parameters while passes run that do not read them."))
    grad_reduce_in_bf16: bool = flag(False,
        "Reduce gradients in bf16, not in fp32. On a rank they add up in fp32; in Megatron-LM this "
        "flag makes them add up in bf16 too, as --use-precision-aware-optimizer "
        "--main-grads-dtype bf16 does here.")
    rank_order: Order | None = flag(None,
        "Which coordinate of consecutive ranks changes first, after the tensor and context "
        "coordinates: the replica, as in Megatron, or the pipeline rank.",
        excludes="--use-tp-pp-dp-mapping",
        unset="so that fewest hops of a pipeline leave a machine, or with experts that replicas "
        "share, the replica")
    order: Order = spelled("tp-dp-pp", spells("--use-tp-pp-dp-mapping", "tp-pp-dp",
        "Give consecutive numbers to the ranks of a pipeline, not to the ranks that are replicas "
        "of each other."))
    # fmt: on

    size: int = 1
    gathers_eight_bits: bool = False

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Dtype in which gradients are reduced; ``None``: the dtype in which they add up."""
        return torch.bfloat16 if self.grad_reduce_in_bf16 else None


@dataclass(frozen=True)
class BlockSettings:
    """Thread blocks of NCCL, by the use of a communicator.

    A collective of the vocabulary layers waits beside passes for its last rank, longer than it
    moves data. So it has only as many blocks as a network of 400 Gb/s needs.

    Attributes:
        control: blocks of sums of a few numbers outside the schedule. Few blocks save memory: every
            block of a communicator has buffers of its own, and a rank has several such
            communicators.
    """

    # fmt: off
    nccl_max_ctas_p2p: int = flag(4,
        "Thread blocks that NCCL may use for the messages of a link between stages.", _BLOCKS)
    nccl_max_ctas_vocab: int = flag(4,
        "Thread blocks that NCCL may use for the collectives of the vocabulary layers.", _BLOCKS)
    nccl_max_ctas_data: int = flag(16,
        "Thread blocks that NCCL may use to reduce gradients and to gather parameters.", _BLOCKS)
    # fmt: on

    control: int = 2

    def of(self, use: str) -> int | None:
        """Return the limit for a use of groups, by its first word; ``None``: NCCL's own.

        Collectives of tensor and context parallelism and exchanges of experts have no limit: mostly
        a pass waits for them. (Some run during a product or during attention, and take
        multiprocessors from it.)
        """
        limits = {
            "transfers": self.nccl_max_ctas_p2p,
            "vocabulary": self.nccl_max_ctas_vocab,
            "gradients": self.nccl_max_ctas_data,
            "ends": self.nccl_max_ctas_data,
            "control": self.control,
        }
        return limits.get(use.partition(" ")[0])

    def at_once(self, links: Collection[Link], pipeline_rank: int, of_passes: int) -> int:
        """Return the most blocks that may wait on the GPU of a pipeline rank at the same time.

        Every link may have a message under way, and each lane one collective.

        Args:
            links: all links of the job.
            pipeline_rank: pipeline rank of the GPU.
            of_passes: collectives of passes, without a limit, that may be under way together.
        """
        own = sum(pipeline_rank in link.ends for link in links)
        collectives = self.nccl_max_ctas_vocab + self.nccl_max_ctas_data + MOST_BLOCKS * of_passes
        return own * self.nccl_max_ctas_p2p + collectives


@notes
def _no_parts(flags: Flags) -> Iterator[str]:
    own = flags[TensorRankSettings]
    if own.sequence_parallel and own.size == 1:
        yield (
            "--sequence-parallel changes nothing at --tensor-model-parallel-size 1: the sequence "
            "is split over tensor-parallel ranks"
        )
