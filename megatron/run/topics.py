"""All groups of flags, in the order of the help."""

from typing import Final

from megatron.checkpoint.settings import CheckpointSettings, UpcyclingSettings
from megatron.data.settings import CorpusSettings, DataSettings, DocumentSettings, FillSettings
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.flags.groups import all_declarations
from megatron.flags.help import Topic, groups_in
from megatron.kernels.settings import GroupedProductSettings
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.recompute_settings import RecomputeSettings
from megatron.layers.vocabulary.settings import ShardSettings
from megatron.model.stage_settings import StageSettings
from megatron.optimizer.rate_span_settings import RateSpanSettings
from megatron.optimizer.settings import (
    HostStateSettings,
    LossScaleSettings,
    MuonSettings,
    OptimizerSettings,
)
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.settings import (
    BlockSettings,
    DeviceSettings,
    ExpertRankSettings,
    PipelineRankSettings,
    ReplicaSettings,
    TensorRankSettings,
)
from megatron.run.deepspeed_file import DeepSpeedSettings
from megatron.run.dry_run import DryRunSettings
from megatron.run.generate import GenerateSettings
from megatron.run.graphs import GraphSettings
from megatron.run.guard import GuardSettings
from megatron.run.log import LogSettings
from megatron.run.model import MODEL_GROUPS
from megatron.run.precision import PrecisionSettings
from megatron.run.records import RecordSettings
from megatron.run.train import TrainSettings
from megatron.schedules.block_options import BlockOptions
from megatron.schedules.settings import (
    OffloadSettings,
    PairSettings,
    PlanSettings,
    ScheduleSettings,
    SliceSettings,
)
from megatron.schedules.treatment_settings import TreatmentSettings
from megatron.simulator.costs.settings import ClusterSettings

TOPICS: Final[tuple[type | Topic, ...]] = (
    *MODEL_GROUPS,
    UpcyclingSettings,
    GroupedProductSettings,
    ExpertRankSettings,
    PairSettings,
    Topic(
        "The layout over ranks",
        (
            PipelineRankSettings,
            TreatmentSettings,
            ShardSettings,
            TensorRankSettings,
            ContextRankSettings,
            DeviceSettings,
        ),
    ),
    Topic(
        "The pipeline's schedule, and the layers of its stages", (ScheduleSettings, StageSettings)
    ),
    Topic("How a plan of passes is found", (PlanSettings, BlockOptions)),
    SliceSettings,
    Topic("Length, batch size and evaluations", (TrainSettings, DeepSpeedSettings)),
    PrecisionSettings,
    LossScaleSettings,
    EightBitSettings,
    RecomputeSettings,
    OffloadSettings,
    GraphSettings,
    OptimizerSettings,
    MuonSettings,
    RateSpanSettings,
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
    GenerateSettings,
)
"""All flags by topic, in the order of the help."""

GROUPS: Final = groups_in(TOPICS)
"""All groups, in the order of the help."""

DECLARED: Final = all_declarations(GROUPS)
"""All flags, as they stand on a command line."""
