"""The part of a run that decides its count, so that runs that count alike share their counts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from megatron.config.run_config import RunConfig
from megatron.data.config import DocumentsConfig
from megatron.layers.eight_bit_config import EightBitConfig
from megatron.layers.recompute import Recomputation
from megatron.model.config import ModelConfig
from megatron.model.placement import Placement, place
from megatron.parallel.grid import Grid
from megatron.schedules.plan import Plan


class Subject(NamedTuple):
    """A model, one microbatch, and the layout of one replica.

    The number of pipeline ranks and the treatment of the vocabulary are the plan's.

    Attributes:
        model: the whole model.
        samples: of a microbatch.
        dtype: of activations.
        gradient_dtype: of the sums of gradients.
        wide_stream: whether activations between layers are fp32.
        eight_bits: how products are done in 8 bits; ``None``: none is.
        recomputation: activations that the backward computes again.
        vocab_recompute: whether the output layer computes its logits again.
        padded_vocab_size: rows of the whole vocabulary matrix.
        tensor_size: tensor-parallel ranks t.
        sequence_parallel: whether each of these has its own part of the sequence between layers.
        context_size: context-parallel ranks c.
        documents: what becomes of the documents in a sample; ``None``: nothing. Every sample counts
            as one document, which is the most work that documents can make.
    """

    model: ModelConfig
    samples: int
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    wide_stream: bool
    eight_bits: EightBitConfig | None
    recomputation: Recomputation
    vocab_recompute: bool
    padded_vocab_size: int
    tensor_size: int
    sequence_parallel: bool
    context_size: int
    documents: DocumentsConfig | None

    @classmethod
    def of(cls, config: RunConfig) -> "Subject":
        """Return the part of a run that decides its count."""
        train, parallel, narrow = config.train, config.parallel, config.train.eight_bits
        if narrow is not None:  # Transformer Engine need not be there to be asked about
            narrow = replace(narrow, transformer_engine=False)
        documents = config.data.documents
        if documents is not None:
            documents = replace(documents, eod_token=0)
        return cls(
            model=config.model,
            samples=train.micro_batch_size,
            dtype=train.dtype,
            gradient_dtype=train.gradient_dtype,
            wide_stream=train.wide_stream,
            eight_bits=narrow,
            recomputation=train.recomputation,
            vocab_recompute=train.vocab_recompute,
            padded_vocab_size=parallel.padded_vocab_size,
            tensor_size=parallel.tensor_size,
            sequence_parallel=parallel.sequence_parallel,
            context_size=parallel.context_size,
            documents=documents,
        )

    def grid(self, ranks: int) -> Grid:
        """Return the ranks of one replica with ``ranks`` pipeline ranks."""
        return Grid(self.tensor_size, 1, ranks, context_size=self.context_size)

    def placement(self, plan: Plan, layers: Sequence[int], rank: int) -> Placement:
        """Return the parts of the model on the first rank of those that share pipeline ``rank``.

        Args:
            plan: of the pipeline.
            layers: transformer layers of every stage.
            rank: pipeline rank.
        """
        grid = self.grid(plan.ranks)
        shard = grid.vocabulary_rank(rank), self.tensor_size * plan.ranks
        return place(
            self.model,
            plan.stages,
            rank,
            layers=layers,
            padded_vocab_size=self.padded_vocab_size,
            vocabulary_shard=shard if plan.treatment.is_sharded else None,
            tensor_shard=(0, self.tensor_size),
        )
