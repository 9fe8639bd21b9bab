"""CUDA graphs of passes: the flag, and the flags that prevent graphs.

A pass is captured as a graph of its kernels, which the host then launches together. Without a graph
the host launches kernel by kernel.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from megatron.data.settings import DocumentSettings
from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.rules import notes, notes_in
from megatron.kernels.settings import GroupedProductSettings
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.experts.settings import BalanceSettings
from megatron.layers.recompute_settings import RecomputeSettings
from megatron.layers.settings import AttentionSettings, PositionSettings
from megatron.model.settings import BlockSettings
from megatron.parallel.settings import ExpertRankSettings, TensorRankSettings
from megatron.run.dry_run import DryRunSettings
from megatron.run.experts import is_mixture
from megatron.run.offload import HOST, OFFLOAD
from megatron.run.pairs import hides_collectives
from megatron.run.parallelism import on_cuda
from megatron.schedules.settings import OffloadSettings, SliceSettings


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class GraphSettings:
    """How the host launches passes."""

    cuda_graph_impl: Literal["none", "local"] = flag("none",
        "local: capture the passes of stages and of the vocabulary as CUDA graphs and replay them, "
        "so that a GPU with short passes does not wait for its host. Each microbatch in flight has "
        "memory of its own for the intermediate results of its passes.")
# fmt: on


def captures_passes(flags: Flags) -> bool:
    """Return whether passes are captured as graphs, in a dry run on the GPU that it is about."""
    asked = flags[GraphSettings].cuda_graph_impl == "local"
    on_gpus = flags[DryRunSettings].dry_run or on_cuda(flags)
    return asked and on_gpus and could_capture(flags)


def could_capture(flags: Flags) -> bool:
    """Return whether a GPU could capture passes as graphs, if it were asked to."""
    return not any(_obstacles(flags))


def _obstacles(flags: Flags) -> Iterator[str]:
    """Yield a line on each flag that prevents graphs of passes, with the reason.

    A dimension that ``auto`` leaves open prevents nothing: its choices do, each in its alternative
    of the run.
    """
    for option, share in (
        ("--attention-dropout", flags[AttentionSettings].attention_dropout),
        ("--hidden-dropout", flags[BlockSettings].hidden_dropout),
    ):
        if share:
            yield f"the host seeds {option} {share:g} anew in every pass"
    if flags[PositionSettings].has_slopes:
        yield "--position-embedding-type alibi copies slopes from the host in every pass"
    if flags[DocumentSettings].reset_attention_mask:
        yield "--reset-attention-mask makes the host give every microbatch other bounds"
    yield from _obstacles_in_eight_bits(flags)
    if flags[SliceSettings].num_seq_splits > 1:
        yield "--num-seq-splits makes attention of every slice see another number of keys"
    if hides_collectives(flags):
        yield "--tp-comm-overlap lets passes switch within a pair, and a graph runs as a whole"
    if is_mixture(flags):
        yield from _obstacles_of_experts(flags)
    yield from _obstacles_in_memory(flags)


def _obstacles_of_experts(flags: Flags) -> Iterator[str]:
    """Yield a line on each flag of a mixture whose passes depend on numbers that the host reads."""
    ranks, balance = flags[ExpertRankSettings], flags[BalanceSettings]
    tensor = flags[TensorRankSettings].tensor_model_parallel_size
    if ranks.expert_model_parallel_size > 1 or ranks.expert_tensor_parallel_size not in (
        None,
        tensor,
    ):
        yield (
            "--expert-model-parallel-size and --expert-tensor-parallel-size spread experts over "
            "ranks, and the host waits for the number of rows that arrive"
        )
    package = flags[GroupedProductSettings].moe_grouped_products
    if package != "local":
        yield f"--moe-grouped-products {package} takes the experts' numbers of rows from the host"
    if balance.moe_input_jitter_eps:
        yield "the host seeds --moe-input-jitter-eps anew in every pass"
    if balance.moe_router_force_load_balancing:
        yield "the host seeds --moe-router-force-load-balancing anew in every pass"
    if balance.is_by_sinkhorn:
        yield (
            "--moe-router-load-balancing-type sinkhorn makes the host wait for every round, and "
            "decide whether another one follows"
        )
    if "global_aux_loss" in balance.losses:
        yield (
            "--moe-router-load-balancing-type global_aux_loss adds up the choices of all earlier "
            "microbatches, and a graph knows its own"
        )


def _obstacles_in_eight_bits(flags: Flags) -> Iterator[str]:
    """Yield a line on each flag beside which passes in 8 bits cannot be captured."""
    own = flags[EightBitSettings]
    if own.fp8_format is None:
        return
    if own.transformer_impl == "transformer_engine":
        yield "--transformer-impl transformer_engine has weights of 8 bits in memory of its own"
    if own.fp8_param_gather:
        yield "--fp8-param-gather brings weights of 8 bits anew while passes run"
    if is_mixture(flags):
        yield (
            "--fp8-format beside --num-experts: no test on CPUs can repeat products of experts in "
            "8 bits, whose numbers of rows the host reads there"
        )


def _obstacles_in_memory(flags: Flags) -> Iterator[str]:
    """Yield a line on each flag that changes what a pass keeps, after the pass."""
    if flags[RecomputeSettings].recompute_ahead is not None:
        yield "--recompute-ahead computes layers again in a pass that has no graph"
    if flags[OffloadSettings].cpu_offload and not HOST.is_open(flags):
        yield f"{OFFLOAD} lets go of memory to which the kernels of a graph would write"


@notes
def _launched_one_by_one(flags: Flags) -> Iterator[str]:
    if flags[GraphSettings].cuda_graph_impl == "local":
        for obstacle in _obstacles(flags):
            yield f"--cuda-graph-impl local changes nothing: {obstacle}"


@notes_in("real")
def _on_this_machine(flags: Flags) -> Iterator[str]:
    if flags[GraphSettings].cuda_graph_impl == "local" and not on_cuda(flags):
        yield "--cuda-graph-impl local changes nothing: ranks on CPUs launch nothing"


GRAPH_NOTES: Final = (_launched_one_by_one,)
