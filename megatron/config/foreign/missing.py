"""What this project does not do, by name, and the flags that ask for it.

Each row is refused in the same words wherever it is asked for. Some of its flags change nothing
where the feature is not asked for: those are noted there. Whoever builds a feature deletes its row,
and declares its flags in the file of their topic.
"""

from typing import Final

from megatron.config.foreign.conditions import (
    GROUPS_OF_PIPELINE,
    INDEXED,
    LIMIT_IN_MICROBATCHES,
    NO_FP8,
    NO_RECOMPUTATION,
    NO_RECORDS,
    NOT_SHARED,
    SAME_STD,
    WITHOUT_TABLE,
)
from megatron.config.foreign.feature import Feature, Idle
from megatron.config.foreign.line import ONE_REPLICA, at_one, beside, without

_LEAVE_IT_OUT: Final = "leave it out"

# The formatter is off so that the flags read as a table.
# fmt: off
FEATURES: Final = (
    Feature(
        "other ways to shard over replicas",
        "replicas can share the optimizer's state, not weights or gradients",
        "use --use-distributed-optimizer",
        "",
        idle=(
            Idle("there is nothing to shard or gather over replicas", ONE_REPLICA, """
                --overlap-param-gather-with-optimizer-step --delay-param-gather
                --no-align-param-gather --align-param-gather
                --num-distributed-optimizer-instances N --data-parallel-sharding-strategy N
                --use-torch-fsdp2 --use-megatron-fsdp --use-custom-fsdp --fsdp-* [...]
                --zero-stage N --zero-allgather-bucket-size N --zero-reduce-bucket-size N
                --zero-contigious-gradients --zero-reduce-scatter"""),
        ),
    ),
    Feature(
        "replicas that start from different weights",
        "all replicas have the same initial weights",
        "leave it out",
        "",
        idle=(
            Idle("there is one replica of the model", ONE_REPLICA, "--data-parallel-random-init"),
        ),
    ),
    Feature(
        "other ways to share a sequence",
        "ranks that share a sequence gather keys and values over all of them",
        "leave it out; --context-parallel-size shares sequences",
        """
        --ds-sequence-parallel-size N --ds-sequence-parallel-* [...]
        """,
        idle=(
            Idle("a sequence is never split that way", None, """
                --ds-sequence-parallel-size {1}"""),
            Idle("keys and values are gathered anyway", None, """
                --cp-comm-type {all_gather}"""),
            Idle("a sequence is not split", at_one("--context-parallel-size"), """
                --cp-comm-type N ... --hierarchical-context-parallel-sizes N ...
                --use-cp-* [...]"""),
        ),
    ),
    Feature(
        "other checkpoints",
        "checkpoints are those of --save and --load, in PyTorch's distributed format",
        "leave it out",
        """
        --pretrained-checkpoint N --ckpt-convert-format N --ckpt-convert-save N
        --ckpt-convert-update-legacy-dist-opt-format --no-initialization
        --use-gcp-dynamic-checkpointing --universal-checkpoint --load-tag N
        --no-load-main-params-from-ckpt --non-persistent-save-interval N
        --non-persistent-* [...]
        """,
        idle=(
            Idle("every tensor is written once, and read where it is needed", None, """
                --ckpt-format {torch_dist} --dist-ckpt-format {torch_dist} --use-dist-ckpt
                --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save
                --ckpt-fully-parallel-load --dist-ckpt-optim-fully-reshardable
                --ckpt-assume-constant-structure --use-persistent-ckpt-worker
                --auto-detect-ckpt-format --verify-integrity"""),
            Idle("the learning rate follows the flags of the run that loads", None, """
                --override-opt_param-scheduler --override-lr-scheduler --reset-lr-scheduler"""),
            Idle("nothing random is saved: it follows from the seed", None, """
                --no-save-rng --no-load-rng"""),
            Idle("nothing is loaded", without("--load", "--pretrained-checkpoint"), """
                --no-load-lr-state --reset-iteration --load-iteration N
                --no-use-tokenizer-model-from-checkpoint-args --dist-ckpt-strictness N"""),
            Idle("nothing is saved or loaded",
                without("--save", "--load", "--pretrained-checkpoint"), """
                --ckpt-format N --dist-ckpt-format N --ckpt-* [...] --dist-ckpt-* [...]
                --save-* [...]"""),
        ),
    ),
    Feature(
        "the learning rate of a checkpoint",
        "the learning rate follows the flags, not the checkpoint",
        "give the flags of the run that saved it; what differs is told when it is loaded",
        "",
        idle=(
            Idle("nothing is loaded", without("--load", "--pretrained-checkpoint"), """
                --use-checkpoint-opt_param-scheduler --use-checkpoint-lr-scheduler"""),
        ),
    ),
    Feature(
        "other scales in fp8",
        "quantisers of one's own are not loaded",
        "use tensorwise or delayed, or blockwise or mxfp8 with --transformer-impl "
        "transformer_engine",
        "--fp8-recipe {custom}",
    ),
    Feature(
        "more than products in fp8",
        "weights are kept in 16 bits, and only the products of linear layers are in 8",
        _LEAVE_IT_OUT,
        "--fp4-* [...]",
        idle=(
            Idle("nothing is computed in fp8", NO_FP8, """
                --fp8-param-gather --fp8-* [...]"""),
        ),
    ),
    Feature(
        "main gradients in two types",
        "--main-grads-dtype bf16 asks for the opposite",
        "leave one of them out",
        """
        --accumulate-allreduce-grads-in-fp32
        """,
    ),
    Feature(
        "moments in fp16 or fp8",
        "they would need a scale for every tensor",
        "use bf16",
        """
        --exp-avg-dtype {fp16,fp8} --exp-avg-sq-dtype {fp16,fp8}
        """,
    ),
    Feature(
        "master weights in fewer bits",
        "master weights are always fp32",
        "leave it out, or use fp32",
        """
        --main-params-dtype N
        """,
        idle=(
            Idle("they are always fp32", None, "--main-params-dtype {fp32}"),
        ),
    ),
    Feature(
        "what recomputed layers keep, elsewhere",
        "the inputs of recomputed layers stay whole, on their rank",
        "leave it out (--sequence-parallel cuts them too)",
        "",
        idle=(
            Idle("there is no recomputation whose inputs could leave their rank", NO_RECOMPUTATION,
                "--checkpoint-in-cpu"),
            Idle("there are no inputs of recomputed layers that ranks could share", NOT_SHARED, """
                --partition-activations --distribute-saved-activations"""),
        ),
    ),
    Feature(
        "other kinds of recomputation",
        "only what --recompute-granularity, --recompute-modules and --recompute-method name is "
        "recomputed",
        _LEAVE_IT_OUT,
        """
        --recompute-* [...]
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
        --cpu-offload* [...] --remote-device N --use-pin-memory --optimizer-offload-policy N
        --optimizer-offload-auto-threshold N
        """,
    ),
    Feature(
        "other tokenizers",
        "tokenizers are sentencepiece's, tiktoken's, GPT-2's and those of Hugging Face's libraries",
        "use a --tokenizer-type that docs/data.md lists, or for data that is tokenized already "
        "NullTokenizer with --vocab-size N",
        """
        --tokenizer-type {Llama3Tokenizer,BertWordPieceLowerCase,BertWordPieceCase}
        --tokenizer-type {MultimodalTokenizer,NullMultimodalTokenizer,SFTTokenizer,FalconTokenizer}
        --tokenizer-type {TokenizerFromFile,TokenizerFromFileWithFIM,GPT2BPETokenizerWithFIM}
        --tokenizer-type {CharLevelTokenizer,ByteLevelTokenizer,HFTokenizer}
        --tokenizer-type {HFGPT2Tokenizer} --tokenizer-file N
        --vocab-extra-ids-list N ... --no-new-tokens --extra-vocab-size N
        --patch-tokenizer-type N --tokenizer-prompt-format N --tokenizer-kwargs N ...
        --tokenizer-* [...] --tiktoken-* [...]
        """,
        idle=(
            Idle("tokenizer.json is read, and no code of its folder runs", None, """
                --trust-remote-code --tokenizer-hf-use-fast"""),
            Idle("no ids are added to the tokenizer's", None, "--extra-vocab-size {0}"),
        ),
    ),
    Feature(
        "other records",
        "records go to JSON lines, TensorBoard and Weights & Biases, and hold what docs/metrics.md "
        "lists",
        "use --log-jsonl, --tensorboard-dir or --wandb-project; WANDB_MODE and the like are "
        "variables of the environment",
        """
        --tensorboard-* [...] --wandb-mode N --wandb-* [...] --mlflow-* [...] --clearml-* [...]
        """,
        idle=(
            Idle("only --tensorboard-dir and --wandb-project draw curves", NO_RECORDS, """
                --log-optimizer-states-to-tensorboard --log-*-to-tensorboard [...]"""),
        ),
    ),
    Feature(
        "further figures in the log",
        "the log has no line for it yet",
        _LEAVE_IT_OUT,
        """
        --log-energy
        --log-max-attention-logit
        --profile-memory-iter N --config-logger-dir N --timing-log-level N --structured-logs
        --structured-logs-dir N --transformer-timers --metrics N ... --log-device-memory-used
        --log-memory-interval N
        """,
    ),
    Feature(
        "batches made smaller",
        "batches of a run only grow",
        "make every batch a multiple of --micro-batch-size times the replicas",
        "",
        idle=(
            Idle("batches do not grow",
                without(
                    "--rampup-batch-size", "--step-batch-size-schedule", "--batch-size-steps"
                ), """
                --decrease-batch-size-if-needed"""),
        ),
    ),
    Feature(
        "curricula and dropped tokens",
        "all samples are whole, and read in one order",
        _LEAVE_IT_OUT,
        """
        --curriculum-learning --curriculum-* [...] --data-efficiency-* [...] --random-ltd
        --random-ltd-* [...] --train-idx-path N --train-doc-idx-path N --train-sample-idx-path N
        --train-shuffle-idx-path N --custom-token-counting --shuffle-sample-in-corpus
        --blend-sample-in-corpus
        """,
    ),
    Feature(
        "other ways to stop",
        "a run ends by its length, after a time, by a signal or by a file",
        "use --exit-interval, --exit-duration-in-mins, --exit-signal-handler or --kill-switch-path",
        """
        --adlr-autoresume --adlr-autoresume-interval N --phase-transition-iterations N
        """,
    ),
    Feature(
        "data given in other ways",
        "corpora are named by --data-path, or split by split by --train-data-path and the like",
        "give their prefixes with these; --per-split-data-args-path reads them from a file",
        """
        --train-data N ... --valid-data N ... --test-data N ... --data-file-list N
        --data-file-list-* [...] --data-name N --data-dir N --dataset-config N
        """,
    ),
    Feature(
        "other kinds of data",
        "samples come from an indexed corpus (.bin and .idx), in one order",
        "make one with tools/sample_data.py or preprocess_data.py (docs/data.md)",
        """
        --data-impl N --dataset N --dataloader-type N --train-mode N --mmap-* [...]
        --s3-cache-path N --object-storage-* [...] --mid-level-dataset-* [...]
        --use-prompt-dataset --sft --data-type N --variable-seq-lengths --lazy-loader --glm-mask
        --transformer-type N --intra-document-masking [...]
        """,
        idle=(
            Idle("samples of an indexed corpus fill --seq-length", INDEXED, """
                --max-padding-length N"""),
        ),
    ),
    Feature(
        "other optimizers",
        "the optimizers are Adam with decoupled weight decay, SGD and Muon",
        "use --optimizer adam, sgd or muon",
        """
        --optimizer {lion,soap,adaptive_muon,adafactor,lamb,adagrad,ademamix}
        --lion-* [...] --soap-* [...] --ademamix-* [...] --adaptive-muon-* [...]
        --use-bnb-optimizer
        """,
    ),
    Feature(
        "other kinds of Muon",
        "Muon's momentum is fp32, and all other weights take Adam",
        "leave it out, or use --optimizer muon as it is",
        """
        --muon-fp32-matmul-prec {low} --muon-scalar-optimizer N
        --muon-* [...]
        """,
        idle=(
            Idle("every rank forms the whole update of a matrix that it shares", None, """
                --muon-tp-mode {duplicated,distributed}"""),
            Idle("layers are not split over tensor-parallel ranks",
                at_one("--tensor-model-parallel-size"), "--muon-tp-mode N"),
            Idle("all other weights take Adam", None, """
                --muon-scalar-optimizer {adam}"""),
        ),
    ),
    Feature(
        "other learning rates and decays",
        "weights have one rate, or two with --decoupled-lr; norms and biases never decay",
        "use --lr-decay-style cosine, linear, inverse-square-root or WSD, and --weight-decay",
        """
        --lr-decay-style {exponential} --use-mup --mup-* [...] --head-lr-mult N
        --apply-wd-to-qk-layernorm --no-weight-decay-cond-type N
        """,
    ),
    Feature(
        "other position embeddings",
        "positions are a learned table, rotated by RoPE, ALiBi's slopes, or none",
        "use --position-embedding-type rope, learned_absolute, alibi or none",
        """
        --position-embedding-type {yarn,mrope,relative,xpos} --yarn-* [...]
        --mrope-* [...] --relative-attention-* [...] --rotary-scaling-factor N
        """,
        idle=(
            Idle("the learned table is left out", WITHOUT_TABLE, """
                --no-position-embedding"""),
        ),
    ),
    Feature(
        "other layers",
        "layers are of softmax attention and an MLP (GELU, SwiGLU, GeGLU or squared ReLU)",
        _LEAVE_IT_OUT,
        """
        --spec N ... --transformer-impl {inference_optimized}
        --normalization {SyncRMSNorm,apexRMSNorm,ScaleNorm} --glu-activation N
        --quick-gelu --quick-geglu --reglu --liglu --activation-func-* [...] --xielu
        --init-method-xavier-uniform
        --use-embedding-init-method-* [...] --attention-head-type N --multi-latent-attention
        --q-lora-rank N --kv-lora-rank N --qk-head-dim N --qk-pos-emb-head-dim N --v-head-dim N
        --sliding-window-size N --sliding-window N --interleave-sliding-window N
        --softmax-type N --attention-output-gate --attention-chunk-size N --attention-bias
        --mtp-* [...] --mamba-* [...]
        --hybrid-* [...] --is-hybrid-model --linear-attention-* [...]
        --heterogeneous-layers-* [...] --use-kan --lora-* [...]
        --use-embedding-scaling --use-normhead --compression-training
        """,
        idle=(
            Idle("it is the same deviation", SAME_STD, """
                --embedding-init-method-std N"""),
            Idle("attention heads are all of one kind", None, """
                --attention-head-type {multihead}"""),
        ),
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
        --enable-expert-tensor-parallelism --mlp-type N --topk N
        """,
        idle=(
            Idle("every token passes the same layers", None, """
                --expert-model-parallel-size {1} --expert-tensor-parallel-size {1}
                --num-experts {1}"""),
            Idle("every token passes the same layers", without("--num-experts"), """
                --expert-* [...] --moe-* [...] --overlap-moe-* [...] --create-moe-param-group
                --disable-moe-token-dropping"""),
        ),
    ),
    Feature(
        "other spreads of the layers",
        "layers are spread by number, by FLOPs or by a list",
        "use --layer-distribution remainder, redis or N,N,...",
        """
        --pp-partition-method N --standalone-embedding-stage
        --pipeline-model-parallel-split-rank N
        """,
        decides="--decoder-first-pipeline-num-layers",
    ),
    Feature(
        "other groups and parts of microbatches",
        "a pass computes a whole microbatch, and interleaved ones follow in groups of as many as "
        "there are pipeline ranks",
        _LEAVE_IT_OUT,
        """
        --interleave-group-size N --num-seq-splits N
        """,
        idle=(
            Idle("groups of microbatches are of the number of pipeline ranks",
                GROUPS_OF_PIPELINE, """
                --microbatch-group-size-per-virtual-pipeline-stage N"""),
        ),
    ),
    Feature(
        "a memory limit in bytes",
        "the limit of a schedule is a number of microbatches",
        "use --zero-bubble-max-pending-backward MICROBATCHES",
        "",
        idle=(
            Idle("a V schedule has its own memory", beside("--zero-bubble-v-schedule"), """
                --zero-bubble-adaptive-memory-limit-percentile N"""),
            Idle("the limit is given in microbatches", LIMIT_IN_MICROBATCHES, """
                --zero-bubble-adaptive-memory-limit-percentile N"""),
            Idle("no zero-bubble schedule is asked for", without("--enable-zero-bubble"), """
                --zero-bubble-adaptive-memory-limit-percentile N
                --zero-bubble-max-pending-backward {auto}"""),
        ),
    ),
    Feature(
        "steps that are checked, repeated or skipped",
        "every step is taken once; losses are checked for infinity, NaN and spikes",
        "leave it out (see --check-for-spiky-loss and --iterations-to-skip)",
        """
        --check-for-large-grads --rerun-mode N --error-injection-* [...]
        --skip-train-iteration-range N ...
        --skip-samples N ... --deterministic-mode --enable-ft-package --ft-* [...]
        --calc-ft-timeouts --inprocess-* [...] --replication [...] --replication-* [...]
        --train-range-to-skip N ... --batch-invariant-mode
        """,
        idle=(
            Idle("no step is repeated to check it", None, """
                --rerun-mode {disabled}"""),
        ),
    ),
    Feature(
        "settings in a file",
        "settings are read from the command line only",
        "give what the file says as flags",
        """
        --yaml-cfg N --export-kv-* [...] --args-file N
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
        --img-h N --img-w N --freeze-* [...] --distill* [...] --kd-* [...] --mos
        --export-* [...]
        """,
    ),
)
"""All that is missing. Of two rows with one flag the first counts."""
