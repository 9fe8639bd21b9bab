"""The lines a run prints, in Megatron's own form, so that existing log parsers keep working.

Pure functions from values to text. The loop decides when a line is printed, and on which rank.
"""

import json
import math
from collections.abc import Iterator, Sequence

from megatron.flags.readable import visible
from megatron.run.parallel_config import ParallelConfig
from megatron.run.train import TrainSettings
from megatron.schedules.counted import counted
from megatron.training.metrics.peak_memory import MEBIBYTE, PeakMemory
from megatron.training.metrics.peak_tflops import Peak
from megatron.training.metrics.records import Evaluation, Generated, Interval


def introduction(
    parallel: ParallelConfig,
    train: TrainSettings,
    vocabulary: str,
    schedule: str,
    parameters: Sequence[int],
    flops: int,
    peak: Peak,
    of_model: int | None = None,
) -> Iterator[str]:
    """Yield the lines on the layout, the sizes and how FLOPs are counted.

    ``parameters`` has a number for every rank of a replica; each parameter counts on one rank only.
    ``flops`` are the FLOPs of an iteration over all ranks. ``of_model`` is the number of parameters
    of the model, if other replicas have some of its experts; ``None``: a replica has all.
    """
    shards = parallel.vocab_shards
    replicas = f"{train.replicas} replicas of a " if train.replicas > 1 else ""
    tensor = f" x {parallel.tensor.size} tensor-parallel" if parallel.tensor.size > 1 else ""
    tensor += " ranks that share the sequence" if parallel.tensor.sequence_parallel else ""
    tensor += f" x {parallel.context.size} context-parallel" if parallel.context.size > 1 else ""
    grid, dispatcher = parallel.grid, parallel.experts.moe_token_dispatcher_type
    if grid.spreads_experts:
        tensor += f", experts over {grid.expert_size} x {grid.expert_tensor_size} ({dispatcher}),"
    again = " with recomputed logits" if parallel.vocabulary.vocab_recompute else ""
    yield (
        f"{replicas}pipeline of {parallel.pipeline.size}{tensor} on {parallel.devices.device} "
        f"({parallel.devices.distributed_backend}), schedule {schedule}, vocabulary "
        f"{parallel.vocab_parallel}{again}, {counted(train.num_microbatches, 'microbatch')}, "
        f"{str(train.dtype).removeprefix('torch.')}"
    )
    yield (
        f"vocabulary {vocabulary}, padded to {parallel.padded_vocab_size} in "
        f"{counted(shards, 'shard')} of {parallel.padded_vocab_size // shards}"
    )
    by_rank = ", ".join(f"{count:,}" for count in parameters)
    whole = sum(parameters) if of_model is None else of_model
    yield f"parameters: {whole:,}; by rank: {by_rank}"
    yield (
        "model FLOPs = 3 x forward matrix products, causal attention counted in full "
        f"(Megatron-LM counts half), vocabulary without padding; {flops:.3E} per iteration"
    )
    yield f"peak of a rank: {peak.tflops:.3f} TFLOP/s ({peak.source})"


def vocabulary_words(vocab_size: int, added: int) -> str:
    """Return the number of entries of a vocabulary, with added entries named apart.

    ``added`` counts entries that the user did not ask for: the token for the end of a document.
    """
    return f"{vocab_size - added} + {added} for the end of a document" if added else f"{vocab_size}"


def iteration_line(values: Interval) -> str:
    """Return Megatron's training line, with one addition: the MFU behind the throughput.

    As in Megatron, the loss is missing where no iteration of the interval took a step, and the norm
    where the last iteration took none.
    """
    # Megatron prints one decimal, which is too coarse for a CPU core's third of a TFLOP/s.
    decimals = 1 if values.tflops_per_rank >= 10 else 3
    # Parsers look for the loss scale even of bf16 and fp32, which have none.
    scale = 1.0 if values.loss_scale is None else values.loss_scale
    fields = (
        f" [{values.time:%Y-%m-%d %H:%M:%S}]"
        f" iteration {values.iteration:8d}/{values.train_iters:8d}",
        f"consumed samples: {values.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {values.seconds_per_iteration * 1e3:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {values.tflops_per_rank:.{decimals}f}",
        f"MFU: {values.mfu:.1%}",
        f"learning rate: {values.learning_rate:.6E}",
        f"global batch size: {values.global_batch_size:5d}",
        *([f"lm loss: {values.lm_loss:.6E}"] if math.isfinite(values.lm_loss) else []),
        *(f"mtp_{depth} loss: {own:.6E}" for depth, own in enumerate(values.mtp_losses, 1)),
        *(f"{name}: {own:.6E}" for name, own in values.layer_losses.items()),
        *_imbalance(values),
        f"loss scale: {scale:.1f}",
        *([f"grad norm: {values.grad_norm:.3f}"] if math.isfinite(values.grad_norm) else []),
        *([] if values.num_zeros is None else [f"num zeros: {values.num_zeros:.1f}"]),
        *([] if values.params_norm is None else [f"params norm: {values.params_norm:.3f}"]),
        f"number of skipped iterations: {values.skipped:3d}",
        f"number of nan iterations: {values.nans:3d} |",
    )
    return " | ".join(fields)


def _imbalance(values: Interval) -> Iterator[str]:
    """Yield the largest imbalance of experts, if there are experts."""
    if values.expert_imbalance is not None:
        where = f"layer {values.busiest_layer}, expert {values.busiest_expert}"
        yield f"expert imbalance: {values.expert_imbalance:.3f} ({where})"


def load_lines(values: Interval) -> Iterator[str]:
    """Yield a line for every layer with experts: how many tokens have chosen each expert."""
    for own in values.layers:
        if own.expert_loads:
            yield f" expert loads of layer {own.layer} | {' '.join(map(str, own.expert_loads))} |"


def evaluation_lines(values: Evaluation) -> str:
    """Return Megatron's validation line between two rules, and which data it is about.

    At the end of a run Megatron names the set before the loss. There may be two evaluations after
    the last iteration, so every line names its set and its batches behind the loss.
    """
    where = f" on {values.dataset} set" if values.at_end else ""
    name = "validation" if values.dataset == "test" else values.dataset
    last = values.first_batch + values.batches - 1
    line = (
        f" {name} loss at iteration {values.iteration}{where} | "
        f"lm loss value: {values.lm_loss:.6E} | lm loss PPL: {values.perplexity:.6E} | "
        f"{values.dataset} set, batches {values.first_batch} to {last} | "
    )
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def generation_lines(values: Generated) -> Iterator[str]:
    r"""Yield a line for every text; the ends of its lines are shown as ``\n``.

    Texts are whole: the tokens of a text are few, and not every language has blanks between words.
    """
    for number, own in enumerate(values.texts, 1):
        prompt, text = (
            visible(json.dumps(part, ensure_ascii=False)) for part in (own.prompt, own.text)
        )
        yield f" text {number} at iteration {values.iteration} | {prompt} | {text} |"


def memory_line(rank: int, iteration: int, memory: PeakMemory) -> str:
    """Return the line on one rank's peak memory, in MiB under Megatron's heading."""
    heading = f"[Rank {rank}] (after {iteration} iterations) memory (MB)"
    if memory.reserved is None:
        return f"{heading} | max resident: {memory.held / MEBIBYTE:.1f}"
    return (
        f"{heading} | max allocated: {memory.held / MEBIBYTE:.1f}"
        f" | max reserved: {memory.reserved / MEBIBYTE:.1f}"
    )
