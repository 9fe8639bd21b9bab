"""Flags that change nothing here, because what they ask for holds anyway.

Megatron accepts each of them too, so a launch line that has them runs as it is; each is told once,
with the reason. Which operations are fused, how communication overlaps and who reads ahead are
choices of an implementation: they change how long an iteration takes, not what it computes. Flags
of features that are missing here stand in ``missing``, also where they change nothing.
"""

from collections.abc import Iterator

from megatron.config.foreign.answer import Row, rows
from megatron.config.foreign.conditions import DYNAMIC_SCALE, NOT_BF16_GRADIENTS
from megatron.config.foreign.line import SHORTER_TOKENS, beside, without


def noted() -> Iterator[Row]:
    """The flags, with the reason why each changes nothing."""
    for reason, when, flags in _TABLE:
        yield from rows("noted", reason, flags, when)


_TABLE = (
    ("what is fused is an implementation choice", None, """
        --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
        --no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion
        --no-persist-layer-norm --cross-entropy-loss-fusion
        --cross-entropy-fusion-impl {native,te} --abort-on-unmet-fused-kernel-constraints
        --*-fusion [...] --use-fused-* [...] --no-fused-* [...]"""),
    ("layers are PyTorch's own, with the same mathematics", None, "--te-rng-tracker"),
    ("scales follow after every iteration, as in Megatron, which ignores it too", None,
        "--fp8-interval N"),
    ("attention takes flash-attn if it is installed, else PyTorch's own kernels", None, """
        --attention-backend {auto,flash,fused,unfused,local} --use-flash-attn
        --use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-v3 --use-flash-attn2
        --use-flash-attn-triton --use-flash-attn-builder --use-te-attn
        --use-transformer-engine-op-fuser"""),
    ("a softmax is always computed in fp32", None, "--attention-softmax-in-fp32"),
    ("the scale cancels in the softmax", None, """
        --apply-query-key-layer-scaling --no-query-key-layer-scaling"""),
    ("layers are recomputed in one way only, and --record-timeline times every pass", None, """
        --deepspeed-activation-checkpointing --contigious-checkpointing --synchronize-each-layer
        --profile-backward"""),
    ("nothing is sharded over replicas unless --use-distributed-optimizer is given", None,
        "--zero-stage {0}"),
    ("there is one model implementation", None, """
        --use-mcore-models --use-legacy-models --use-megatron-core --enable-experimental"""),
    ("initial weights are the same for every layout", None, "--perform-initialization"),
    ("padding entries of the vocabulary are never predicted, so their number is free", None, """
        --padded-vocab-size N --no-pad-vocab-size --pad-vocab-size-to N"""),
    ("how tensor-parallel communication overlaps is an implementation choice", None, """
        --no-tp-comm-overlap --no-async-tensor-model-parallel-allreduce
        --async-tensor-model-parallel-allreduce --no-scatter-gather-tensors-in-pipeline
        --tp-comm-overlap --tp-comm-overlap-cfg N --tp-comm-bootstrap-backend N --tp-comm-* [...]
        --disable-tp-comm-* [...] --scatter-gather-tensors-in-pipeline"""),
    ("gradients add up in fp32 unless --main-grads-dtype bf16 is given", NOT_BF16_GRADIENTS, """
        --accumulate-allreduce-grads-in-fp32 --no-accumulate-allreduce-grads-in-fp32"""),
    ("--main-grads-dtype bf16 says otherwise", None, "--no-accumulate-allreduce-grads-in-fp32"),
    ("gradients are reduced in fp32, or in bf16 with --grad-reduce-in-bf16", None,
        "--fp32-allreduce"),
    ("how gradients lie in memory while they are reduced is an implementation choice", None, """
        --delay-grad-reduce --no-delay-grad-reduce --no-align-grad-reduce --align-grad-reduce
        --ddp-average-in-collective --ddp-pad-buckets-for-high-nccl-busbw --ddp-* [...]
        --average-in-collective --no-contiguous-buffers-in-local-ddp
        --use-contiguous-buffers-in-local-ddp --use-contiguous-* [...] --DDP-impl N"""),
    ("--nccl-max-ctas-p2p, --nccl-max-ctas-vocab and --nccl-max-ctas-data limit blocks", None,
        "--nccl-communicator-config-path N"),
    ("communication starts as early as its data exists, and NCCL's variables tune it", None, """
        --no-overlap-p2p-communication --overlap-p2p-communication
        --overlap-p2p-communication-warmup-flush --no-pre-communication-optimization
        --use-ring-exchange-p2p --batch-p2p-communication --high-priority-stream-groups N ...
        --nccl-ub --use-nccl-ub --use-sharp
        --sharp-enabled-group N --pipeline-model-parallel-comm-backend N
        --disable-gloo-process-groups --enable-gloo-process-groups --use-gloo-process-groups
        --lazy-mpu-init N --distributed-timeout-seconds-after-init N"""),
    ("--pipeline-schedule zb-1p and others defer all weight gradients", None, """
        --defer-embedding-wgrad-compute --wgrad-deferral-limit N --delay-wgrad-compute
        --overlap-dispatch-backward-with-experts-wgrad"""),
    ("one runtime runs every schedule", None, """
        --enable-zb-runtime --deepspeed --no-pipeline-parallel"""),
    ("a step that is taken back leaves no trace", None, "--enable-exactly-numeric-match"),
    ("the layers divide evenly, or other flags spread them", None, "--allow-padding-num-layers"),
    ("a V schedule has its own memory", beside("--zero-bubble-v-schedule"), """
        --zero-bubble-max-pending-backward N"""),
    ("ranks are those of torchrun, srun or mpirun", None, """
        --local-rank N --use-mpi --deepspeed_mpi"""),
    ("exports to ONNX are not made", None, "--onnx-safe [...]"),
    ("the loss is always divided by the counted tokens of the global batch", None, """
        --calculate-per-token-loss"""),
    ("when Python collects garbage is left to Python", None, """
        --manual-gc --manual-gc-interval N --no-manual-gc-eval"""),
    ("memory is left to PyTorch's allocator", None, "--empty-unused-memory-level {0,1,2}"),
    ("a loss scale that changes is found by overflows, which therefore never end a run",
        DYNAMIC_SCALE, "--check-for-nan-in-loss-and-grad"),
    ("a loss or a gradient norm that is not finite ends the run",
        without("--no-check-for-nan-in-loss-and-grad"), "--check-for-nan-in-loss-and-grad"),
    ("--no-check-for-nan-in-loss-and-grad has the word",
        beside("--no-check-for-nan-in-loss-and-grad"), "--check-for-nan-in-loss-and-grad"),
    ("training ends after the shorter --train-tokens", SHORTER_TOKENS, """
        --train-samples N --train-iters N"""),
    ("no graph of kernels is captured", None, """
        --cuda-graph-* [...] --no-cuda-graph --enable-cuda-graph --external-cuda-graph"""),
    ("data is read by memory mapping, without workers or caches of its own", None, """
        --valid-num-workers N --num-dataset-builder-threads N
        --no-mmap-bin-files --mmap-warmup --data-impl {mmap,infer}
        --dataset {MMAP,GPT,LLama-Pretrain-Idxmap}
        --dataset {Qwen-Pretrain-Idxmap,Mistral-Pretrain-Idxmap} --dataloader-fast-cache-load
        --dataloader-defer-npy-index-mmap --exit-signal-handler-for-* [...]"""),
    ("samples are shuffled once, by the seed, and read in that order", None, """
        --dataloader-type {single,cyclic} --shuffle-documents --no-shuffle-sample-level"""),
    ("no causal mask is ever stored", None, """
        --no-create-attention-mask-in-dataloader --create-attention-mask-in-dataloader"""),
    ("this project only pretrains", None, """
        --train-mode {pretrain} --transformer-type {megatron} --data-type {gpt}"""),
    ("every line and every record has the throughput", None, "--log-throughput"),
    ("--profile-schedule-start and --record-timeline time every pass, without barriers", None, """
        --timing-log-level {0,1,2} --timing-log-option {max,minmax,all}
        --no-barrier-with-level-1-timing --barrier-with-L1-time --no-barrier-with-L1-time"""),
    ("only --profile traces", without("--profile"), """
        --profile-ranks N ... --use-pytorch-profiler --nvtx-ranges --pytorch-profiler-* [...]"""),
    ("--profile writes a PyTorch trace of every rank", None, """
        --profile-ranks N ... --use-pytorch-profiler --nvtx-ranges"""),
    ("curves of the learning rate and of the batch size are always drawn", None, """
        --log-learning-rate-to-tensorboard --log-batch-size-to-tensorboard
        --no-log-learnig-rate-to-tensorboard --no-log-learning-rate-to-tensorboard"""),
    ("there is no loss scale to draw a curve of", without("--fp16"), """
        --log-loss-scale-to-tensorboard"""),
    ("the curve of the loss scale is drawn without being asked for", None, """
        --log-loss-scale-to-tensorboard"""),
    ("a loss scale changes unless --loss-scale is given", None, "--dynamic-loss-scale"),
    ("exponentials are kept in the type of activations, and sums over them are fp32 anyway", None,
        "--fp16-lm-cross-entropy"),
    ("no run is reported to a service", None, """
        --no-one-logger --enable-one-logger --one-logger-* [...] --app-tag-run-name N
        --app-tag-run-version N"""),
    ("text is not generated in training", None, "--inference-* [...]"),
)  # fmt: skip
"""The reason, the lines on which it holds (``None``: all), and the flags."""
