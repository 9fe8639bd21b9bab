"""The rules about several flags: each rule yields a line on every mistake that it finds.

A line begins with the flag at fault and names the way out. ``RULES`` lists all rules. Those of
``NOTES`` find flags that change nothing beside others.
"""

from collections.abc import Iterator
from typing import Final

from megatron.config.context_rules import CONTEXT_RULES
from megatron.config.corpus_rules import CORPUS_NOTES, CORPUS_RULES
from megatron.config.declare import Flags, Rule
from megatron.config.deepspeed_file import deepspeed_file
from megatron.config.eight_bit_rules import EIGHT_BIT_RULES
from megatron.config.flags import LogFlags, ModelFlags, TrainFlags
from megatron.config.guard_rules import GUARD_NOTES, GUARD_RULES
from megatron.config.layer_flags import LayerFlags
from megatron.config.layer_rules import LAYER_NOTES, LAYER_RULES
from megatron.config.lengths import growth_of, iterations
from megatron.config.long_run_flags import CheckpointFlags
from megatron.config.optimizer_impl import IMPLEMENTATION_NOTES, IMPLEMENTATION_RULES
from megatron.config.optimizer_rules import OPTIMIZER_NOTES, OPTIMIZER_RULES
from megatron.config.pipeline_flags import PIPELINE_NOTES, PIPELINE_RULES
from megatron.config.precision_rules import PRECISION_NOTES, PRECISION_RULES
from megatron.config.recompute_rules import RECOMPUTE_RULES
from megatron.config.resolve import profiled_iterations
from megatron.config.tensor_rules import TENSOR_NOTES, TENSOR_RULES


def _heads(flags: Flags) -> Iterator[str]:
    model, heads = flags[ModelFlags], flags[ModelFlags].num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        yield (
            f"--num-attention-heads {heads} does not divide --hidden-size {model.hidden_size}: "
            "change one of them, or give the width of a head with --kv-channels"
        )
    if model.group_query_attention and heads % (model.num_query_groups or 1):
        yield (
            f"--num-query-groups {model.num_query_groups} does not divide "
            f"--num-attention-heads {heads}: every group needs as many query heads"
        )


def _mlp(flags: Flags) -> Iterator[str]:
    model = flags[ModelFlags]
    gate = "--swiglu" if model.swiglu else "--geglu" if flags[LayerFlags].geglu else None
    if gate and model.ffn_hidden_size is None and model.hidden_size < 24:
        yield (
            f"{gate} with --hidden-size {model.hidden_size} leaves an MLP without width, "
            "as its default is a multiple of 64: give --ffn-hidden-size"
        )


def _positions(flags: Flags) -> Iterator[str]:
    model, positions = flags[ModelFlags], flags[ModelFlags].max_position_embeddings
    if positions is not None and model.seq_length > positions:
        yield (
            f"--seq-length {model.seq_length} is longer than --max-position-embeddings "
            f"{positions}: raise the latter, or leave it out"
        )


def _rotation(flags: Flags) -> Iterator[str]:
    model = flags[ModelFlags]
    if model.position_embedding_type != "rope":
        return
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    rotated = int(head * model.rotary_percent)
    if rotated < 2 or rotated % 2:
        yield (
            f"--rotary-percent {model.rotary_percent} rotates {rotated} of the {head} "
            "channels of a head: it takes an even number of them, at least 2"
        )


def _batches(flags: Flags) -> Iterator[str]:
    batch, micro = flags[TrainFlags].global_batch_size, flags[TrainFlags].micro_batch_size
    if batch is not None and batch % micro:
        below = batch // micro * micro
        near = f"{below} or {below + micro}" if below else f"{micro}"
        yield (
            f"--global-batch-size {batch} is not divisible by --micro-batch-size {micro}: "
            f"use {near}"
        )


def _growing_batches(flags: Flags) -> Iterator[str]:
    try:
        growth_of(flags[TrainFlags])
    except ValueError as error:
        yield str(error)


def _length(flags: Flags) -> Iterator[str]:
    train = flags[TrainFlags]
    if (train.train_iters is None) == (train.train_samples is None):
        given = "neither is given" if train.train_iters is None else "both are given"
        yield f"--train-iters or --train-samples: {given}; give one of them"
    batch = train.global_batch_size or train.micro_batch_size
    if train.train_samples is not None and train.train_samples < batch:
        yield (
            f"--train-samples {train.train_samples} is less than one iteration of {batch} samples: "
            "raise it, or lower --global-batch-size"
        )


def _idle_without_training(flags: Flags) -> Iterator[str]:
    if flags[TrainFlags].skip_train and flags[CheckpointFlags].save is not None:
        yield (
            f"--save {flags[CheckpointFlags].save} changes nothing: --skip-train trains "
            "nothing to save"
        )


def _trace(flags: Flags) -> Iterator[str]:
    log = flags[LogFlags]
    if not log.profile:
        return
    if log.profile_step_end <= log.profile_step_start:
        yield (
            f"--profile-step-end {log.profile_step_end} is not after --profile-step-start "
            f"{log.profile_step_start}: nothing would be traced; raise it"
        )
    last = iterations(flags[TrainFlags]).last
    if log.profile_step_start > last > 0:
        yield (
            f"--profile-step-start {log.profile_step_start} is after the last iteration, "
            f"{last}: nothing would be traced; lower it"
        )


def _schedule_profile(flags: Flags) -> Iterator[str]:
    start, end = profiled_iterations(flags[LogFlags])
    if start is None or end is None:
        return
    if end <= start:
        yield (
            f"--profile-schedule-end {end} is not after --profile-schedule-start {start}: nothing "
            "would be measured; raise it"
        )
    if flags[LogFlags].save_measured_costs is None and not flags[LogFlags].replan:
        yield (
            f"--profile-schedule-start {start} measures passes, and nothing is done with it: add "
            "--save-measured-costs FILE, --replan or both"
        )
    last = iterations(flags[TrainFlags]).last
    if 0 < last < end - (not flags[LogFlags].replan):
        more = ", and --replan needs one more after them" if flags[LogFlags].replan else ""
        yield (
            f"--profile-schedule-start {start} measures the iterations before {end} "
            f"(--profile-schedule-end){more}, but the last is {last}: lower them"
        )


RULES: Final[tuple[Rule, ...]] = (
    _heads,
    _mlp,
    _positions,
    _rotation,
    *LAYER_RULES,
    *PIPELINE_RULES,
    *TENSOR_RULES,
    *CONTEXT_RULES,
    _batches,
    _growing_batches,
    _length,
    *PRECISION_RULES,
    *EIGHT_BIT_RULES,
    *RECOMPUTE_RULES,
    *OPTIMIZER_RULES,
    *IMPLEMENTATION_RULES,
    *CORPUS_RULES,
    deepspeed_file,
    _trace,
    _schedule_profile,
    *GUARD_RULES,
)
"""All rules that the flags alone decide, in the order of their groups."""

NOTES: Final[tuple[Rule, ...]] = (
    *LAYER_NOTES,
    *PRECISION_NOTES,
    *OPTIMIZER_NOTES,
    *IMPLEMENTATION_NOTES,
    *CORPUS_NOTES,
    _idle_without_training,
    *PIPELINE_NOTES,
    *TENSOR_NOTES,
    *GUARD_NOTES,
)
"""The rules about flags that change nothing beside the others: a line on each, as a note."""
