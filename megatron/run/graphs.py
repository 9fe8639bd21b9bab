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
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.recompute_settings import RecomputeSettings
from megatron.layers.settings import AttentionSettings
from megatron.model.settings import BlockSettings, FurtherTokensSettings
from megatron.parallel.context_settings import ContextRankSettings
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
        "local: capture F, B and W of every stage as CUDA graphs and replay them, so that a GPU "
        "with short passes does not wait for its host. Each microbatch in flight has memory of its "
        "own for the intermediate results of a pass.")
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
    documents = flags[DocumentSettings]
    for option, share in (
        ("--attention-dropout", flags[AttentionSettings].attention_dropout),
        ("--hidden-dropout", flags[BlockSettings].hidden_dropout),
    ):
        if share:
            yield f"the host seeds {option} {share:g} anew in every pass"
    if flags[ContextRankSettings].size > 1:
        yield (
            "--context-parallel-size shares sequences, and attention over shared sequences has "
            "never been captured"
        )
    if documents.reset_position_ids or documents.reset_attention_mask:
        yield "--reset-position-ids and --reset-attention-mask give every microbatch other bounds"
    if flags[FurtherTokensSettings].mtp_num_layers:
        yield "--mtp-num-layers makes another stage read further embeddings"
    if flags[EightBitSettings].fp8_format is not None:
        yield "--fp8-format makes the host choose scales in every pass"
    if flags[SliceSettings].num_seq_splits > 1:
        yield "--num-seq-splits makes attention of every slice see another number of keys"
    if hides_collectives(flags):
        yield "--tp-comm-overlap lets passes switch within a pair, and a graph runs as a whole"
    if is_mixture(flags):
        yield "--num-experts makes layers leave losses of their own, which no graph hands over"
    yield from _obstacles_in_memory(flags)


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


@notes_in("dry")
def _not_predicted(flags: Flags) -> Iterator[str]:
    if flags[GraphSettings].cuda_graph_impl == "local" and not any(_obstacles(flags)):
        yield (
            "--cuda-graph-impl local changes nothing in a dry run, which counts neither the time "
            "that the host saves nor the memory that slots do not share"
        )


GRAPH_NOTES: Final = (_launched_one_by_one,)
