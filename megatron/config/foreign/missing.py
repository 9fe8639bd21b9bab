"""What this project does not do, by name, and the flags that ask for it.

Each row is refused in the same words wherever it is asked for. Whoever builds a feature deletes its
row, and declares its flags in ``megatron/config/flags.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from megatron.config.foreign.answer import Row, rows


@dataclass(frozen=True)
class Feature:
    """Something that is missing.

    Attributes:
        name: a few words, for tables.
        lack: what is missing, in a clause.
        way_out: what to do instead.
        flags: the flags that ask for it, and values of this project's flags; see ``answer``.
    """

    name: str
    lack: str
    way_out: str
    flags: str

    @property
    def reason(self) -> str:
        """Why its flags are refused, and the way out."""
        return f"{self.lack}; {self.way_out}"


def missing() -> Iterator[Row]:
    """The flags, with what is missing for each."""
    for feature in FEATURES:
        yield from rows("refused", feature.reason, feature.flags, feature=feature.name)


_LEAVE_IT_OUT: Final = "leave it out"

TENSOR_PARALLELISM: Final = Feature(
    "tensor parallelism",
    "layers are not split over ranks yet",
    "use --tensor-model-parallel-size 1, and more pipeline ranks instead",
    """
        --tensor-model-parallel-size N>1 --sequence-parallel --distribute-saved-activations
        --tp-comm-overlap --tp-comm-overlap-cfg N --tp-comm-bootstrap-backend N
        --scatter-gather-tensors-in-pipeline --tp-comm-* [...] --disable-tp-comm-* [...]
        """,
)

DATA_PARALLELISM: Final = Feature(
    "data parallelism",
    "there is no data parallelism yet",
    "start as many ranks as one copy of the model has",
    """
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
        --overlap-param-gather-with-optimizer-step --delay-grad-reduce --delay-param-gather
        --no-delay-grad-reduce --no-align-grad-reduce --no-align-param-gather --align-grad-reduce
        --align-param-gather --ddp-num-buckets N --ddp-bucket-size N --ddp-average-in-collective
        --ddp-pad-buckets-for-high-nccl-busbw --ddp-* [...] --average-in-collective
        --grad-reduce-in-bf16 --num-distributed-optimizer-instances N --data-parallel-random-init
        --data-parallel-sharding-strategy N --use-tp-pp-dp-mapping --use-torch-fsdp2
        --use-megatron-fsdp --use-custom-fsdp --fsdp-* [...] --zero-stage N
        --zero-allgather-bucket-size N --zero-reduce-bucket-size N --zero-contigious-gradients
        --zero-reduce-scatter --no-contiguous-buffers-in-local-ddp
        --use-contiguous-buffers-in-local-ddp --use-contiguous-* [...] --fp32-allreduce
        --DDP-impl N
        """,
)

FEATURES: Final = (
    TENSOR_PARALLELISM,
    DATA_PARALLELISM,
    Feature(
        "context parallelism",
        "a sequence is not split over ranks yet",
        "use 1, and more pipeline ranks instead",
        """
        --context-parallel-size N --cp-comm-type N ... --hierarchical-context-parallel-sizes N ...
        --use-cp-* [...] --ds-sequence-parallel-size N --ds-sequence-parallel-* [...]
        """,
    ),
    Feature(
        "checkpoints",
        "checkpoints are not written or read yet",
        "leave it out to start from scratch and save nothing",
        """
        --save N --load N --pretrained-checkpoint N --save-interval N --save-retain-interval N
        --save-* [...] --non-persistent-save-interval N --non-persistent-* [...] --no-save-optim
        --no-save-rng --no-load-optim --no-load-rng --no-load-lr-state --finetune --ckpt-step N
        --load-iteration N --use-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args
        --exit-on-missing-checkpoint --override-opt_param-scheduler
        --use-checkpoint-opt_param-scheduler --override-lr-scheduler --use-checkpoint-lr-scheduler
        --reset-lr-scheduler --ckpt-format N --ckpt-convert-format N --ckpt-convert-save N
        --ckpt-convert-update-legacy-dist-opt-format --auto-detect-ckpt-format --dist-ckpt-format N
        --use-dist-ckpt --async-save --use-persistent-ckpt-worker --ckpt-fully-parallel-load
        --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save --ckpt-assume-constant-structure
        --dist-ckpt-strictness N --dist-ckpt-optim-fully-reshardable --verify-integrity
        --log-progress --no-initialization --use-gcp-dynamic-checkpointing --universal-checkpoint
        --ckpt-* [...] --dist-ckpt-* [...]
        """,
    ),
    Feature(
        "fp16",
        "fp16 and its loss scale are not built yet",
        "use --bf16, which needs no loss scale",
        """
        --fp16 --loss-scale N --initial-loss-scale N --min-loss-scale N --loss-scale-window N
        --loss-scaling-factor N --hysteresis N --fp16-lm-cross-entropy
        """,
    ),
    Feature(
        "fp8 and fp4",
        "nothing is computed in fewer than 16 bits yet",
        "use --bf16",
        """
        --fp8-format N --fp8 N --fp8-recipe N --fp8-param-gather --fp8-amax-history-len N
        --fp8-amax-compute-algo N --fp8-margin N --fp8-interval N --no-fp8-wgrad
        --first-last-layers-bf16 --num-layers-at-start-in-bf16 N --num-layers-at-end-in-bf16 N
        --transformer-impl {transformer_engine} --te-rng-tracker --fp8-* [...] --fp4-* [...]
        --fp8-hybrid --fp8-e4m3
        """,
    ),
    Feature(
        "an fp32 residual stream under bf16",
        "activations between the layers are in the type of the parameters",
        _LEAVE_IT_OUT,
        "--fp32-residual-connection",
    ),
    Feature(
        "optimizer states in fewer bits",
        "gradients, master weights and the optimizer's states are always fp32",
        "leave it out, or use fp32",
        """
        --main-grads-dtype N --main-params-dtype N --exp-avg-dtype N --exp-avg-sq-dtype N
        """,
    ),
    Feature(
        "recomputation",
        "activations are not recomputed yet",
        "leave it out (--pipeline-schedule v-half or v-min holds fewer of them)",
        """
        --recompute-activations --recompute-granularity N --recompute-method N
        --recompute-num-layers N --recompute-modules N ... --checkpoint-activations
        --checkpoint-num-layers N --activations-checkpoint-method N
        --activations-checkpoint-num-layers N --deepspeed-activation-checkpointing
        --partition-activations --contigious-checkpointing --checkpoint-in-cpu
        --synchronize-each-layer --profile-backward --recompute-* [...]
        """,
    ),
    Feature(
        "offloading",
        "nothing is moved to the host's memory",
        _LEAVE_IT_OUT,
        """
        --cpu-offload --cpu-offloading-num-layers N --cpu-optimizer --cpu-torch-adam
        --optimizer-cpu-offload --optimizer-offload-fraction N --offload-chunk-num N
        --offload-time N --auto-offload-time --offload-overlap-sr --offload-* [...]
        --cpu-offload* [...] --remote-device N --use-pin-memory
        """,
    ),
    Feature(
        "other tokenizers",
        "only sentencepiece models can be read yet",
        "for data that is tokenized already, use --tokenizer-type NullTokenizer with "
        "--vocab-size N",
        """
        --tokenizer-type {HuggingFaceTokenizer,GPT2BPETokenizer,Llama2Tokenizer,Llama3Tokenizer}
        --tokenizer-type {TikTokenizer,BertWordPieceLowerCase,BertWordPieceCase,PretrainedFromHF}
        --tokenizer-type {MultimodalTokenizer,NullMultimodalTokenizer,SFTTokenizer,FalconTokenizer}
        --tokenizer-type {TokenizerFromFile,TokenizerFromFileWithFIM,GPT2BPETokenizerWithFIM}
        --tokenizer-type {CharLevelTokenizer,ByteLevelTokenizer,HFTokenizer,HFAutoTokenizer}
        --tokenizer-type {HFGPT2Tokenizer} --tokenizer-name-or-path N --vocab-file N --merge-file N
        --merges-file N --tokenizer-file N --vocab-extra-ids N --vocab-extra-ids-list N ...
        --no-new-tokens --extra-vocab-size N --patch-tokenizer-type N --tiktoken-pattern N
        --tiktoken-num-special-tokens N --tiktoken-special-tokens N ...
        --tokenizer-special-tokens N ... --tokenizer-prompt-format N --tokenizer-kwargs N ...
        --trust-remote-code --tokenizer-* [...]
        """,
    ),
    Feature(
        "TensorBoard and Weights & Biases",
        "records for TensorBoard or Weights & Biases are not written yet",
        "leave it out (the printed lines have the figures)",
        """
        --tensorboard-dir N --tensorboard-log-interval N --tensorboard-queue-size N
        --log-timers-to-tensorboard --log-batch-size-to-tensorboard
        --log-learning-rate-to-tensorboard --log-loss-scale-to-tensorboard
        --log-memory-to-tensorboard --log-validation-ppl-to-tensorboard
        --log-world-size-to-tensorboard --log-optimizer-states-to-tensorboard --wandb-project N
        --wandb-name N --wandb-exp-name N --wandb-entity N --wandb-entity-name N --wandb-save-dir N
        --wandb-mode N --wandb-* [...] --tensorboard-* [...] --log-*-to-tensorboard [...]
        --mlflow-* [...] --clearml-* [...]
        """,
    ),
    Feature(
        "further figures in the log",
        "the log has no line for it yet",
        _LEAVE_IT_OUT,
        """
        --log-params-norm --log-num-zeros-in-grad --log-straggler --log-energy
        --log-max-attention-logit --record-memory-history --memory-snapshot-path N
        --profile-memory-iter N --config-logger-dir N --timing-log-level N
        """,
    ),
    Feature(
        "batch sizes that grow",
        "every iteration has the same batch",
        "give the last size with --global-batch-size alone",
        """
        --rampup-batch-size N ... --step-batch-size-schedule N ... --decrease-batch-size-if-needed
        --curriculum-learning --curriculum-* [...]
        """,
    ),
    Feature(
        "stops by time, signal or file",
        "a run ends by its length only, as checkpoints are not written yet",
        "leave it out (--exit-interval N ends a run early)",
        """
        --exit-duration-in-mins N --exit-signal-handler --exit-signal-handler-for-* [...]
        --exit-signal N --trigger-path N --kill-switch-path N --kill-switch-file N
        """,
    ),
    Feature(
        "documents kept apart in a sample",
        "a sample's tokens see all earlier ones, also those of another document",
        "leave it out (--eod-mask-loss masks the loss between documents)",
        """
        --reset-position-ids --reset-attention-mask --intra-document-masking [...]
        """,
    ),
    Feature(
        "data given per split or in a file",
        "validation and test are shares of the --data-path",
        "give all prefixes with --data-path, and the shares with --split",
        """
        --train-data-path N ... --valid-data-path N ... --test-data-path N ... --train-data N ...
        --valid-data N ... --test-data N ... --data-args-path N --per-split-data-args-path N
        --multiple-validation-sets --full-validation --train-weighted-split-paths N ...
        --valid-weighted-split-paths N ... --test-weighted-split-paths N ...
        --train-weighted-split-paths-path N --valid-weighted-split-paths-path N
        --test-weighted-split-paths-path N
        """,
    ),
    Feature(
        "other kinds of data",
        "samples come from an indexed corpus (.bin and .idx), in one order",
        "make one with tools/sample_data.py or Megatron's preprocess_data.py",
        """
        --data-impl N --dataset N --dataloader-type N --train-mode N --mmap-* [...] --fim-* [...]
        --s3-cache-path N --object-storage-* [...] --mid-level-dataset-* [...] --use-prompt-dataset
        --sft --max-padding-length N
        """,
    ),
    Feature(
        "other optimizers",
        "the only optimizer is Adam with decoupled weight decay",
        "use --optimizer adam",
        """
        --optimizer {sgd,muon,dist_muon,lion,soap,adaptive_muon,adafactor,lamb,adagrad,ademamix}
        --sgd-momentum N --muon-* [...] --lion-* [...] --soap-* [...] --ademamix-* [...]
        --use-bnb-optimizer
        """,
    ),
    Feature(
        "other learning rates and decays",
        "all weights have one rate, constant, linear or cosine, and one decay",
        "use --lr-decay-style cosine or linear, and --weight-decay",
        """
        --lr-decay-style {WSD,inverse-square-root,exponential} --lr-wsd-decay-style N
        --lr-wsd-decay-iters N --lr-wsd-decay-samples N --decoupled-lr N --decoupled-min-lr N
        --start-weight-decay N --end-weight-decay N --weight-decay-incr-style N --use-mup
        --mup-* [...] --head-lr-mult N
        """,
    ),
    Feature(
        "other position embeddings",
        "positions are a learned table, or queries and keys rotated by RoPE",
        "use --position-embedding-type rope or learned_absolute",
        """
        --position-embedding-type {alibi,none,yarn,mrope,relative,xpos} --no-position-embedding
        --rotary-seq-len-interpolation-factor N --use-alibi-position-embeddings --yarn-* [...]
        --mrope-* [...] --relative-attention-* [...] --rotary-scaling-factor N --no-rope-freq N
        """,
    ),
    Feature(
        "other layers",
        "the model is a GPT of attention and MLP layers of one kind",
        _LEAVE_IT_OUT,
        """
        --embed-layernorm --spec N ... --transformer-impl N --parallel-attn --parallel-layernorm
        --apply-residual-connection-post-layernorm --apply-residual-connection-post-norm
        --normalization {SyncRMSNorm,apexRMSNorm,ScaleNorm} --glu-activation N --geglu --quick-gelu
        --openai-gelu --reglu --liglu --activation-func-* [...] --xielu --embedding-multiplier N
        --init-method-xavier-uniform --embedding-init-method-std N
        --use-embedding-init-method-* [...] --attention-head-type N --multi-latent-attention
        --q-lora-rank N --kv-lora-rank N --qk-head-dim N --qk-pos-emb-head-dim N --v-head-dim N
        --window-size N --window-attn-skip-freq N --sliding-window-size N --sliding-window N
        --softmax-type N --attention-output-gate --attention-chunk-size N --attention-bias
        --post-self-attn-norm --post-mlp-norm --mtp-num-layers N --mtp-* [...] --mamba-* [...]
        --hybrid-* [...] --is-hybrid-model --linear-attention-* [...]
        --heterogeneous-layers-* [...] --use-kan --lora-* [...]
        """,
    ),
    Feature(
        "other losses",
        "the loss is cross-entropy, with label smoothing and z-loss",
        "leave it out; see --label-smoothing and --z-loss-coeff",
        """
        --goldfish-loss --goldfish-* [...] --loss-spike-* [...]
        """,
    ),
    Feature(
        "mixture of experts",
        "all tokens pass the same layers",
        _LEAVE_IT_OUT,
        """
        --num-experts N ... --expert-model-parallel-size N --expert-tensor-parallel-size N
        --expert-* [...] --moe-* [...] --create-moe-param-group --disable-moe-token-dropping
        --enable-expert-tensor-parallelism --mlp-type N --topk N
        """,
    ),
    Feature(
        "other spreads of the layers",
        "layers are spread by number, by FLOPs or by a list",
        "use --layer-distribution remainder, redis or N,N,...",
        """
        --pp-partition-method N --standalone-embedding-stage --pipeline-model-parallel-split-rank N
        --microbatch-group-size-per-virtual-pipeline-stage N --interleave-group-size N
        --num-seq-splits N
        """,
    ),
    Feature(
        "a memory limit in bytes",
        "the limit of a schedule is a number of microbatches",
        "use --zero-bubble-max-pending-backward MICROBATCHES",
        """
        --zero-bubble-max-pending-backward {auto} --zero-bubble-adaptive-memory-limit-percentile N
        """,
    ),
    Feature(
        "steps that are checked, repeated or skipped",
        "every step is taken once, and checked for infinity and NaN only",
        _LEAVE_IT_OUT,
        """
        --check-for-spiky-loss --check-for-large-grads --rerun-mode N --error-injection-* [...]
        --iterations-to-skip N ... --skip-train --skip-train-iteration-range N ...
        --skip-samples N ... --deterministic-mode --enable-ft-package --ft-* [...]
        --calc-ft-timeouts --inprocess-* [...] --replication [...] --replication-* [...]
        """,
    ),
    Feature(
        "settings in a file",
        "settings are read from the command line only",
        "give what the file says as flags",
        """
        --deepspeed-config N --yaml-cfg N --export-kv-* [...] --args-file N
        """,
    ),
    Feature(
        "other tasks than pretraining GPTs",
        "this project pretrains GPTs",
        _LEAVE_IT_OUT,
        """
        --bert-* [...] --retro-* [...] --vision-* [...] --dino-* [...] --ict-* [...]
        --biencoder-* [...] --rl-* [...] --grpo-* [...] --decoder-num-layers N
        --decoder-seq-length N --mask-prob N --short-seq-prob N --no-binary-head --num-classes N
        --img-h N --img-w N --freeze-* [...] --distill* [...] --kd-* [...] --mos --export-* [...]
        """,
    ),
)
"""All that is missing. Of two rows with one flag the first counts."""
