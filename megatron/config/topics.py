"""All topics: their groups of flags, and their rules.

A rule yields a line on every mistake that it finds. The line begins with the flag at fault and
names the way out.
"""

from typing import Final

from megatron.config.checkpoint import CHECKPOINT_NOTES, CheckpointFlags
from megatron.config.choices import CHOICE_RULES
from megatron.config.cluster import (
    BACKEND_RULES,
    CLUSTER_NOTES,
    CLUSTER_OF_MACHINE,
    DEVICE_RULES,
    ClusterFlags,
)
from megatron.config.corpora import CORPUS_NOTES, CORPUS_RULES, DRY_RUN_NOTES, FILE_RULES
from megatron.config.data import CorpusFlags, DataFlags
from megatron.config.deep_ep import DEEP_EP_DEVICE_RULES, DEEP_EP_RULES
from megatron.config.deepspeed_file import deepspeed_file
from megatron.config.eight_bit_sizes import EIGHT_BIT_SIZE_RULES
from megatron.config.eight_bits import (
    EIGHT_BIT_DEVICE_RULES,
    EIGHT_BIT_OF_MACHINE,
    EIGHT_BIT_RULES,
    EightBitFlags,
)
from megatron.config.expert_ranks import EXPERT_RANK_NOTES, EXPERT_RANK_RULES
from megatron.config.experts import EXPERT_NOTES, EXPERT_RULES, UpcyclingFlags
from megatron.config.graphs import (
    GRAPH_NOTES,
    GRAPHS_OF_DRY_RUN,
    GRAPHS_OF_MACHINE,
    GraphFlags,
)
from megatron.config.grouped_products import (
    GROUPED_DEVICE_RULES,
    GROUPED_NOTES,
    GROUPED_RULES,
    GroupedFlags,
)
from megatron.config.guard import GUARD_NOTES, GUARD_RULES, GuardFlags
from megatron.config.log import LOG_RULES, LogFlags
from megatron.config.model import MODEL_GROUPS, MODEL_NOTES, MODEL_RULES
from megatron.config.offload import OFFLOAD_OF_MACHINE, OFFLOAD_RULES, OffloadFlags
from megatron.config.offload_states import (
    STATE_NOTES,
    STATE_RULES,
    STATES_OF_MACHINE,
    StateOffloadFlags,
)
from megatron.config.optimizer import OPTIMIZER_NOTES, OPTIMIZER_RULES, OptimizerFlags
from megatron.config.optimizer_kind import (
    IMPLEMENTATION_NOTES,
    IMPLEMENTATION_OF_MACHINE,
    IMPLEMENTATION_RULES,
)
from megatron.config.parallelism import CONTEXT_RULES, TENSOR_NOTES, TENSOR_RULES, ParallelFlags
from megatron.config.pipeline import PIPELINE_NOTES, PIPELINE_RULES, PLAN_RULES
from megatron.config.precision import PRECISION_NOTES, PRECISION_RULES, PrecisionFlags
from megatron.config.recompute import RECOMPUTE_NOTES, RECOMPUTE_RULES, RecomputeFlags
from megatron.config.records import RECORD_RULES, RecordFlags
from megatron.config.replicas import REPLICA_NOTES, REPLICA_RULES, ReplicaFlags
from megatron.config.schedule import PipelineFlags
from megatron.config.slices import SLICE_RULES, SliceFlags
from megatron.config.tokenizer import FillFlags, TokenizerFlags
from megatron.config.train import TRAIN_NOTES, TRAIN_RULES, TrainFlags
from megatron.config.vocabulary import TOKENIZER_RULES
from megatron.flags.groups import Flags, Rule, all_declarations
from megatron.parallel.settings import ExpertRankSettings
from megatron.schedules.settings import PairSettings

GROUPS: Final = (
    *MODEL_GROUPS,
    UpcyclingFlags,
    GroupedFlags,
    ExpertRankSettings,
    PairSettings,
    ParallelFlags,
    PipelineFlags,
    SliceFlags,
    TrainFlags,
    PrecisionFlags,
    EightBitFlags,
    RecomputeFlags,
    OffloadFlags,
    GraphFlags,
    OptimizerFlags,
    StateOffloadFlags,
    DataFlags,
    TokenizerFlags,
    CorpusFlags,
    FillFlags,
    ReplicaFlags,
    ClusterFlags,
    CheckpointFlags,
    GuardFlags,
    LogFlags,
    RecordFlags,
)
"""All groups, in the order of the help."""


DECLARED: Final = all_declarations(GROUPS)
"""All flags, as they stand on a command line."""


RULES: Final[tuple[Rule, ...]] = (
    *MODEL_RULES,
    *EXPERT_RULES,
    *PIPELINE_RULES,
    *TENSOR_RULES,
    *CONTEXT_RULES,
    *SLICE_RULES,
    *EXPERT_RANK_RULES,
    *DEEP_EP_RULES,
    *GROUPED_RULES,
    *TRAIN_RULES,
    *PRECISION_RULES,
    *EIGHT_BIT_RULES,
    *EIGHT_BIT_SIZE_RULES,
    *RECOMPUTE_RULES,
    *OFFLOAD_RULES,
    *CHOICE_RULES,
    *OPTIMIZER_RULES,
    *IMPLEMENTATION_RULES,
    *STATE_RULES,
    *CORPUS_RULES,
    deepspeed_file,
    *LOG_RULES,
    *GUARD_RULES,
)
"""All rules that need nothing but the flags, in the order of the groups."""


NOTES: Final[tuple[Rule, ...]] = (
    *MODEL_NOTES,
    *EXPERT_NOTES,
    *RECOMPUTE_NOTES,
    *TRAIN_NOTES,
    *PRECISION_NOTES,
    *OPTIMIZER_NOTES,
    *IMPLEMENTATION_NOTES,
    *STATE_NOTES,
    *CORPUS_NOTES,
    *CHECKPOINT_NOTES,
    *PIPELINE_NOTES,
    *TENSOR_NOTES,
    *EXPERT_RANK_NOTES,
    *GROUPED_NOTES,
    *GRAPH_NOTES,
    *GUARD_NOTES,
)
"""The rules that find flags that change nothing beside the others. Their lines become notes."""


def job_rules(flags: Flags) -> tuple[Rule, ...]:
    """Return the rules about the job that the flags make.

    A dry run has fewer rules, because it needs no ranks, devices or data.
    """
    of_all = (*TOKENIZER_RULES, *PLAN_RULES, *REPLICA_RULES)
    if flags[LogFlags].dry_run:
        return of_all
    return (
        *of_all,
        *DEVICE_RULES,
        *EIGHT_BIT_DEVICE_RULES,
        *GROUPED_DEVICE_RULES,
        *DEEP_EP_DEVICE_RULES,
        *BACKEND_RULES,
        *FILE_RULES,
        *RECORD_RULES,
    )


def job_notes(flags: Flags) -> tuple[Rule, ...]:
    """Return the rules that find flags that change nothing on this machine or with these ranks."""
    if flags[LogFlags].dry_run:
        return (*REPLICA_NOTES, *DRY_RUN_NOTES, *GRAPHS_OF_DRY_RUN)
    return (
        *REPLICA_NOTES,
        *CLUSTER_OF_MACHINE,
        *EIGHT_BIT_OF_MACHINE,
        *IMPLEMENTATION_OF_MACHINE,
        *CLUSTER_NOTES,
        *OFFLOAD_OF_MACHINE,
        *STATES_OF_MACHINE,
        *GRAPHS_OF_MACHINE,
    )
