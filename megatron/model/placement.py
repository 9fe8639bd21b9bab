"""Which parts of the model one pipeline rank owns.

A rank owns one chunk of transformer layers for each of its stages. If the vocabulary is split,
every rank owns a shard of both vocabulary matrices. Otherwise the first and the last stage own
them, and the stage of multi-token prediction has a copy of the embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron.layers.vocabulary.shard import VocabularyShard
from megatron.model.settings import ModelSettings


@dataclass(frozen=True)
class Placement:
    """Which parts of the model one rank owns.

    Attributes:
        chunks: for every chunk of the rank, the global indices of its layers.
        first_chunk: chunk that is the first stage of the model, if this rank has the stage.
        last_chunk: chunk that is the last stage of the model, if this rank has the stage.
        norm_chunk: chunk whose stage ends with the final norm and the layers of multi-token
            prediction, if this rank has the stage. It is mostly the last stage.
        input_shard: this rank's rows of the input embedding, if it has any.
        output_shard: this rank's rows of the output matrix, if it has any.
        ahead_shard: this rank's rows of the embedding of the tokens that follow, which multi-token
            prediction reads, if it has any.
    """

    chunks: tuple[range, ...]
    first_chunk: int | None = None
    last_chunk: int | None = None
    norm_chunk: int | None = None
    input_shard: VocabularyShard | None = None
    output_shard: VocabularyShard | None = None
    ahead_shard: VocabularyShard | None = None


def place(
    config: ModelSettings,
    stages: Sequence[tuple[int, int]],
    rank: int,
    *,
    layers: Sequence[int],
    padded_vocab_size: int,
    vocabulary_shard: tuple[int, int] | None,
    tensor_shard: tuple[int, int] = (0, 1),
    ahead_stage: int | None = None,
) -> Placement:
    """Return the parts of the model that ``rank`` owns.

    Args:
        config: the model.
        stages: (rank, chunk) of every stage in the order in which the data flows.
        rank: pipeline rank.
        layers: number of layers of every stage, in the same order.
        padded_vocab_size: rows of the whole vocabulary matrix.
        vocabulary_shard: index of this rank's shard and number of shards, if every rank has one;
            ``None``: only the stages that use vocabulary matrices hold them.
        tensor_shard: with ``vocabulary_shard`` ``None``: index of this rank's shard and number of
            shards, among the tensor-parallel ranks of a stage.
        ahead_stage: the stage with the final norm and the layers of multi-token prediction;
            ``None``: the last one.
    """
    own = {chunk: stage for stage, (owner, chunk) in enumerate(stages) if owner == rank}
    assert sum(layers) == config.num_layers, "every layer is somewhere, once"
    first_layers = [0, *accumulate(layers)]
    last_stage = len(stages) - 1
    norm_stage = last_stage if ahead_stage is None else ahead_stage
    stage_chunk = {stage: chunk for chunk, stage in own.items()}
    further = config.further.mtp_num_layers > 0
    index, shards = vocabulary_shard or tensor_shard
    shard = VocabularyShard.of(config.vocab_size, padded_vocab_size, index, shards)
    return Placement(
        chunks=tuple(range(*first_layers[own[c] : own[c] + 2]) for c in sorted(own)),
        first_chunk=stage_chunk.get(0),
        last_chunk=stage_chunk.get(last_stage),
        norm_chunk=stage_chunk.get(norm_stage),
        input_shard=shard if vocabulary_shard or 0 in stage_chunk else None,
        output_shard=shard if vocabulary_shard or last_stage in stage_chunk else None,
        ahead_shard=shard if further and (vocabulary_shard or norm_stage in stage_chunk) else None,
    )
