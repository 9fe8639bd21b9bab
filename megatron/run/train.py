"""The length of a run, and its batches, which may grow in size: settings and rules."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from megatron.data.batch_sizes import BatchSizes, Growth
from megatron.data.shares import EvaluationSet
from megatron.flags.declare import derived, flag, required
from megatron.flags.groups import Flags, faults_of, result_of
from megatron.flags.ranges import COUNT, INTERVAL, SAMPLES, SAMPLES_OR_NONE, SEED, WIDTH, Range
from megatron.flags.rules import notes, refuses
from megatron.kernels.cuda.grouped_packages import PackageName
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.recompute import NO_RECOMPUTATION, Recomputation
from megatron.optimizer.settings import HostStateSettings
from megatron.run.batch_growth import parse_rampup, parse_size_steps
from megatron.run.parallelism import number_of_replicas
from megatron.run.precision import PrecisionSettings

EVALUATION: Final = 100
"""Batches of an evaluation, if no flag gives their number."""


@dataclass(frozen=True)
class TrainSettings:
    """Length, batch size and evaluations.

    Those of a run have no value open: batches are as large as after all growth, and the length is
    in iterations, of a job that begins at sample 0.

    Attributes:
        replicas: number of replicas that share a global batch.
        rampup: how batches grow to ``global_batch_size``; ``None``: they do not grow.
        final_sets: the sets that are evaluated at the end: validation, test, both or none.
        precision: types of activations, gradients and the residual stream.
        recomputation: the activations that the backward computes again.
        captures_passes: passes are captured once as CUDA graphs, and replayed.
        could_capture: nothing in the run prevents such graphs on a GPU.
        eight_bits: how linear layers multiply in 8 bits; ``None``: they do not.
        grouped_package: the package that multiplies experts; ``None``: the kernels do.
        host_states: the states of the optimizer that are on the host; ``None``: there are none.
    """

    # fmt: off
    micro_batch_size: int = required("Samples per microbatch.", WIDTH)
    global_batch_size: int = derived("Samples per iteration.", COUNT, unset="one microbatch")
    rampup_batch_size: tuple[str, ...] = flag((),
        "Grow the batch, by three numbers: samples of the first batch, samples by which it grows "
        "at a time until it has --global-batch-size, and samples of the run over which it grows.",
        SAMPLES_OR_NONE,
        unset="off",
        metavar="START INCREMENT SAMPLES", excludes="--schedule-file or "
        "--pipeline-schedule auto or --profile-schedule-start")
    batch_size_steps: tuple[str, ...] = flag((),
        "Grow the batch by these steps, each START:SIZE: from START consumed samples on, a batch "
        "has SIZE samples. The first START is 0, the last SIZE is --global-batch-size.",
        SAMPLES_OR_NONE,
        unset="off",
        metavar="SAMPLES:SIZE ...", excludes="--rampup-batch-size or "
        "--schedule-file or --pipeline-schedule auto or --profile-schedule-start")
    train_iters: int = derived("Iterations of the whole job.", SAMPLES,
        unset="by --train-samples")
    train_samples: int | None = flag(None, "Samples of the whole job.", SAMPLES,
        unset="by --train-iters")
    exit_interval: int | None = flag(None,
        "Stop after the first iteration whose number this number divides.", INTERVAL, unset="never")
    seed: int = flag(1234, "Seed of weights, data order and dropout.", SEED)
    use_cpu_initialization: bool = flag(False,
        "Draw the initial weights on the CPU, also for GPUs. Otherwise a GPU draws other weights "
        "than a CPU, and another kind of GPU may draw others again.")
    eval_interval: int | None = flag(None,
        "Iterations between evaluations. There is an evaluation at the end too, also on the test "
        "set.",
        INTERVAL, unset="no evaluation")
    eval_iters: int = derived(
        "Batches per evaluation; 0: no evaluation. Without --eval-interval there is only that at "
        "the end.", Range(0, 10**6), unset=f"{EVALUATION}, with --eval-interval or --skip-train")
    skip_train: bool = flag(False,
        "Only evaluate the checkpoint of --load, on the validation and the test set.",
        needs="--load", lack="would evaluate random weights",
        excludes="--profile or --record-timeline or --profile-schedule-start")
    # fmt: on

    replicas: int = 1
    rampup: Growth | None = None
    final_sets: tuple[EvaluationSet, ...] = ()
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    recomputation: Recomputation = NO_RECOMPUTATION
    captures_passes: bool = False
    could_capture: bool = True
    eight_bits: EightBitSettings | None = None
    grouped_package: PackageName | None = None
    host_states: HostStateSettings | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        return self.precision.dtype

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype in which the gradients of an iteration add up: fp32 or bf16."""
        return self.precision.gradient_dtype

    @property
    def wide_stream(self) -> bool:
        """Whether the residual stream is wider than activations, and tensors between stages too."""
        return self.precision.fp32_residual_connection and self.dtype != torch.float32

    @property
    def num_microbatches(self) -> int:
        """Microbatches m of a replica in an iteration, after all growth of the batches."""
        return self.global_batch_size // (self.micro_batch_size * self.replicas)

    @property
    def batches(self) -> BatchSizes:
        """The sizes of all global batches."""
        return BatchSizes(self.global_batch_size, self.rampup)

    @property
    def whole_batches_samples(self) -> int:
        """Samples of the whole job: the sum of its whole batches."""
        return self.batches.samples_of(self.train_iters)

    @property
    def dataset_samples(self) -> int:
        """Samples that the data are shuffled for.

        Batches of any size read the samples in the same order.
        """
        return self.whole_batches_samples if self.train_samples is None else self.train_samples


class Iterations(NamedTuple):
    """How long a run is.

    Attributes:
        batch: samples of an iteration, after all growth.
        total: iterations of the whole job; 0: no length is given.
        last: the last iteration that runs; --exit-interval may end a run before ``total``.
        samples: samples of all iterations of the job.
    """

    batch: int
    total: int
    last: int
    samples: int


def iterations(flags: TrainSettings) -> Iterations:
    """Return the run's length; samples are rounded down to whole iterations."""
    sizes = batch_sizes(flags)
    total = flags.train_iters or sizes.iterations(flags.train_samples or 0)
    last = min(total, flags.exit_interval or total)
    return Iterations(sizes.final, total, last, sizes.samples_of(total))


def batch_sizes(flags: TrainSettings) -> BatchSizes:
    """Return the sizes of all global batches; of a faulty growth, as if batches did not grow."""
    batch = flags.global_batch_size or flags.micro_batch_size
    return BatchSizes(batch, result_of(lambda: growth_of(flags)))


class BatchShare(NamedTuple):
    """How the replicas of the model share a global batch.

    Attributes:
        at_once: samples of one microbatch of every replica.
        microbatches: microbatches of a replica in an iteration.
        rest: samples that make no whole microbatch for every replica.
    """

    at_once: int
    microbatches: int
    rest: int


def batch_share(flags: Flags) -> BatchShare:
    """Return how replicas share the largest batch; without a size of it, as one microbatch each."""
    own = flags[TrainSettings]
    at_once = (own.micro_batch_size or 1) * number_of_replicas(flags)
    return BatchShare(at_once, *divmod(own.global_batch_size or at_once, at_once))


def evaluation_batches(flags: TrainSettings) -> int:
    """Return the batches of an evaluation; 0: nothing is evaluated."""
    asks = flags.eval_interval is not None or flags.skip_train
    return (EVALUATION if asks else 0) if flags.eval_iters is None else flags.eval_iters


def growth_of(flags: TrainSettings) -> Growth | None:
    """Return how batches grow; ``None``: they do not grow. Errors as in ``parse_rampup``."""
    unit = flags.micro_batch_size
    batch = flags.global_batch_size or unit
    rampup = parse_rampup(flags.rampup_batch_size, batch, unit)
    return rampup or parse_size_steps(flags.batch_size_steps, batch, unit)


@refuses
def _batches(flags: Flags) -> Iterator[str]:
    batch, micro = flags[TrainSettings].global_batch_size, flags[TrainSettings].micro_batch_size
    if batch is not None and batch % micro:
        below = batch // micro * micro
        near = f"{below} or {below + micro}" if below else f"{micro}"
        yield (
            f"--global-batch-size {batch} is not divisible by --micro-batch-size {micro}: "
            f"use {near}"
        )


@refuses
def _growing_batches(flags: Flags) -> Iterator[str]:
    yield from faults_of(lambda: growth_of(flags[TrainSettings]))


@refuses
def _length(flags: Flags) -> Iterator[str]:
    train = flags[TrainSettings]
    lengths = (train.train_iters, train.train_samples).count(None)
    if lengths != 1 and not (train.skip_train and lengths == 2):
        given = "neither is given" if train.train_iters is None else "both are given"
        yield f"--train-iters or --train-samples: {given}; give one of them"
    first = batch_sizes(train).at(0)
    if train.train_samples is not None and train.train_samples < first:
        growth = "--rampup-batch-size" if train.rampup_batch_size else "--batch-size-steps"
        grows = train.rampup_batch_size or train.batch_size_steps
        yield (
            f"--train-samples {train.train_samples} is less than one iteration of {first} samples: "
            f"raise it, or lower {growth if grows else '--global-batch-size'}"
        )


@notes
def _smaller_batches(flags: Flags) -> Iterator[str]:
    train = flags[TrainSettings]
    if train.rampup_batch_size and train.train_iters is not None:
        yield (
            f"--train-iters {train.train_iters} counts the iterations with smaller batches too "
            f"(--rampup-batch-size): {iterations(train).samples} samples in all; Megatron-LM takes "
            "the two together only as --train-samples, or with --step-batch-size-schedule"
        )
