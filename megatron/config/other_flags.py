"""Flags of Megatron-LM and of the original that do not exist here, with an answer to each.

A user who brings an existing command line gets an answer to every such flag; none is ignored
silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from megatron.schedules.plan_flags import PLAN_FLAGS

_MEGATRON: Final = "Megatron-LM"
_ORIGINAL: Final = "the original VocabularyParallelism"


@dataclass(frozen=True)
class Answer:
    """The answer to a flag.

    Attributes:
        kind: ``rewritten`` to a flag of this project with the same meaning; ``noted``, because its
            effect always holds; ``refused``, because its effect would be missing.
        reason: the flag it is rewritten to, perhaps with a value in place of its own; why it
            changes nothing; or what to do instead.
        values: the values it may have; empty if it takes no value, or no value is of use.
        known_to: the program that has this flag.
    """

    kind: Literal["rewritten", "noted", "refused"]
    reason: str
    values: tuple[str, ...] = ()
    known_to: str = _MEGATRON


def _noted(reason: str, *values: str) -> Answer:
    return Answer("noted", reason, values)


def _refused(instead: str, known_to: str = _MEGATRON) -> Answer:
    return Answer("refused", instead, known_to=known_to)


_LEAVE_IT_OUT: Final = "leave it out"
_CHECKPOINTS: Final = "checkpoints are not written yet"
_PROFILE: Final = "use --profile-schedule-start and --profile-schedule-end, with --replan"
_SPLIT: Final = "use --pipeline-schedule zb-1p or another that splits the backward"

_EXPLAINED: Final[Mapping[str, Answer]] = {
    "--use-rotary-position-embeddings": Answer("rewritten", "--position-embedding-type rope"),
    "--accumulate-allreduce-grads-in-fp32": _noted("gradients always add up in fp32"),
    "--attention-backend": _noted(
        "attention takes PyTorch's flash kernel where it can", "auto", "flash"
    ),
    "--calculate-per-token-loss": _noted(
        "the loss is always divided by the counted tokens of the global batch"
    ),
    "--context-parallel-size": _noted("a sequence is never split", "1"),
    "--dataloader-type": _noted("samples are always read once, in order", "single"),
    "--enable-exactly-numeric-match": _noted("a step that is taken back leaves no trace"),
    "--enable-zb-runtime": _noted("one runtime runs every schedule"),
    "--log-throughput": _noted("every line has the throughput"),
    "--no-create-attention-mask-in-dataloader": _noted("no causal mask is ever stored"),
    "--transformer-impl": _noted("layers are PyTorch's own", "local"),
    "--use-cpu-initialization": _noted("initial weights are the same for every layout"),
    "--use-flash-attn": _noted("attention takes PyTorch's flash kernel where it can"),
    "--use-mcore-models": _noted("there is one model implementation"),
    "--fp16": _refused("use --bf16, which needs no loss scale"),
    "--add-qkv-bias": _refused(
        "biases are in all linear layers, or with --disable-bias-linear in none"
    ),
    "--mock-data": _refused("tools/sample_data.py makes real data in seconds"),
    "--no-position-embedding": _refused("for rotated positions use --position-embedding-type rope"),
    "--num-workers": _refused("data is read by memory mapping, without workers; leave it out"),
    "--save": _refused(_CHECKPOINTS),
    "--save-interval": _refused(_CHECKPOINTS),
    "--use-pytorch-profiler": _refused("--profile alone writes a PyTorch trace"),
    "--allow-padding-num-layers": _refused(
        "use --layer-distribution remainder, or N,N,...", _ORIGINAL
    ),
    "--defer-embedding-wgrad-compute": _refused(_SPLIT),
    "--delay-wgrad-compute": _refused(_SPLIT),
    "--enable-1f1b-v": _refused("use --pipeline-schedule 1f1b-v", _ORIGINAL),
    "--pipeline-model-parallel-layout": _refused("use --layer-distribution N,N,..."),
    "--zero-bubble-adaptive-memory-limit-percentile": _refused(
        "use --zero-bubble-max-pending-backward", _ORIGINAL
    ),
    "--zero-bubble-pipeline-timers-end-iter": _refused(_PROFILE, _ORIGINAL),
    "--zero-bubble-pipeline-timers-start-iter": _refused(_PROFILE, _ORIGINAL),
    "--no-pre-communication-optimization": _refused(_LEAVE_IT_OUT, _ORIGINAL),
    "--use-legacy-models": _refused(_LEAVE_IT_OUT, _ORIGINAL),
}

# One word per flag, separated by blanks.
_REFUSED_BY_NAME: Final = """
    --apply-layernorm-1p --apply-query-key-layer-scaling --async-save
    --attention-softmax-in-fp32 --auto-detect-ckpt-format --check-for-spiky-loss
    --ckpt-assume-constant-structure --ckpt-convert-format --ckpt-convert-save --ckpt-format
    --ckpt-fully-parallel-load --ckpt-step --cp-comm-type --cross-entropy-fusion-impl
    --cross-entropy-loss-fusion --data-args-path --data-parallel-random-init
    --data-parallel-sharding-strategy --ddp-average-in-collective --ddp-bucket-size
    --ddp-num-buckets --decoupled-lr --decoupled-min-lr --deterministic-mode
    --disable-gloo-process-groups --dist-ckpt-optim-fully-reshardable --dist-ckpt-strictness
    --distribute-saved-activations --embedding-init-method-std --empty-unused-memory-level
    --end-weight-decay --exit-duration-in-mins --exit-on-missing-checkpoint --exit-signal
    --exit-signal-handler --exp-avg-dtype --finetune --fp16-lm-cross-entropy
    --fp32-residual-connection --fp8-amax-compute-algo --fp8-amax-history-len --fp8-format
    --fp8-param-gather --fp8-recipe --grad-reduce-in-bf16 --hysteresis
    --init-method-xavier-uniform --initial-loss-scale --iterations-to-skip
    --log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm --log-progress
    --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
    --log-world-size-to-tensorboard --loss-scale --loss-scale-window --lr-wsd-decay-iters
    --lr-wsd-decay-style --main-grads-dtype --manual-gc --manual-gc-interval --merge-file
    --microbatch-group-size-per-virtual-pipeline-stage --min-loss-scale
    --no-barrier-with-level-1-timing --no-bias-dropout-fusion --no-bias-gelu-fusion
    --no-bias-swiglu-fusion --no-check-for-nan-in-loss-and-grad --no-ckpt-fully-parallel-save
    --no-gradient-accumulation-fusion --no-load-optim --no-load-rng --no-masked-softmax-fusion
    --no-mmap-bin-files --no-overlap-p2p-communication --no-pad-vocab-size
    --no-persist-layer-norm --no-rope-fusion --no-save-optim --no-save-rng
    --non-persistent-save-interval --num-dataset-builder-threads
    --num-distributed-optimizer-instances --overlap-grad-reduce
    --overlap-p2p-communication-warmup-flush --overlap-param-gather
    --overlap-param-gather-with-optimizer-step --override-opt_param-scheduler
    --padded-vocab-size --per-split-data-args-path --pretrained-checkpoint --profile-ranks
    --rampup-batch-size --recompute-activations --recompute-granularity --recompute-method
    --recompute-modules --recompute-num-layers --record-memory-history --rerun-mode
    --reset-attention-mask --reset-position-ids --rope-scaling-factor --rotary-interleaved
    --rotary-seq-len-interpolation-factor --save-retain-interval --sequence-parallel
    --sgd-momentum --skip-train --spec --squared-relu --start-weight-decay
    --step-batch-size-schedule --tensorboard-dir --tensorboard-log-interval
    --tensorboard-queue-size --test-data-path --tiktoken-pattern --timing-log-level
    --timing-log-option --tp-comm-overlap --train-data-path --use-checkpoint-args
    --use-checkpoint-opt_param-scheduler --use-distributed-optimizer --use-megatron-fsdp
    --use-persistent-ckpt-worker --use-precision-aware-optimizer --use-rope-scaling
    --use-torch-fsdp2 --use-tp-pp-dp-mapping --valid-data-path --verify-integrity
    --vocab-extra-ids --vocab-file --wandb-entity --wandb-exp-name --wandb-project
    --wandb-save-dir --weight-decay-incr-style --wgrad-deferral-limit
"""


def spelling(word: str) -> str:
    """Return a flag with hyphens only, because the parser also accepts ``--num_layers``."""
    return word.replace("_", "-") if word.startswith("--") else word


OTHER_FLAGS: Final[Mapping[str, Answer]] = {
    **_EXPLAINED,
    **{spelling(flag): _refused(_LEAVE_IT_OUT) for flag in _REFUSED_BY_NAME.split()},
    **{
        other: Answer("rewritten", ours)
        for ours, *others in PLAN_FLAGS.values()
        for other in others
    },
    "--schedule-costs": Answer("rewritten", "--save-measured-costs"),
}
"""The answer to every known flag that does not exist here."""
