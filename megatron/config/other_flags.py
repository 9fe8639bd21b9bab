"""Flags of Megatron-LM that are no flags here: rewritten, granted with a note, or refused by name.

A user who brings an existing command line learns of each such flag what becomes of it; none is
swallowed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Older spellings with exactly the meaning of a flag we have.
_REWRITTEN: dict[str, tuple[str, ...]] = {
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
}


@dataclass(frozen=True)
class _Granted:
    """A flag that asks for what always holds.

    Attributes:
        reason: why it changes nothing.
        values: what it may be set to; empty when it takes no value.
    """

    reason: str
    values: tuple[str, ...] = ()


_GRANTED: dict[str, _Granted] = {
    "--accumulate-allreduce-grads-in-fp32": _Granted("gradients always add up in fp32"),
    "--attention-backend": _Granted(
        "attention takes PyTorch's flash kernel where it can", ("auto", "flash")
    ),
    "--calculate-per-token-loss": _Granted(
        "the loss is always divided by the counted tokens of the global batch"
    ),
    "--context-parallel-size": _Granted("a sequence is never split", ("1",)),
    "--dataloader-type": _Granted("samples are always read once, in order", ("single",)),
    "--enable-exactly-numeric-match": _Granted("a step that is taken back leaves no trace"),
    "--enable-zb-runtime": _Granted("one runtime runs every schedule"),
    "--log-throughput": _Granted("every line has the throughput"),
    "--no-create-attention-mask-in-dataloader": _Granted("no causal mask is ever stored"),
    "--transformer-impl": _Granted("layers are PyTorch's own", ("local",)),
    "--use-cpu-initialization": _Granted("initial weights are the same for every layout"),
    "--use-flash-attn": _Granted("attention takes PyTorch's flash kernel where it can"),
    "--use-mcore-models": _Granted("there is one model implementation"),
}

_CHECKPOINTS = "checkpoints are not written yet"
_PROFILE = "use --profile-schedule-start and --profile-schedule-end, with --replan"
_SPLIT = "use --pipeline-schedule zb-1p or another that splits the backward"
_USE_INSTEAD: dict[str, str] = {
    "--fp16": "use --bf16, which needs no loss scale",
    "--add-qkv-bias": "biases are in all linear layers, or with --disable-bias-linear in none",
    "--mock-data": "tools/sample_data.py makes real data in seconds",
    "--no-position-embedding": "for rotated positions use --position-embedding-type rope",
    "--num-workers": "data is read by memory mapping, without workers; leave it out",
    "--save": _CHECKPOINTS,
    "--save-interval": _CHECKPOINTS,
    "--use-pytorch-profiler": "--profile alone writes a PyTorch trace",
    "--allow-padding-num-layers": "use --layer-distribution remainder, or N,N,...",
    "--defer-embedding-wgrad-compute": _SPLIT,
    "--delay-wgrad-compute": _SPLIT,
    "--enable-1f1b-v": "use --pipeline-schedule 1f1b-v",
    "--pipeline-model-parallel-layout": "use --layer-distribution N,N,...",
    "--zero-bubble-adaptive-memory-limit-percentile": "use --zero-bubble-max-pending-backward",
    "--zero-bubble-pipeline-timers-end-iter": _PROFILE,
    "--zero-bubble-pipeline-timers-start-iter": _PROFILE,
}

# One word per flag, separated by blanks.
_ORIGINALS = """
    --allow-padding-num-layers --enable-1f1b-v --no-pre-communication-optimization
    --use-legacy-models --zero-bubble-adaptive-memory-limit-percentile
    --zero-bubble-pipeline-timers-end-iter --zero-bubble-pipeline-timers-start-iter
"""

_MEGATRONS = """
    --add-qkv-bias --apply-layernorm-1p --apply-query-key-layer-scaling --async-save
    --attention-softmax-in-fp32 --auto-detect-ckpt-format --check-for-spiky-loss
    --ckpt-assume-constant-structure --ckpt-convert-format --ckpt-convert-save --ckpt-format
    --ckpt-fully-parallel-load --ckpt-step --cp-comm-type --cross-entropy-fusion-impl
    --cross-entropy-loss-fusion --data-args-path --data-parallel-random-init
    --data-parallel-sharding-strategy --ddp-average-in-collective --ddp-bucket-size
    --ddp-num-buckets --decoupled-lr --decoupled-min-lr --defer-embedding-wgrad-compute
    --delay-wgrad-compute --deterministic-mode --disable-gloo-process-groups
    --dist-ckpt-optim-fully-reshardable --dist-ckpt-strictness --distribute-saved-activations
    --embedding-init-method-std --empty-unused-memory-level --end-weight-decay
    --exit-duration-in-mins --exit-on-missing-checkpoint --exit-signal --exit-signal-handler
    --exp-avg-dtype --finetune --fp16 --fp16-lm-cross-entropy --fp32-residual-connection
    --fp8-amax-compute-algo --fp8-amax-history-len --fp8-format --fp8-param-gather --fp8-recipe
    --grad-reduce-in-bf16 --hysteresis --init-method-xavier-uniform --initial-loss-scale
    --iterations-to-skip --log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm
    --log-progress --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
    --log-world-size-to-tensorboard --loss-scale --loss-scale-window --lr-wsd-decay-iters
    --lr-wsd-decay-style --main-grads-dtype --manual-gc --manual-gc-interval --merge-file
    --microbatch-group-size-per-virtual-pipeline-stage --min-loss-scale --mock-data
    --no-barrier-with-level-1-timing --no-bias-dropout-fusion --no-bias-gelu-fusion
    --no-bias-swiglu-fusion --no-check-for-nan-in-loss-and-grad --no-ckpt-fully-parallel-save
    --no-gradient-accumulation-fusion --no-load-optim --no-load-rng --no-masked-softmax-fusion
    --no-mmap-bin-files --no-overlap-p2p-communication --no-pad-vocab-size
    --no-persist-layer-norm --no-position-embedding --no-rope-fusion --no-save-optim
    --no-save-rng --non-persistent-save-interval --num-dataset-builder-threads
    --num-distributed-optimizer-instances --num-workers --overlap-grad-reduce
    --overlap-p2p-communication-warmup-flush --overlap-param-gather
    --overlap-param-gather-with-optimizer-step --override-opt_param-scheduler
    --padded-vocab-size --per-split-data-args-path --pipeline-model-parallel-layout
    --pretrained-checkpoint --profile-ranks --rampup-batch-size --recompute-activations
    --recompute-granularity --recompute-method --recompute-modules --recompute-num-layers
    --record-memory-history --rerun-mode --reset-attention-mask --reset-position-ids
    --rope-scaling-factor --rotary-interleaved --rotary-seq-len-interpolation-factor --save
    --save-interval --save-retain-interval --sequence-parallel --sgd-momentum --skip-train
    --spec --squared-relu --start-weight-decay --step-batch-size-schedule --tensorboard-dir
    --tensorboard-log-interval --tensorboard-queue-size --test-data-path --tiktoken-pattern
    --timing-log-level --timing-log-option --tp-comm-overlap --train-data-path
    --use-checkpoint-args --use-checkpoint-opt_param-scheduler --use-distributed-optimizer
    --use-megatron-fsdp --use-persistent-ckpt-worker --use-precision-aware-optimizer
    --use-pytorch-profiler --use-rope-scaling --use-torch-fsdp2 --use-tp-pp-dp-mapping
    --valid-data-path --verify-integrity --vocab-extra-ids --vocab-file --wandb-entity
    --wandb-exp-name --wandb-project --wandb-save-dir --weight-decay-incr-style
    --wgrad-deferral-limit
"""


def _spelling(word: str) -> str:
    """A flag with hyphens throughout, as the parser too takes ``--num_layers``."""
    return word.replace("_", "-") if word.startswith("--") else word


_REFUSED = {
    _spelling(flag): "the original VocabularyParallelism" for flag in _ORIGINALS.split()
} | {_spelling(flag): "Megatron-LM" for flag in _MEGATRONS.split()}


def settle_other_flags(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Take the flags of Megatron-LM out of a command line that are no flags here.

    Args:
        argv: the words of the command line, without the program.

    Returns:
        The words that are left for the parser, and a note on each flag that was granted.

    Raises:
        ValueError: a flag that is known but not built, or set to a value that is not.
    """
    kept: list[str] = []
    notes: dict[str, None] = {}  # ordered, each once
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        flag = _spelling(flag)
        _refuse_not_built(flag)
        if flag in _REWRITTEN:
            kept.extend(_REWRITTEN[flag])
        elif flag in _GRANTED:
            granted = _GRANTED[flag]
            if granted.values and not equals:
                value = next(words, "")
            notes[_grant(flag, value, granted)] = None
        else:
            kept.append(word)
    return kept, tuple(notes)


def _refuse_not_built(flag: str) -> None:
    if flag in _REFUSED:
        advice = _USE_INSTEAD.get(flag, "leave it out")
        raise ValueError(f"{flag} is known to {_REFUSED[flag]}, not built here yet: {advice}")


def _grant(flag: str, value: str, granted: _Granted) -> str:
    """The note on a granted flag, or a refusal of its value."""
    if granted.values:
        if value not in granted.values:
            raise ValueError(
                f"{flag} {value} is not built here yet: {granted.reason}; "
                f"use {' or '.join(granted.values)}, or leave it out"
            )
        flag = f"{flag} {value}"
    elif value:
        raise ValueError(f"{flag} takes no value, got {value!r}")
    return f"{flag} changes nothing: {granted.reason}"
