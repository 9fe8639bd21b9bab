"""A whole run as frozen data, made from the flags once, at the entrypoint.

All defaults are resolved except the peak speed of the device, which is measured later. Nothing
below the entrypoint sees a flag. The narrow configurations of the layers below are reused as they
are.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from megatron.checkpoint.config import CheckpointConfig
from megatron.data.batch_sizes import BatchSizes, Growth
from megatron.data.config import DataConfig
from megatron.layers.eight_bit_config import EightBitConfig
from megatron.layers.recompute import NO_RECOMPUTATION, Recomputation
from megatron.model.config import ModelConfig
from megatron.model.distribution import LayerDistribution
from megatron.optimizer.config import OptimizerConfig
from megatron.parallel.grid import Grid, Order
from megatron.parallel.nccl import BlockLimits
from megatron.parallel.placement import Placement
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.collective_time import Links
from megatron.simulator.costs.gpus import Gpu


@dataclass(frozen=True)
class ReplicaConfig:
    """Data parallelism: what ranks with the same parameters do together.

    Attributes:
        size: such ranks: one for each of d replicas, or for each of their c parts of the sequence.
        overlap: reduce a bucket of gradients as soon as they are complete; otherwise all after the
            last pass.
        bucket_size: parameters after which a bucket is full; ``None``: a default.
        buckets: of a rank, about; ``None``: as many as that size makes.
        reduce_dtype: in which gradients are reduced; ``None``: as they add up.
        shard_optimizer: each of them keeps the optimizer's state of its own shards only (ZeRO-1).
        overlap_gather: gather updated parameters beside passes that do not read them; otherwise
            before the first pass.
        order: in which the ranks of the job are numbered.
    """

    size: int = 1
    overlap: bool = False
    bucket_size: int | None = None
    buckets: int | None = None
    reduce_dtype: torch.dtype | None = None
    shard_optimizer: bool = False
    overlap_gather: bool = False
    order: Order = "tp-dp-pp"


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid out over the ranks of the job.

    Attributes:
        pipeline_size: pipeline ranks p.
        vocab_parallel: treatment of the vocabulary layers, a name of ``TREATMENTS``.
        pipeline_schedule: schedule of the passes, a name of ``TRAINABLE_SCHEDULES``.
        padded_vocab_size: rows of the whole vocabulary matrix, a multiple of ``vocab_shards``.
        device: kind of device that every rank computes on.
        backend: communication library of the process groups.
        timeout_minutes: how long a collective may wait before the job is given up.
        virtual_stages: model chunks of a rank, for a schedule of ``CHUNKED_SCHEDULES``;
            ``None``: as few as the schedule needs.
        layers: how transformer layers are spread over the stages.
        schedule_file: file of the plan in text form, for the schedule ``file``.
        memory_limit: the most microbatches that a rank may have in flight.
        recompute_ahead: layers are computed again in passes of their own, and a rank holds so many
            chunks between these and their B; ``None``: within B.
        measured_costs: file of measured costs to plan with; ``None``: by FLOPs.
        replicas: data parallelism.
        search_seconds: time of the search for a plan; ``None``: as long as it takes, and 20 s to
            compare schedules on a known GPU. With a limit the plan depends on the machine, so all
            ranks take that of rank 0.
        advice_seconds: time to look for other settings if a dry run does not fit.
        tensor_size: tensor-parallel ranks t.
        sequence_parallel: whether each of them has its own part of the sequence outside of
            attention and MLP.
        context_size: context-parallel ranks c, which share every sequence.
        numa_binding: let ranks run on CPUs that are close to their GPUs.
        nccl_blocks: thread blocks that NCCL may use.
        ranks_per_machine: of the job; ``None``: all are in one machine.
        gpu: of every rank; ``None``: not known, so plans are made by FLOPs, and communication is
            free.
        links: between the GPUs; ``None``: as that kind of GPU usually has.
    """

    pipeline_size: int
    vocab_parallel: str
    pipeline_schedule: str
    padded_vocab_size: int
    device: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    timeout_minutes: int
    virtual_stages: int | None = None
    layers: LayerDistribution = field(default_factory=LayerDistribution)
    schedule_file: Path | None = None
    memory_limit: float | None = None
    recompute_ahead: int | None = None
    measured_costs: Path | None = None
    replicas: ReplicaConfig = field(default_factory=ReplicaConfig)
    search_seconds: float | None = None
    advice_seconds: float = 20.0
    tensor_size: int = 1
    sequence_parallel: bool = False
    context_size: int = 1
    nccl_blocks: BlockLimits = field(default_factory=BlockLimits)
    ranks_per_machine: int | None = None
    numa_binding: bool = False
    gpu: Gpu | None = None
    links: Links | None = None

    @property
    def grid(self) -> Grid:
        """All ranks of the job."""
        replicas = self.replicas
        assert replicas.size % self.context_size == 0, "each replica has all parts of a sequence"
        return Grid(
            self.tensor_size,
            replicas.size // self.context_size,
            self.pipeline_size,
            replicas.order,
            self.context_size,
        )

    @property
    def placement(self) -> Placement:
        """How its ranks lie in machines."""
        return Placement(self.grid, self.ranks_per_machine or self.grid.world_size)

    @property
    def vocab_shards(self) -> int:
        """Parts into which the vocabulary matrix is cut: P = p x t, or t without the pipeline."""
        sharded = TREATMENTS[self.vocab_parallel].is_sharded
        return self.tensor_size * (self.pipeline_size if sharded else 1)


EvaluationSet = Literal["validation", "test"]
"""A part of the data that is only evaluated."""


@dataclass(frozen=True)
class TrainConfig:
    """How long to train, on batches of which size, in which precision.

    Attributes:
        micro_batch_size: samples b of a microbatch.
        global_batch_size: samples of an iteration, once batches grow no more.
        train_iters: iterations of the whole job, if it begins at sample 0.
        exit_interval: stop after the first iteration that this number divides; ``None``: never.
        seed: seed of the initial weights, the data order and dropout.
        use_cpu_initialization: draw initial weights of GPUs on the CPU.
        dtype: ``torch.bfloat16``, ``torch.float16`` or ``torch.float32``, of parameters and
            activations.
        gradient_dtype: in which the gradients of an iteration add up; ``dtype``, if that is fp32.
        wide_stream: keep the residual stream, and the tensors between stages, in fp32, though
            ``dtype`` has 16 bits.
        eval_interval: iterations between two evaluations; ``None``: no evaluation.
        eval_iters: batches of ``global_batch_size`` samples per evaluation.
        replicas: that share a global batch.
        rampup: how batches grow before; ``None``: they do not.
        length: samples of the whole job; ``None``: it ends by its iterations.
        full_validation: an evaluation reads every validation set whole.
        final_sets: what is evaluated at the end: the validation set, the test set, both or none.
        skip_train: only evaluate.
        vocab_recompute: the output layer keeps nothing of the logits for its backward, which forms
            them again.
        recomputation: what the backward computes again.
        eight_bits: what is multiplied in 8 bits; ``None``: nothing.
    """

    micro_batch_size: int
    global_batch_size: int
    train_iters: int
    exit_interval: int | None
    seed: int
    dtype: torch.dtype
    eval_interval: int | None
    eval_iters: int
    replicas: int = 1
    rampup: Growth | None = None
    length: int | None = None
    final_sets: tuple[EvaluationSet, ...] = ()
    full_validation: bool = False
    skip_train: bool = False
    vocab_recompute: bool = False
    recomputation: Recomputation = NO_RECOMPUTATION
    gradient_dtype: torch.dtype = torch.float32
    wide_stream: bool = False
    eight_bits: EightBitConfig | None = None
    use_cpu_initialization: bool = False

    @property
    def num_microbatches(self) -> int:
        """Microbatches m of an iteration and replica, once batches grow no more."""
        return self.global_batch_size // (self.micro_batch_size * self.replicas)

    @property
    def batches(self) -> BatchSizes:
        """The sizes of all global batches."""
        return BatchSizes(self.global_batch_size, self.rampup)

    @property
    def train_samples(self) -> int:
        """Samples of the whole job, which is made of whole batches."""
        return self.batches.samples_of(self.train_iters)

    @property
    def dataset_samples(self) -> int:
        """Samples that the data are shuffled for; batches of any size read them in one order."""
        return self.train_samples if self.length is None else self.length


@dataclass(frozen=True)
class RecordConfig:
    """What a run records besides its printed lines.

    Attributes:
        log_jsonl: file of JSON lines; ``None``: none.
        tensorboard_dir: folder of curves; ``None``: none.
        tensorboard_log_interval: iterations between two points of a curve of every iteration.
        tensorboard_queue_size: points that may wait to be written.
        log_timers_to_tensorboard: curves of times, throughput and idle time too.
        log_memory_to_tensorboard: curves of memory too.
        log_validation_ppl_to_tensorboard: curves of perplexities too.
        log_loss_scale_to_tensorboard: a curve of the loss scale, if losses are scaled.
        log_world_size_to_tensorboard: a curve of the number of ranks too.
        wandb_project: project of Weights & Biases; ``None``: nothing is sent there.
        wandb_exp_name: name of the run there; ``None``: it makes one up.
        wandb_entity: owner of the project; ``None``: who is logged in.
        wandb_save_dir: folder of its files; ``None``: its own choice.
        progress_folder: of the file with a line for every start and save; ``None``: there is none.
        live_display: show a display where rank 0 prints to a terminal.
    """

    log_jsonl: Path | None = None
    tensorboard_dir: Path | None = None
    tensorboard_log_interval: int = 1
    tensorboard_queue_size: int = 1000
    log_timers_to_tensorboard: bool = False
    log_memory_to_tensorboard: bool = False
    log_validation_ppl_to_tensorboard: bool = False
    log_loss_scale_to_tensorboard: bool = True
    log_world_size_to_tensorboard: bool = False
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    wandb_entity: str | None = None
    wandb_save_dir: Path | None = None
    progress_folder: Path | None = None
    live_display: bool = True


@dataclass(frozen=True)
class LogConfig:
    """Printed lines and measurements of a run, and their files.

    Attributes:
        log_interval: iterations per printed line.
        peak_tflops: peak of one rank in TFLOP/s for the MFU; ``None``: from the table or measured.
        profile: write a torch profiler trace of some iterations.
        profile_step_start: first traced iteration (counted from 1).
        profile_step_end: first iteration that is no longer traced.
        profile_dir: folder of the traces, one file per rank.
        record_timeline: file for the measured timeline in the simulator's format.
        profile_schedule_start: first iteration (counted from 1) whose passes are timed; ``None``:
            none is.
        profile_schedule_end: first iteration whose passes are no longer timed.
        save_measured_costs: file for the measured costs.
        replan: make the plan anew from the measured costs.
        log_num_zeros_in_grad: count the zeros of the gradient in every iteration.
        log_params_norm: find the norm of all weights after every iteration.
        records: what is recorded besides the printed lines.
        record_memory_history: remember who allocates GPU memory.
        memory_snapshot_path: where a rank that is out of memory writes what it holds.
    """

    log_interval: int
    peak_tflops: float | None
    profile: bool
    profile_step_start: int
    profile_step_end: int
    profile_dir: Path
    record_timeline: Path | None
    profile_schedule_start: int | None = None
    profile_schedule_end: int | None = None
    save_measured_costs: Path | None = None
    replan: bool = False
    log_num_zeros_in_grad: bool = False
    log_params_norm: bool = False
    records: RecordConfig = field(default_factory=RecordConfig)
    record_memory_history: bool = False
    memory_snapshot_path: Path = Path("snapshot.pickle")


@dataclass(frozen=True)
class GuardConfig:
    """What a long run does when something goes wrong, or its time is over.

    Attributes:
        exit_signals: names of the signals after which the run saves and leaves.
        exit_seconds: after which it does so; ``None``: never.
        exit_file: it does so too once this file exists; ``None``: no file ends it.
        trigger_folder: whose files ``exit`` and ``save`` let the run leave or save, once each.
        ends_if_not_finite: a loss or gradient norm that is not finite ends the run; otherwise its
            iteration takes no step.
        tells_spikes: tell of losses far above all others.
        skipped: iterations, counted from 1, whose samples are passed over.
        hang_seconds: without progress, after which the job is given up.
        tells_stragglers: tell which ranks are slower than the others.
    """

    exit_signals: tuple[str, ...] = ()
    exit_seconds: float | None = None
    exit_file: Path | None = None
    trigger_folder: Path | None = None
    ends_if_not_finite: bool = True
    tells_spikes: bool = False
    skipped: frozenset[int] = frozenset()
    hang_seconds: float = 300.0
    tells_stragglers: bool = False


@dataclass(frozen=True)
class DryRun:
    """A prediction instead of a training run.

    Attributes:
        gpu: name of the GPU to predict for.
        replica_bandwidth: bytes/s of one direction from a rank to its replica; ``None``: as
            machines with that GPU usually have.
        replica_latency: seconds of a step to it; ``None``: as usual.
    """

    gpu: str
    replica_bandwidth: float | None = None
    replica_latency: float | None = None


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
        checkpoint: saving and loading.
        guard: what happens when something goes wrong, or the time is over.
        notes: sentences about accepted flags that change nothing here, for the log.
        dry_run: what to predict instead of training; ``None``: train.
        alternatives: layouts with other treatments of the vocabulary, of which the plan takes the
            best; ``parallel`` is the first of them. Empty: the treatment is decided.
    """

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    data: DataConfig
    log: LogConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    notes: tuple[str, ...] = ()
    dry_run: DryRun | None = None
    alternatives: tuple[ParallelConfig, ...] = ()

    def with_treatment(self, name: str) -> "RunConfig":
        """Return the run with a treatment of the vocabulary that is among the alternatives."""
        if not self.alternatives:
            assert name == self.parallel.vocab_parallel, f"{name} is not an alternative"
            return self
        parallel = next(own for own in self.alternatives if own.vocab_parallel == name)
        return replace(self, parallel=parallel, alternatives=())
