"""All groups of flags, in the order of the help."""

from typing import Final

from megatron.checkpoint.settings import CheckpointSettings, UpcyclingSettings
from megatron.data.settings import CorpusSettings, DataSettings, DocumentSettings, FillSettings
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.flags.groups import all_declarations
from megatron.kernels.settings import GroupedProductSettings
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.recompute_settings import RecomputeSettings
from megatron.optimizer.settings import (
    HostStateSettings,
    LossScaleSettings,
    MuonSettings,
    OptimizerSettings,
)
from megatron.parallel.settings import BlockSettings, ExpertRankSettings, ReplicaSettings
from megatron.run.dry_run import DryRunSettings
from megatron.run.graphs import GraphSettings
from megatron.run.guard import GuardSettings
from megatron.run.log import LogSettings
from megatron.run.model import MODEL_GROUPS
from megatron.run.optimizer import RateSpanFlags
from megatron.run.parallelism import ParallelFlags
from megatron.run.precision import PrecisionSettings
from megatron.run.records import RecordSettings
from megatron.run.schedule import PipelineFlags
from megatron.run.train import TrainFlags
from megatron.schedules.settings import OffloadSettings, PairSettings, PlanSettings, SliceSettings
from megatron.simulator.costs.settings import ClusterSettings

GROUPS: Final = (
    *MODEL_GROUPS,
    UpcyclingSettings,
    GroupedProductSettings,
    ExpertRankSettings,
    PairSettings,
    ParallelFlags,
    PipelineFlags,
    PlanSettings,
    SliceSettings,
    TrainFlags,
    PrecisionSettings,
    LossScaleSettings,
    EightBitSettings,
    RecomputeSettings,
    OffloadSettings,
    GraphSettings,
    OptimizerSettings,
    MuonSettings,
    RateSpanFlags,
    HostStateSettings,
    CorpusSettings,
    DataSettings,
    DocumentSettings,
    TokenizerSettings,
    FillSettings,
    ReplicaSettings,
    BlockSettings,
    ClusterSettings,
    CheckpointSettings,
    GuardSettings,
    LogSettings,
    DryRunSettings,
    RecordSettings,
)
"""All groups, in the order of the help."""

DECLARED: Final = all_declarations(GROUPS)
"""All flags, as they stand on a command line."""
