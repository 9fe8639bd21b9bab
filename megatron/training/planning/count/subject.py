"""What decides a count of a run."""

from dataclasses import replace
from typing import NamedTuple

from megatron.config.replicas import ReplicaConfig
from megatron.config.run_config import ParallelConfig, RunConfig
from megatron.config.train import TrainConfig
from megatron.data.config import DocumentsConfig
from megatron.model.config import ModelConfig


class Subject(NamedTuple):
    """What decides a count, and nothing else, so that runs that count alike share it.

    Attributes:
        model: the whole model.
        train: of one microbatch.
        parallel: one replica of the pipeline, whatever its schedule.
        documents: what becomes of those in a sample. Every sample counts as one of them, which is
            the most work that they can make.
    """

    model: ModelConfig
    train: TrainConfig
    parallel: ParallelConfig
    documents: DocumentsConfig | None

    @classmethod
    def of(cls, config: RunConfig) -> "Subject":
        """Return what decides the count of a run."""
        train, narrow = config.train, config.train.eight_bits
        if narrow is not None:  # Transformer Engine need not be there to be asked about
            narrow = replace(narrow, transformer_engine=False)
        alike = TrainConfig(
            micro_batch_size=train.micro_batch_size,
            global_batch_size=train.micro_batch_size,
            train_iters=1,
            exit_interval=None,
            seed=0,
            dtype=train.dtype,
            eval_interval=None,
            eval_iters=0,
            vocab_recompute=train.vocab_recompute,
            recomputation=train.recomputation,
            gradient_dtype=train.gradient_dtype,
            wide_stream=train.wide_stream,
            eight_bits=narrow,
        )
        parallel = ParallelConfig(
            pipeline_size=config.parallel.pipeline_size,
            vocab_parallel=config.parallel.vocab_parallel,
            pipeline_schedule="1f1b",
            padded_vocab_size=config.parallel.padded_vocab_size,
            device="cuda",
            backend="nccl",
            timeout_minutes=1,
            replicas=ReplicaConfig(config.parallel.context_size),
            tensor_size=config.parallel.tensor_size,
            sequence_parallel=config.parallel.sequence_parallel,
            context_size=config.parallel.context_size,
        )
        documents = config.data.documents
        if documents is not None:
            documents = replace(documents, eod_token=0)
        return cls(config.model, alike, parallel, documents)
