"""Other names of this project's flags: older spellings, and those of Megatron's relatives.

``{}`` stands for the flag's value. Sources: Megatron-LM from 2019 on, Megatron-DeepSpeed
(Microsoft's and BigScience's), the forks of Sea AI Lab (zero bubble, vocabulary parallelism),
Megatron-LLM of EPFL, and the forks of BigCode and llm-jp.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from megatron.config.foreign.answer import Row, rows
from megatron.config.foreign.conditions import WITH_TABLE
from megatron.config.foreign.line import SHORTER_TOKENS, Condition, Line
from megatron.config.log import SCHEDULE_PROFILE_ITERATIONS
from megatron.schedules.plan_flags import PLAN_FLAGS

_TIMERS = (
    ("--schedule-timer-start", "--schedule-timer-end"),
    ("--zero-bubble-pipeline-timers-start-iter", "--zero-bubble-pipeline-timers-end-iter"),
)


def read_as() -> Iterator[Row]:
    """The flags, with what each is read as."""
    for ours, theirs in (*_NAMES, *_short_names()):
        yield from rows("rewritten", ours, theirs)
    for ours, theirs, computed in _COMPUTED:
        yield from rows("rewritten", ours, theirs, read=computed)
    for start, end in _TIMERS:
        yield from _timers(start, end)
    yield from rows(
        "rewritten",
        "--layer-distribution remainder",
        "--allow-padding-num-layers",
        when=Condition("where the stages do not divide the layers", _uneven),
    )
    yield from rows(
        "rewritten",
        "--position-embedding-type none",
        "--no-position-embedding",
        when=WITH_TABLE,
    )
    sharded = "--optimizer muon --use-distributed-optimizer"
    yield from rows("rewritten", sharded, "--optimizer {dist_muon}")


def _short_names() -> Iterator[tuple[str, str]]:
    """The short names that the tools have for the flags of a plan."""
    for ours, *others in PLAN_FLAGS.values():
        yield f"{ours} {{}}", "\n".join(f"{name} N" for name in others)


def _timers(start: str, end: str) -> Iterator[Row]:
    """The forks measure some iterations and plan anew; they switch it off by a late start."""

    def measures(line: Line) -> bool:
        first = line.number(start, 1)
        after = line.number(end, first + SCHEDULE_PROFILE_ITERATIONS)
        return first < after and not 0 < line.last_iteration < after

    when = Condition(
        "where iterations remain to be measured, and to be trained after them", measures
    )
    yield from rows("rewritten", "--profile-schedule-start {} --replan", f"{start} N", when)
    yield from rows("rewritten", "--profile-schedule-end {}", f"{end} N", when)
    never = f"no iteration from {start} to {end} can be timed and planned with before the run ends"
    yield from rows("noted", never, f"{start} N\n{end} N")


def _uneven(line: Line) -> bool:
    stages = line.number("--pipeline-model-parallel-size", 1)
    told = (
        "--enable-layer-redistribution",
        "--layer-distribution",
        "--num-layers-per-virtual-pipeline-stage",
    )
    return line.number("--num-layers") % max(stages, 1) != 0 and line.given.keys().isdisjoint(told)


def _grouped(line: Line, values: Sequence[str]) -> str:
    heads, groups = line.word("--num-attention-heads"), values[0]
    return "" if heads == groups else f"--group-query-attention --num-query-groups {groups}"


def _train_tokens(line: Line, _: Sequence[str]) -> str:
    """Training ends at the shorter of two lengths, so the longer one asks for nothing."""
    samples = line.samples_of(line.number("--train-tokens"))
    return "" if 0 < line.samples <= samples else f"--train-samples {samples}"


def _decay_tokens(line: Line, _: Sequence[str]) -> str:
    return _span(line, "decay")


def _warmup_tokens(line: Line, _: Sequence[str]) -> str:
    return _span(line, "warmup")


def _size_steps(line: Line, values: Sequence[str]) -> str:
    """Thresholds in tokens become samples, rounded down; what is no number stays, to be told."""
    found = []
    for entry in " ".join(values).replace(",", " ").split():
        threshold, colon, size = entry.partition(":")
        digits = threshold.upper().rstrip("KMBT")
        unit = _UNITS.get(threshold.upper()[len(digits) :], math.nan)
        try:
            tokens = int(float(digits) * unit)
        except (ValueError, OverflowError):
            found.append(entry)
        else:
            found.append(f"{line.samples_of(tokens)}{colon}{size}")
    return f"--batch-size-steps {' '.join(found)}"


_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _span(line: Line, span: str) -> str:
    """A span of the learning rate, in the unit in which the line counts its training."""
    samples = line.samples_of(line.number(f"--lr-{span}-tokens"))
    if "--train-iters" not in line.given or SHORTER_TOKENS.holds(line):
        return f"--lr-{span}-samples {samples}"
    return f"--lr-{span}-iters {int(samples // line.batch)}"


_NAMES = (
    ("--num-layers {}", "--encoder-num-layers N"),
    ("--loss-scale {}", "--loss-scaling-factor N"),
    ("--fp8-format {}", "--fp8 N"),
    ("--fp8-format hybrid", "--fp8-hybrid"),
    ("--fp8-format e4m3", "--fp8-e4m3"),
    ("--seq-length {}", "--encoder-seq-length N"),
    ("--kill-switch-path {}", "--kill-switch-file N"),
    ("--use-distributed-optimizer", "--zero-stage {1}"),
    ("--tensor-model-parallel-size {}", "--model-parallel-size N\n--tensor-parallel-size N"),
    ("--pipeline-model-parallel-size {}", "--pipeline-parallel-size N"),
    (
        "--num-virtual-stages-per-pipeline-rank {}",
        "--virtual-pipeline-model-parallel-size N",
    ),
    ("--save-measured-costs {}", "--schedule-costs N"),
    ("--micro-batch-size {}", "--batch-size N"),
    ("--ffn-hidden-size {}", "--intermediate-size N"),
    ("--recompute-granularity full --recompute-method uniform", "--checkpoint-activations"),
    (
        "--recompute-granularity full --recompute-method {}",
        "--activations-checkpoint-method {uniform,block}",
    ),
    (
        "--recompute-num-layers {}",
        "--checkpoint-num-layers N\n--activations-checkpoint-num-layers N",
    ),
    ("--lr-warmup-fraction {}", "--warmup N"),
    ("--position-embedding-type rope", """
        --use-rotary-position-embeddings
        --use-llama2-rotary-position-embeddings
        --use-mistral-rotary-position-embeddings
        --position-embedding-type {rotary}"""),
    ("--position-embedding-type learned_absolute", """
        --position-embedding-type {absolute,learned}"""),
    ("--position-embedding-type alibi", "--use-alibi-position-embeddings"),
    ("--rotary-base {}", "--rope-theta N\n--rotary-position-embeddings-theta N"),
    ("--normalization RMSNorm", """
        --use-rms-norm
        --use-rmsnorm
        --normalization {rmsnorm}"""),
    ("--normalization LayerNorm", "--normalization {layernorm}"),
    ("--norm-epsilon {}", "--layernorm-epsilon N\n--rms-norm-eps N\n--rmsnorm-epsilon N"),
    ("--apply-layernorm-1p", "--add-rmsnorm-offset"),
    ("--post-self-attn-layernorm", "--post-self-attn-norm"),
    ("--post-mlp-layernorm", "--post-mlp-norm"),
    ("--post-self-attn-layernorm --post-mlp-layernorm", "--post-norm"),
    ("--apply-residual-connection-post-layernorm", "--apply-residual-connection-post-norm"),
    ("--embedding-multiplier {}", "--embedding-multiplier-scale N"),
    ("--logit-softcap {}", "--output-logit-softcapping N\n--final-logit-softcapping N"),
    ("--geglu", "--glu-activation {geglu}"),
    ("--swiglu", "--glu-activation {swiglu}\n--use-swiglu"),
    (
        "--untie-embeddings-and-output-weights",
        "--no-tie-embed-logits\n--no-tie-word-embeddings",
    ),
    ("--disable-bias-linear", "--no-bias-linear\n--disable-all-bias"),
    (
        "--group-query-attention --num-query-groups 1",
        "--attention-head-type {multiquery}\n--use-multiquery-attn",
    ),
    ("--z-loss-coeff 1e-4", "--use-z-loss"),
    ("--optimizer adam", "--optimizer {adamw,Adam,AdamW}"),
    ("--muon-nesterov", "--muon-use-nesterov"),
    ("--lr-wsd-decay-style minus_sqrt", "--lr-wsd-decay-style {1-sqrt}"),
    ("--eval-iters 0", "--eval-iters {-1}"),
    ("--wandb-exp-name {}", "--wandb-name N"),
    ("--wandb-entity {}", "--wandb-entity-name N"),
    (
        "--tokenizer-type HuggingFaceTokenizer",
        "--tokenizer-type {PretrainedFromHF,HFAutoTokenizer}",
    ),
    ("--tokenizer-model {}", "--tokenizer-name-or-path N"),
    ("--merge-file {}", "--merges-file N"),
    ("--tokenizer-special-tokens {}", "--tiktoken-special-tokens N ..."),
    ("--pipeline-schedule 1f1b-v", "--enable-1f1b-v"),
    (
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        "--pp-partition-method {type:transformer|embedding}",
    ),
    ("--layer-distribution remainder", "--pp-partition-method {type:transformer}"),
    ("--layer-distribution even", "--pp-partition-method {uniform}"),
)  # fmt: skip

_COMPUTED = (
    (
        "--group-query-attention --num-query-groups {}, or nothing where it is the number of heads",
        "--num-key-value-heads N\n--num-attention-heads-kv N\n--num-kv-heads N\n--n-head-kv N",
        _grouped,
    ),
    (
        "--train-samples {} / --seq-length, or nothing beside a shorter length",
        "--train-tokens N",
        _train_tokens,
    ),
    (
        "--lr-decay-samples {} / --seq-length, or in iterations",
        "--lr-decay-tokens N",
        _decay_tokens,
    ),
    (
        "--lr-warmup-samples {} / --seq-length, or in iterations",
        "--lr-warmup-tokens N",
        _warmup_tokens,
    ),
    (
        "--batch-size-steps {}, in samples: tokens / --seq-length",
        "--step-batch-size-schedule N ...",
        _size_steps,
    ),
)
