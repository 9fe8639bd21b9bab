"""Flags that change nothing here, because what they ask for holds anyway or has no object.

Megatron accepts each of them too, so a launch line that has them runs as it is; each is told once,
with the reason. Which operations are fused, how communication overlaps and who reads ahead are
choices of an implementation: they change how long an iteration takes, not what it computes.
"""

from collections.abc import Iterator

from megatron.config.foreign.answer import Row, rows
from megatron.config.foreign.line import (
    ONE_REPLICA,
    SHORTER_TOKENS,
    Condition,
    at_one,
    beside,
    without,
)

ONE_TENSOR_RANK = at_one("--tensor-model-parallel-size")


def noted() -> Iterator[Row]:
    """The flags, with the reason why each changes nothing."""
    for reason, when, flags in _TABLE:
        yield from rows("noted", reason, flags, when)


def _wanted(style: str) -> Condition:
    return Condition(
        f"without --lr-decay-style {style}",
        lambda line: line.word("--lr-decay-style") != style,
    )


_NO_FP16 = without("--fp16")
_NO_FP8 = without("--fp8-format", "--fp8")
_NO_EXPERTS = without("--num-experts")
_OWN_TOKENIZER = Condition(
    "with a tokenizer that does not read it",
    lambda line: (
        line.word("--tokenizer-type")
        in ("NullTokenizer", "GPTSentencePieceTokenizer", "SentencePieceTokenizer")
    ),
)
_FP32 = without("--bf16", "--fp16")
_NO_V_SCHEDULE_LIMIT = beside("--zero-bubble-v-schedule")
_SAME_STD = Condition(
    "with the value of --init-method-std",
    lambda line: (
        line.number("--embedding-init-method-std") == line.number("--init-method-std", 0.02)
    ),
)
_CONSTANT_DECAY = Condition(
    "where both are --weight-decay",
    lambda line: (
        line.number("--start-weight-decay", -1)
        == line.number("--end-weight-decay", -1)
        == line.number("--weight-decay", 0.01)
    ),
)
_GROUPS_OF_PIPELINE = Condition(
    "without interleaving, or at the number of pipeline ranks",
    lambda line: (
        line.given.keys().isdisjoint(
            ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
        )
        or line.word("--microbatch-group-size-per-virtual-pipeline-stage")
        == line.word("--pipeline-model-parallel-size")
    ),
)
_WITH_ROPE = Condition(
    "with rotated positions",
    lambda line: line.word("--position-embedding-type") == "rope",
)

_TABLE = (
    ("what is fused is an implementation choice", None, """
        --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
        --no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion
        --no-persist-layer-norm --cross-entropy-loss-fusion --cross-entropy-fusion-impl {native,te}
        --abort-on-unmet-fused-kernel-constraints --*-fusion [...] --use-fused-* [...]
        --no-fused-* [...]"""),
    ("attention takes PyTorch's flash kernel where it can", None, """
        --attention-backend {auto,flash,fused,unfused,local} --use-flash-attn --use-flash-attn-v1
        --use-flash-attn-v2 --use-flash-attn-v3 --use-flash-attn2 --use-flash-attn-triton
        --use-flash-attn-builder --use-te-attn"""),
    ("a softmax is always computed in fp32", None, "--attention-softmax-in-fp32"),
    ("the scale cancels in the softmax", None, """
        --apply-query-key-layer-scaling --no-query-key-layer-scaling"""),
    ("an offset of 1 in how the weight is stored changes no update", None, "--apply-layernorm-1p"),
    ("there is one model implementation", None, """
        --use-mcore-models --use-legacy-models --use-megatron-core --enable-experimental
        --transformer-impl {local}"""),
    ("layers are PyTorch's own, with the same mathematics", _NO_FP8, """
        --transformer-impl {transformer_engine} --te-rng-tracker"""),
    ("the activations are fp32", _FP32, "--fp32-residual-connection"),
    ("the learned table is left out", _WITH_ROPE, "--no-position-embedding"),
    ("positions are not interpolated", None, "--rotary-seq-len-interpolation-factor {1,1.0}"),
    ("it is the same deviation", _SAME_STD, "--embedding-init-method-std N"),
    ("initial weights are the same for every layout", None, """
        --use-cpu-initialization --perform-initialization"""),
    ("padding entries of the vocabulary are never predicted, so their number is free", None, """
        --padded-vocab-size N --no-pad-vocab-size --pad-vocab-size-to N"""),
    ("attention heads are all of one kind", None, "--attention-head-type {multihead}"),
    # Parallel layout
    ("layers are not split over tensor-parallel ranks", ONE_TENSOR_RANK, """
        --sequence-parallel --distribute-saved-activations --tp-comm-overlap
        --tp-comm-overlap-cfg N --tp-comm-bootstrap-backend N --no-tp-comm-overlap
        --tp-comm-* [...] --disable-tp-comm-* [...] --scatter-gather-tensors-in-pipeline
        --no-scatter-gather-tensors-in-pipeline"""),
    ("how tensor-parallel communication overlaps is an implementation choice", None, """
        --no-async-tensor-model-parallel-allreduce --async-tensor-model-parallel-allreduce
        --no-scatter-gather-tensors-in-pipeline"""),
    ("a sequence is never split", None, "--context-parallel-size {1}\n"
        "--ds-sequence-parallel-size {1}"),
    ("a sequence is never split", at_one("--context-parallel-size"), """
        --cp-comm-type N ... --hierarchical-context-parallel-sizes N ... --use-cp-* [...]"""),
    ("every token passes the same layers", None, """
        --expert-model-parallel-size {1} --expert-tensor-parallel-size {1} --num-experts {1}"""),
    ("every token passes the same layers", _NO_EXPERTS, """
        --expert-* [...] --moe-* [...] --create-moe-param-group --disable-moe-token-dropping"""),
    ("there is nothing to reduce, shard or gather over replicas", ONE_REPLICA, """
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
        --overlap-param-gather-with-optimizer-step --delay-grad-reduce --delay-param-gather
        --no-delay-grad-reduce --no-align-grad-reduce --no-align-param-gather --align-grad-reduce
        --align-param-gather --ddp-num-buckets N --ddp-bucket-size N --ddp-average-in-collective
        --ddp-pad-buckets-for-high-nccl-busbw --ddp-* [...] --average-in-collective
        --grad-reduce-in-bf16 --num-distributed-optimizer-instances N --data-parallel-random-init
        --data-parallel-sharding-strategy {no_shard,optim,optim_grads,optim_grads_params}
        --use-tp-pp-dp-mapping --use-torch-fsdp2 --use-megatron-fsdp --use-custom-fsdp
        --fsdp-* [...] --zero-stage {0,1,2,3} --zero-allgather-bucket-size N
        --zero-reduce-bucket-size N --zero-contigious-gradients --zero-reduce-scatter
        --no-contiguous-buffers-in-local-ddp --use-contiguous-buffers-in-local-ddp
        --use-contiguous-* [...] --fp32-allreduce --DDP-impl {local,torch,FSDP}"""),
    ("gradients always add up in fp32", None, """
        --accumulate-allreduce-grads-in-fp32 --no-accumulate-allreduce-grads-in-fp32
        --main-grads-dtype {fp32}"""),
    ("master weights and the optimizer's states are fp32", None, """
        --use-precision-aware-optimizer --main-params-dtype {fp32} --exp-avg-dtype {fp32}
        --exp-avg-sq-dtype {fp32}"""),
    ("communication starts as early as its data exists, and NCCL's variables tune it", None, """
        --no-overlap-p2p-communication --overlap-p2p-communication
        --overlap-p2p-communication-warmup-flush --no-pre-communication-optimization
        --use-ring-exchange-p2p --batch-p2p-communication --high-priority-stream-groups N ...
        --nccl-communicator-config-path N --nccl-ub --use-nccl-ub --use-sharp
        --sharp-enabled-group N --pipeline-model-parallel-comm-backend N
        --disable-gloo-process-groups --enable-gloo-process-groups --use-gloo-process-groups
        --lazy-mpu-init N --distributed-timeout-seconds-after-init N"""),
    ("groups of microbatches are of the number of pipeline ranks", _GROUPS_OF_PIPELINE, """
        --microbatch-group-size-per-virtual-pipeline-stage N"""),
    ("--pipeline-schedule zb-1p and others defer all weight gradients", None, """
        --defer-embedding-wgrad-compute --wgrad-deferral-limit N --delay-wgrad-compute
        --overlap-dispatch-backward-with-experts-wgrad"""),
    ("one runtime runs every schedule", None, """
        --enable-zb-runtime --deepspeed --no-pipeline-parallel"""),
    ("a step that is taken back leaves no trace", None, "--enable-exactly-numeric-match"),
    ("the layers divide evenly, or other flags spread them", None, "--allow-padding-num-layers"),
    ("a V schedule has its own memory", _NO_V_SCHEDULE_LIMIT, """
        --zero-bubble-max-pending-backward N --zero-bubble-adaptive-memory-limit-percentile N"""),
    ("the limit is given in microbatches", Condition(
        "beside a number of --zero-bubble-max-pending-backward",
        lambda line: line.number("--zero-bubble-max-pending-backward") > 0,
    ), "--zero-bubble-adaptive-memory-limit-percentile N"),
    ("no zero-bubble schedule is asked for", without("--enable-zero-bubble"), """
        --zero-bubble-adaptive-memory-limit-percentile N
        --zero-bubble-max-pending-backward {auto}"""),
    ("ranks are those of torchrun (RANK, WORLD_SIZE, LOCAL_RANK)", None, """
        --local-rank N --use-mpi --deepspeed_mpi"""),
    # Precision
    ("only fp16 needs a loss scale", _NO_FP16, """
        --loss-scale N --initial-loss-scale N --min-loss-scale N --loss-scale-window N
        --loss-scaling-factor N --hysteresis N --fp16-lm-cross-entropy"""),
    ("nothing is computed in fp8", _NO_FP8, """
        --fp8-recipe N --fp8-param-gather --fp8-amax-history-len N --fp8-amax-compute-algo N
        --fp8-margin N --fp8-interval N --no-fp8-wgrad --first-last-layers-bf16
        --num-layers-at-start-in-bf16 N --num-layers-at-end-in-bf16 N --fp8-* [...]"""),
    ("exports to ONNX are not made", None, "--onnx-safe [...]"),
    # Training
    ("a constant decay is given by --weight-decay", None, "--weight-decay-incr-style {constant}"),
    ("the decay of weights does not change", _CONSTANT_DECAY, """
        --start-weight-decay N --end-weight-decay N"""),
    ("the learning rate has no annealing phase", _wanted("WSD"), """
        --lr-wsd-decay-style N --lr-wsd-decay-iters N --lr-wsd-decay-samples N"""),
    ("Adam has no momentum of this kind", Condition(
        "without --optimizer sgd", lambda line: line.word("--optimizer") != "sgd"
    ), "--sgd-momentum N"),
    ("the loss is always divided by the counted tokens of the global batch", None, """
        --calculate-per-token-loss"""),
    ("batches do not grow", without("--rampup-batch-size", "--step-batch-size-schedule"), """
        --decrease-batch-size-if-needed"""),
    ("when Python collects garbage is left to Python", None, """
        --manual-gc --manual-gc-interval N --no-manual-gc-eval"""),
    ("memory is left to PyTorch's allocator", None, "--empty-unused-memory-level {0,1,2}"),
    ("a loss or a gradient norm that is not finite always ends the run", None, """
        --no-check-for-nan-in-loss-and-grad --check-for-nan-in-loss-and-grad"""),
    ("a run ends by its length only", without("--exit-signal-handler"), "--exit-signal N"),
    ("training ends after the shorter --train-tokens", SHORTER_TOKENS, """
        --train-samples N --train-iters N"""),
    ("no step is repeated to check it", None, "--rerun-mode {disabled}"),
    ("no graph of kernels is captured", None, """
        --cuda-graph-* [...] --enable-cuda-graph --external-cuda-graph"""),
    ("recomputation is not asked for",
        without("--recompute-granularity", "--recompute-activations", "--checkpoint-activations"),
        """
        --recompute-method N --recompute-num-layers N --recompute-modules N ...
        --activations-checkpoint-method N --activations-checkpoint-num-layers N
        --checkpoint-num-layers N --deepspeed-activation-checkpointing --partition-activations
        --contigious-checkpointing --checkpoint-in-cpu --synchronize-each-layer
        --profile-backward"""),
    # Data
    ("data is read by memory mapping, without workers or caches of its own", None, """
        --num-workers N --valid-num-workers N --num-dataset-builder-threads N --no-mmap-bin-files
        --mmap-warmup --data-impl {mmap,infer} --dataset {MMAP,GPT,LLama-Pretrain-Idxmap}
        --dataset {Qwen-Pretrain-Idxmap,Mistral-Pretrain-Idxmap} --dataloader-fast-cache-load
        --dataloader-defer-npy-index-mmap"""),
    ("samples are shuffled once, by the seed, and read in that order", None, """
        --dataloader-type {single,cyclic} --shuffle-documents --no-shuffle-sample-level"""),
    ("no causal mask is ever stored", None, """
        --no-create-attention-mask-in-dataloader --create-attention-mask-in-dataloader"""),
    ("the tokenizer has a file of its own or none", _OWN_TOKENIZER, """
        --vocab-file N --merge-file N --tiktoken-pattern N --tiktoken-* [...]
        --tokenizer-name-or-path N --trust-remote-code"""),
    ("no ids are added to the tokenizer's", None, "--vocab-extra-ids {0}\n--extra-vocab-size {0}"),
    ("samples of an indexed corpus fill --seq-length", Condition(
        "with --dataset MMAP", lambda line: line.word("--dataset") in (None, "MMAP")
    ), "--max-padding-length N"),
    ("this project only pretrains", None, "--train-mode {pretrain}"),
    # Checkpoints
    ("nothing is saved", without("--save"), """
        --save-interval N --save-retain-interval N --non-persistent-save-interval N
        --non-persistent-* [...] --no-save-optim --no-save-rng --async-save
        --use-persistent-ckpt-worker --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save
        --ckpt-assume-constant-structure --verify-integrity --log-progress"""),
    ("nothing is loaded", without("--load", "--pretrained-checkpoint"), """
        --no-load-optim --no-load-rng --no-load-lr-state --finetune --ckpt-step N
        --load-iteration N --use-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args
        --exit-on-missing-checkpoint --override-opt_param-scheduler
        --use-checkpoint-opt_param-scheduler --override-lr-scheduler --use-checkpoint-lr-scheduler
        --reset-lr-scheduler --auto-detect-ckpt-format --ckpt-fully-parallel-load
        --dist-ckpt-strictness N"""),
    ("nothing is saved or loaded", without("--save", "--load", "--pretrained-checkpoint"), """
        --ckpt-format N --dist-ckpt-format N --use-dist-ckpt --dist-ckpt-optim-fully-reshardable
        --ckpt-* [...] --dist-ckpt-* [...]"""),
    # Log
    ("every line has the throughput", None, "--log-throughput"),
    ("--profile-schedule-start and --record-timeline time every pass, without barriers", None, """
        --timing-log-level {0,1,2} --timing-log-option {max,minmax,all}
        --no-barrier-with-level-1-timing --barrier-with-L1-time --no-barrier-with-L1-time"""),
    ("only --profile traces", without("--profile"), """
        --profile-ranks N ... --use-pytorch-profiler --nvtx-ranges --pytorch-profiler-* [...]"""),
    ("--profile writes a PyTorch trace of every rank", None, """
        --profile-ranks N ... --use-pytorch-profiler"""),
    ("only --tensorboard-dir and --wandb-project write records",
        without("--tensorboard-dir", "--wandb-project", "--wandb-mode"), """
        --tensorboard-log-interval N --tensorboard-queue-size N --log-timers-to-tensorboard
        --log-batch-size-to-tensorboard --log-learning-rate-to-tensorboard
        --log-loss-scale-to-tensorboard --log-memory-to-tensorboard
        --log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard
        --log-optimizer-states-to-tensorboard --log-*-to-tensorboard [...] --wandb-entity N
        --wandb-exp-name N --wandb-save-dir N --wandb-* [...]"""),
    ("it asks for less in a record that is not written", None, """
        --no-log-loss-scale-to-tensorboard --no-log-learnig-rate-to-tensorboard
        --no-log-learning-rate-to-tensorboard"""),
    ("no run is reported to a service", None, """
        --no-one-logger --enable-one-logger --one-logger-* [...] --app-tag-run-name N
        --app-tag-run-version N"""),
    ("text is not generated in training", None, "--inference-* [...]"),
)  # fmt: skip
"""The reason, the lines on which it holds (``None``: all), and the flags."""
