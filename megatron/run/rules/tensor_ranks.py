"""Rules about models that tensor-parallel ranks share."""

from collections.abc import Iterator

from megatron.flags.groups import Flags
from megatron.flags.rules import refuses
from megatron.layers.experts.settings import ExpertSettings
from megatron.model.cut_faults import faults_of_cut
from megatron.parallel.settings import TensorRankSettings
from megatron.run.experts import is_mixture
from megatron.run.model import sound_model


@refuses
def _cuts(flags: Flags) -> Iterator[str]:
    own = flags[TensorRankSettings]
    if (ranks := own.size) == 1:
        return
    model = sound_model(flags)
    yield from faults_of_cut(model, ranks, sequence_parallel=own.sequence_parallel)
    if model.hidden_size % ranks:  # only with --kv-channels; otherwise heads make it divisible
        yield (
            f"--tensor-model-parallel-size {ranks} does not divide --hidden-size "
            f"{model.hidden_size}: activations travel in as many parts, so choose a multiple of "
            f"{ranks}, or fewer ranks"
        )


@refuses
def _shared_experts(flags: Flags) -> Iterator[str]:
    own, sharing = flags[ExpertSettings], flags[TensorRankSettings]
    if is_mixture(flags) and sharing.size > 1 and not sharing.sequence_parallel:
        yield (
            f"--tensor-model-parallel-size {sharing.size} with --num-experts {own.num_experts}: "
            "add --sequence-parallel, as Megatron-LM needs it too; otherwise every rank chooses "
            "for all tokens, and a bit that differs sends one to other experts"
        )
