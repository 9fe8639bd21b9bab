"""The lines a run prints, in Megatron's own form, so that existing log parsers keep working.

Pure functions from values to text; who prints, when and on which rank is the loop's affair.
"""

import math
from dataclasses import dataclass
from datetime import datetime

from megatron.training.metrics.peak_memory import MEBIBYTE, PeakMemory


@dataclass(frozen=True)
class IterationValues:
    """What a training line reports.

    Attributes:
        time: when the line is printed.
        iteration: number of the last finished iteration, from 1.
        train_iters: iterations of the whole job.
        consumed_samples: training samples so far.
        seconds_per_iteration: mean over the interval since the last line.
        tflops_per_rank: model TFLOP/s of one rank.
        mfu: ``tflops_per_rank`` as a share of the peak.
        learning_rate: rate of the next step, as in Megatron.
        global_batch_size: samples of an iteration.
        lm_loss: mean over the interval, nats per token.
        grad_norm: global norm of the last iteration, before clipping.
    """

    time: datetime
    iteration: int
    train_iters: int
    consumed_samples: int
    seconds_per_iteration: float
    tflops_per_rank: float
    mfu: float
    learning_rate: float
    global_batch_size: int
    lm_loss: float
    grad_norm: float


def iteration_line(values: IterationValues) -> str:
    """Megatron's training line; the MFU behind the throughput is the only addition."""
    # One decimal, as Megatron has it, says nothing of a CPU core's third of a TFLOP/s.
    decimals = 1 if values.tflops_per_rank >= 10 else 3
    # Fields that parsers look for say what holds of every run: in bf16 and fp32 no loss is scaled,
    # and a step that cannot be taken, or a loss that is no number, ends the run.
    fields = (
        f" [{values.time:%Y-%m-%d %H:%M:%S}]"
        f" iteration {values.iteration:8d}/{values.train_iters:8d}",
        f"consumed samples: {values.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {values.seconds_per_iteration * 1e3:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {values.tflops_per_rank:.{decimals}f}",
        f"MFU: {values.mfu:.1%}",
        f"learning rate: {values.learning_rate:.6E}",
        f"global batch size: {values.global_batch_size:5d}",
        f"lm loss: {values.lm_loss:.6E}",
        "loss scale: 1.0",
        f"grad norm: {values.grad_norm:.3f}",
        "number of skipped iterations:   0",
        "number of nan iterations:   0 |",
    )
    return " | ".join(fields)


def evaluation_lines(iteration: int, lm_loss: float) -> str:
    """Megatron's ruled validation line.

    Args:
        iteration: training iterations done.
        lm_loss: mean over the evaluation's tokens, nats per token.

    Returns:
        Three lines; the perplexity is that of at most 20 nats, as in Megatron.
    """
    perplexity = math.exp(min(20.0, lm_loss))
    line = (
        f" validation loss at iteration {iteration} | lm loss value: {lm_loss:.6E} | "
        f"lm loss PPL: {perplexity:.6E} | "
    )
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def memory_line(rank: int, iteration: int, memory: PeakMemory) -> str:
    """The peak memory of one rank, in MiB under Megatron's heading.

    Args:
        rank: global rank.
        iteration: training iterations done.
        memory: peaks in bytes.
    """
    heading = f"[Rank {rank}] (after {iteration} iterations) memory (MB)"
    if memory.reserved is None:
        return f"{heading} | max resident: {memory.held / MEBIBYTE:.1f}"
    return (
        f"{heading} | max allocated: {memory.held / MEBIBYTE:.1f}"
        f" | max reserved: {memory.reserved / MEBIBYTE:.1f}"
    )
