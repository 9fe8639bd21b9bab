"""The settings of stages: the layers that each of them has."""

from dataclasses import dataclass
from typing import Final

from megatron.flags.declare import flag
from megatron.flags.ranges import DEPTH_OR_NONE

_ACCOUNTS: Final = (
    "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split"
)


@dataclass(frozen=True)
class StageSettings:
    """The layers of stages."""

    # fmt: off
    layer_distribution: str | None = flag(None,
        "How layers are spread over the stages. even: equally many on each; remainder: one more "
        "on the first stages; cost: so that the layers of the slowest rank take as little time as "
        "possible; redis: the same, vocabulary layers included; or a list of numbers, in the order "
        "in which the data flows.",
        unset="even; cost if some layers have experts and others none",
        metavar="{even,remainder,cost,redis}|N,N,...")
    pipeline_model_parallel_layout: str | None = flag(None,
        "The stages in Megatron-Core's form, in the order in which the data flows, as in "
        "'Et*2|(t*2|)*6t*2L'. E is the embedding, t a transformer layer, m a layer of "
        "--mtp-num-layers, L the loss; | ends a stage. All m are in one stage, after the last t. "
        "More stages than ranks imply interleaved.", unset="none", metavar="LAYOUT")
    final_stage_num_layers: int | None = flag(None,
        "With redis: layers of the last stage.",
        DEPTH_OR_NONE, unset="balanced by cost",
        idle_without="--enable-layer-redistribution or --vocab-parallel redis or "
        "--layer-distribution redis or --vocab-parallel auto")
    decoder_first_pipeline_num_layers: int | None = flag(None,
        "Layers of the first stage; the others share the rest.", DEPTH_OR_NONE,
        unset="as the others", excludes=_ACCOUNTS)
    decoder_last_pipeline_num_layers: int | None = flag(None,
        "Layers of the last stage; the others share the rest.", DEPTH_OR_NONE,
        unset="as the others", excludes=_ACCOUNTS)
    account_for_embedding_in_pipeline_split: bool = flag(False,
        "Count the embedding as one of the first stage's layers.")
    account_for_loss_in_pipeline_split: bool = flag(False,
        "Count the output layer as one of the last stage's layers.")
    # fmt: on
