"""A whole run as frozen data: what the flags become, once, at the entrypoint.

Every default is resolved here but the peak of the device, which is measured late; nothing below the
entrypoint sees a flag. The narrow configurations of the layers below are reused as they are.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron.data.config import DataConfig
from megatron.model.config import ModelConfig
from megatron.optimizer.config import OptimizerConfig

VocabParallel = Literal["none", "vocab-1", "vocab-2"]
PipelineSchedule = Literal["1f1b"]


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid out over the ranks of the job.

    Attributes:
        pipeline_size: pipeline ranks p.
        vocab_parallel: treatment of the vocabulary layers: on the first and the last stage
            (``none``), or as passes of every rank with two barriers (``vocab-1``) or one
            (``vocab-2``).
        pipeline_schedule: the building block of the plan.
        padded_vocab_size: rows of the whole vocabulary matrix, a multiple of ``vocab_shards``.
        device: kind of device that every rank computes on.
        backend: communication library of the process groups.
        timeout_minutes: how long a collective may wait before the job is given up.
    """

    pipeline_size: int
    vocab_parallel: VocabParallel
    pipeline_schedule: PipelineSchedule
    padded_vocab_size: int
    device: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    timeout_minutes: int

    @property
    def vocab_shards(self) -> int:
        """Parts P into which the vocabulary matrix is cut."""
        return 1 if self.vocab_parallel == "none" else self.pipeline_size


@dataclass(frozen=True)
class TrainConfig:
    """How long to train, on batches of which size, in which precision.

    Attributes:
        micro_batch_size: samples b of a microbatch.
        global_batch_size: samples of an iteration.
        train_iters: iterations of the whole job; the learning rate is planned over them.
        exit_interval: stop after the first iteration that this number divides; ``None``: never.
        seed: seed of the initial weights, the data order and dropout.
        dtype: ``torch.bfloat16`` or ``torch.float32``, of parameters and activations.
        eval_interval: iterations between two evaluations; ``None``: no evaluation.
        eval_iters: batches of ``global_batch_size`` samples per evaluation.
    """

    micro_batch_size: int
    global_batch_size: int
    train_iters: int
    exit_interval: int | None
    seed: int
    dtype: torch.dtype
    eval_interval: int | None
    eval_iters: int

    @property
    def num_microbatches(self) -> int:
        """Microbatches m of an iteration."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def train_samples(self) -> int:
        """Samples of the whole job."""
        return self.train_iters * self.global_batch_size


@dataclass(frozen=True)
class LogConfig:
    """What a run says about itself, and where.

    Attributes:
        log_interval: iterations per printed line.
        peak_tflops: peak of one rank in TFLOP/s for the MFU; ``None``: from the table or measured.
        profile: write a torch profiler trace of some iterations.
        profile_step_start: first traced iteration (counted from 1).
        profile_step_end: first iteration that is no longer traced.
        profile_dir: folder of the traces, one file per rank.
        record_timeline: file for the measured timeline in the simulator's format.
    """

    log_interval: int
    peak_tflops: float | None
    profile: bool
    profile_step_start: int
    profile_step_end: int
    profile_dir: Path
    record_timeline: Path | None


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run.

    Attributes:
        model: shape and mathematics of the model.
        parallel: layout over the ranks.
        train: length, batch and precision.
        optimizer: AdamW, clipping and learning rate.
        data: corpus and sampling.
        log: printed lines, traces.
        notes: sentences about accepted flags that change nothing here, for the log.
    """

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    data: DataConfig
    log: LogConfig
    notes: tuple[str, ...] = ()
