"""The flags a user can give, in Megatron's flat names with Megatron's defaults: one field each.

Each class is a group of the help text. ``None`` means "not given"; ``resolve`` decides the value of
such a flag, and ``pipeline_flags`` decides it for the pipeline. A flag with the same name as a
field of a configuration is copied into that field by itself.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from megatron.config.cluster_flags import ClusterFlags
from megatron.config.corpus_flags import OWN_PATHS, CorpusFlags
from megatron.config.declare import (
    COUNT,
    DEPTH,
    LENGTH,
    MINUTES,
    NOT_NEGATIVE,
    PERCENT,
    POSITIVE,
    RANKS,
    SEED,
    SHARE,
    WIDTH,
    all_declarations,
    flag,
    required,
    up_to,
)
from megatron.config.eight_bit_flags import EightBitFlags
from megatron.config.fill_flags import FillFlags
from megatron.config.layer_flags import LayerFlags
from megatron.config.long_run_flags import CheckpointFlags, GuardFlags, ReplicaFlags
from megatron.config.optimizer_flags import OptimizerFlags
from megatron.config.precision_flags import PrecisionFlags
from megatron.config.recompute_flags import RecomputeFlags
from megatron.config.record_flags import RecordFlags
from megatron.config.tokenizer_flags import TokenizerFlags
from megatron.model.config import PositionEmbedding
from megatron.schedules.catalogue import CHUNKED_SCHEDULES, TRAINABLE_SCHEDULES
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.gpus import GPUS

DEFAULT_SCHEDULE: Final = "1f1b"
DEFAULT_TREATMENT: Final = "none"
AUTO_TREATMENT: Final = "auto"
"""Leaves the choice of the treatment to the plan."""
DRY_RUN_GPU: Final = "A100"

SCHEDULE_PROFILE_ITERATIONS: Final = 3
"""Iterations whose passes are timed if ``--profile-schedule-end`` is not given."""

_ROPE: Final = "--position-embedding-type rope"
_ACCOUNTS: Final = (
    "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split"
)

# The formatter is off so that the flags read as a table.
# fmt: off


@dataclass(frozen=True)
class ModelFlags:
    """The model's shape and mathematics."""

    num_layers: int = required("Transformer layers.", DEPTH)
    hidden_size: int = required("Width of the model.", WIDTH)
    num_attention_heads: int = required("Query heads.", WIDTH)
    seq_length: int = required("Tokens per sample.", LENGTH)
    max_position_embeddings: int | None = flag(None,
        "Longest sequence; rows of the learned position table.", LENGTH, unset="--seq-length")
    ffn_hidden_size: int | None = flag(None, "Width of the MLP.", WIDTH,
        unset="4 x hidden; with --swiglu or --geglu 8/3 x hidden in multiples of 64")
    group_query_attention: bool = flag(False, "Share key/value heads among query heads.")
    num_query_groups: int | None = flag(None, "Key/value heads.", WIDTH,
        unset="1, or heads without --group-query-attention", idle_without="--group-query-attention")
    kv_channels: int | None = flag(None, "Width of a head.", WIDTH, unset="hidden / heads")
    position_embedding_type: PositionEmbedding = flag("learned_absolute",
        "A learned table, rotated queries and keys, scores that fall with distance, or nothing.")
    rotary_base: int = flag(10000, "RoPE theta.", up_to(10**12), idle_without=_ROPE)
    rotary_percent: float = flag(1.0, "Share of each head that RoPE rotates.", PERCENT,
        idle_without=_ROPE)
    rotary_interleaved: bool = flag(False,
        "RoPE turns channels 2i and 2i + 1 together, not channels of two halves.",
        idle_without=_ROPE)
    use_rope_scaling: bool = flag(False,
        "Scale the low frequencies of RoPE down as Llama 3.1 does, whose samples had 8192 tokens "
        "before.", idle_without=_ROPE)
    rope_scaling_factor: float = flag(8.0, "What the lowest of them are divided by.", COUNT,
        idle_without="--use-rope-scaling")
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", "Kind of all norms.")
    norm_epsilon: float = flag(1e-5, "Epsilon of all norms.", POSITIVE)
    swiglu: bool = flag(False, "SiLU-gated MLP instead of GELU.")
    squared_relu: bool = flag(False, "Squared ReLU in the MLP instead of GELU.",
        excludes="--swiglu")
    qk_layernorm: bool = flag(False, "Normalise queries and keys per head.")
    disable_bias_linear: bool = flag(False, "No biases in the linear layers.")
    add_qkv_bias: bool = flag(False,
        "Biases of queries, keys and values in spite of --disable-bias-linear.",
        idle_without="--disable-bias-linear")
    untie_embeddings_and_output_weights: bool = flag(False, "An output matrix of its own.")
    attention_dropout: float = flag(0.1, "Dropout on attention probabilities.", SHARE)
    hidden_dropout: float = flag(0.1, "Dropout on the embedding and on the residual branches.",
        SHARE)
    init_method_std: float = flag(0.02, "Standard deviation of the initial weights.", NOT_NEGATIVE)
    label_smoothing: float = flag(0.0, "Share of the target spread evenly over the vocabulary.",
        SHARE)
    z_loss_coeff: float = flag(0.0, "Weight of the squared log-partition in the loss.",
        NOT_NEGATIVE)
    logit_softcap: float = flag(0.0, "c of c tanh(logit / c); 0: off.", NOT_NEGATIVE)


@dataclass(frozen=True)
class ParallelFlags:
    """The layout over ranks."""

    pipeline_model_parallel_size: int = flag(1, "Pipeline ranks.", RANKS)
    vocab_parallel: str | None = flag(None,
        "none: the vocabulary layers are whole on the first and the last stage; redis: the same, "
        "with fewer transformer layers there. The others split them into passes of every rank, "
        "with one barrier (vocab-2), two (vocab-1), three (naive), or two without overlap "
        "(interlaced). auto takes the fastest of none, redis, vocab-1, vocab-2 and interlaced.",
        choices=(*TREATMENTS, AUTO_TREATMENT), unset=DEFAULT_TREATMENT)
    enable_vocab_parallel: bool = flag(False, "The original's name of --vocab-parallel vocab-2.")
    disable_backward_fusion: bool = flag(False, "With --enable-vocab-parallel: vocab-1.",
        idle_without="--enable-vocab-parallel", excludes="--use-interlaced-schedule")
    use_interlaced_schedule: bool = flag(False,
        "The original's name of --vocab-parallel interlaced.")
    vocab_recompute: bool = flag(False,
        "Keep no logits for the output layer's backward, which forms them again: one more product, "
        "and less memory, under every treatment.", idle_with="--skip-train")
    make_vocab_size_divisible_by: int = flag(128,
        "Every vocabulary shard has a multiple of this number of rows.", WIDTH)
    tensor_model_parallel_size: int = flag(1,
        "Tensor-parallel ranks: as many share every layer, by its heads and columns.", RANKS)
    sequence_parallel: bool = flag(False,
        "Tensor-parallel ranks also share the sequence wherever they do not share a layer.")
    context_parallel_size: int = flag(1,
        "Ranks that share every sequence; attention gathers keys and values over them.", RANKS)
    device: Literal["auto", "cpu", "cuda"] = flag("auto",
        "Device to compute on; auto takes CUDA if there is a CUDA device.")
    distributed_backend: Literal["nccl", "gloo"] | None = flag(None, "Communication library.",
        unset="nccl on CUDA, gloo on CPUs")
    distributed_timeout_minutes: int = flag(10, "How long a collective may wait.", MINUTES)


@dataclass(frozen=True)
class PipelineFlags:
    """The pipeline's schedule, and the layers of its stages."""

    pipeline_schedule: str | None = flag(None,
        "Schedule of the passes; auto takes the fastest of all.", choices=TRAINABLE_SCHEDULES,
        instead="for any other, save its plan with tools/simulate.py --save-plan FILE and train it "
        "with --schedule-file FILE", unset=DEFAULT_SCHEDULE)
    schedule_file: Path | None = flag(None,
        "Train this plan, as tools/simulate.py --save-plan writes it.", unset="none")
    measured_costs: Path | None = flag(None,
        "Costs of passes to plan with, as --save-measured-costs saves them.", unset="by FLOPs")
    zero_bubble_max_pending_backward: float | None = flag(None,
        "The most microbatches in flight on a rank. zb-auto uses all of them, zb-v, v-half and "
        "v-min may use all to idle less, auto takes a schedule within the limit, and a schedule "
        "that needs more is refused.", COUNT,
        unset="no limit",
        metavar="MICROBATCHES")
    search_seconds: float | None = flag(None,
        "Time to look for a good plan; then all ranks take the best that rank 0 has found.",
        NOT_NEGATIVE, unset="no limit")
    advice_seconds: float = flag(20.0,
        "Time of a dry run to look for settings that fit, or to plan the other schedules that auto "
        "compares; then it says which were not tried.", NOT_NEGATIVE, idle_without="--dry-run")
    enable_zero_bubble: bool = flag(False,
        "zb-auto with --zero-bubble-max-pending-backward, else zb-1p, which holds as much as 1f1b.")
    zero_bubble_v_schedule: bool = flag(False,
        "zb-v, or the schedule of --zero-bubble-v-schedule-mem-setup; with or without "
        "--enable-zero-bubble.")
    zero_bubble_v_schedule_mem_setup: Literal["half", "min", "zb"] | None = flag(None,
        "v-half, v-min or zb-v.", unset="zb", idle_without="--zero-bubble-v-schedule")
    num_virtual_stages_per_pipeline_rank: int | None = flag(None,
        "Model chunks of a rank; without a --pipeline-schedule implies interleaved.", DEPTH,
        unset=f"the schedule's least; for {' or '.join(CHUNKED_SCHEDULES)}",
        excludes="--num-layers-per-virtual-pipeline-stage")
    num_layers_per_virtual_pipeline_stage: int | None = flag(None,
        "Layers of a chunk; another way to give the chunks of a rank.", DEPTH,
        unset="by --num-virtual-stages-per-pipeline-rank")
    layer_distribution: str | None = flag(None,
        "Layers of the stages. even: equally many; remainder: one more on the first ones; redis: "
        "the slowest stage as fast as possible; or a list, in the order in which the data flows.",
        unset="even",
        metavar="{even,remainder,redis}|N,N,...")
    pipeline_model_parallel_layout: str | None = flag(None,
        "The stages in Megatron-Core's words, in the order in which the data flows, as in "
        "'Et*2|(t*2|)*6t*2L': E is the embedding, t a transformer layer, L the loss, | ends a "
        "stage. More stages than ranks imply interleaved.", unset="none", metavar="LAYOUT")
    enable_layer_redistribution: bool = flag(False,
        "The original's name of --vocab-parallel redis.")
    final_stage_num_layers: int | None = flag(None, "With redis: layers of the last stage.",
        NOT_NEGATIVE, unset="balanced by FLOPs",
        idle_without="--enable-layer-redistribution or --vocab-parallel redis or "
        "--layer-distribution redis or --vocab-parallel auto")
    decoder_first_pipeline_num_layers: int | None = flag(None,
        "Layers of the first stage; the others share the rest.", NOT_NEGATIVE,
        unset="as the others", excludes=_ACCOUNTS)
    decoder_last_pipeline_num_layers: int | None = flag(None,
        "Layers of the last stage; the others share the rest.", NOT_NEGATIVE, unset="as the others",
        excludes=_ACCOUNTS)
    account_for_embedding_in_pipeline_split: bool = flag(False,
        "The embedding counts as one of the first stage's layers.")
    account_for_loss_in_pipeline_split: bool = flag(False,
        "The output layer counts as one of the last stage's layers.")


@dataclass(frozen=True)
class TrainFlags:
    """Length, batch size and precision."""

    micro_batch_size: int = required("Samples per microbatch.", WIDTH)
    global_batch_size: int | None = flag(None, "Samples per iteration.", COUNT,
        unset="one microbatch")
    rampup_batch_size: tuple[str, ...] = flag((),
        "Grow batches: samples of the first one, samples by which they grow at a time until they "
        "have --global-batch-size, and samples over which they grow.", unset="off",
        metavar="START INCREMENT SAMPLES", excludes="--train-iters or --schedule-file or "
        "--pipeline-schedule auto or --profile-schedule-start")
    batch_size_steps: tuple[str, ...] = flag((),
        "Grow batches by these steps: for each the consumed samples at which it begins, and the "
        "samples of a batch from there on; the first begins at 0, the last has "
        "--global-batch-size.", unset="off",
        metavar="SAMPLES:SIZE ...", excludes="--rampup-batch-size or "
        "--schedule-file or --pipeline-schedule auto or --profile-schedule-start")
    train_iters: int | None = flag(None, "Iterations of the whole job.", COUNT,
        unset="by --train-samples")
    train_samples: int | None = flag(None, "Samples of the whole job.", COUNT,
        unset="by --train-iters")
    exit_interval: int | None = flag(None,
        "Stop after the first iteration that this number divides.", COUNT, unset="never")
    seed: int = flag(1234, "Seed of weights, data order and dropout.", SEED)
    use_cpu_initialization: bool = flag(False,
        "Draw the initial weights on the CPU for GPUs, too, which otherwise draw other numbers, by "
        "their kind.")
    bf16: bool = flag(False,
        "Parameters and activations in bf16, not fp32; master weights and gradients stay fp32.")
    eval_interval: int | None = flag(None,
        "Iterations between evaluations; there is one at the end too, on the test set as well.",
        COUNT, unset="no evaluation")
    eval_iters: int = flag(100, "Batches per evaluation; 0: no evaluation.", NOT_NEGATIVE,
        idle_without="--eval-interval or --skip-train")
    deepspeed_config: Path | None = flag(None,
        "A DeepSpeed configuration; it must say what the flags say.", unset="none")
    skip_train: bool = flag(False,
        "Only evaluate the checkpoint of --load, on the validation and the test set.",
        needs="--load", lack="would evaluate random weights",
        excludes="--profile or --record-timeline or --profile-schedule-start")


@dataclass(frozen=True)
class DataFlags:
    """Corpus."""

    data_path: tuple[str, ...] = flag((),
        "Prefix of a .bin and .idx file; or several prefixes with a weight before each.",
        unset="required but for --dry-run and --mock-data", metavar="[WEIGHT] PREFIX ...")
    mock_data: bool = flag(False,
        "Train on documents that are made up and only count, without any data; --vocab-size is "
        "enough of a tokenizer.", excludes="--data-path")
    split: str = flag("969,30,1", "Shares of the documents for training, validation and test.",
        idle_with=OWN_PATHS)
    data_cache_path: Path | None = flag(None, "Folder of the sample indices.",
        unset="beside the data", idle_with="--mock-data")
    eod_mask_loss: bool = flag(False, "No loss where the input is the end of a document.")


@dataclass(frozen=True)
class LogFlags:
    """Printed lines, traces and predictions."""

    log_interval: int = flag(100, "Iterations per printed line.", COUNT)
    peak_tflops: float | None = flag(None, "Peak of one rank in TFLOP/s, for the MFU.", POSITIVE,
        unset="by GPU name, else measured")
    log_num_zeros_in_grad: bool = flag(False,
        "Print how many elements of the gradient are zero; all ranks wait for one another.")
    log_params_norm: bool = flag(False,
        "Print the norm of all weights; all ranks wait for one another, and for sharded steps.")
    profile: bool = flag(False, "Write a torch profiler trace.")
    profile_step_start: int = flag(10, "First traced iteration.", COUNT,
        idle_without="--profile")
    profile_step_end: int = flag(12, "First iteration that is no longer traced.", COUNT,
        idle_without="--profile")
    profile_dir: Path = flag(Path("profile"), "Folder of the traces.",
        idle_without="--profile")
    record_timeline: Path | None = flag(None,
        "File for the measured timeline of the last iteration, in the simulator's format.",
        unset="none")
    profile_schedule_start: int | None = flag(None, "First iteration whose passes are timed.",
        COUNT, unset="never")
    profile_schedule_end: int | None = flag(None,
        "First iteration whose passes are no longer timed.", COUNT, unset="three iterations later",
        idle_without="--profile-schedule-start")
    save_measured_costs: Path | None = flag(None,
        "Write the measured costs of passes to this file, for --measured-costs.",
        unset="not saved", needs="--profile-schedule-start", lack="needs measured passes")
    replan: bool = flag(False,
        "Plan anew with the measured costs, measure the new plan too, and keep the faster one.",
        needs="--profile-schedule-start", lack="needs measured passes", excludes="--schedule-file")
    record_memory_history: bool = flag(False,
        "Remember who allocates GPU memory, for the snapshot of a rank that is out of it.")
    memory_snapshot_path: Path = flag(Path("snapshot.pickle"),
        "File for that snapshot; the number of the rank is added to its name.")
    dry_run: bool = flag(False,
        "Only report the plan, its time and its memory. Needs no ranks, devices or data.")
    dry_run_gpu: str | None = flag(None, "The GPU to predict for.", unset=DRY_RUN_GPU,
        choices=tuple(GPUS), any_case=True, needs="--dry-run")
    dry_run_replicas: int | None = flag(None, "Replicas of the model to predict for.", COUNT,
        unset="1", needs="--dry-run")
    dry_run_replica_bandwidth: float | None = flag(None,
        "GB/s of one direction from a rank to its replica in another machine.", POSITIVE,
        unset="by the GPU", needs="--dry-run-replicas")
    dry_run_replica_latency: float | None = flag(None,
        "Microseconds of a step from a rank to its replica, in addition to its bytes.",
        NOT_NEGATIVE, unset="10", needs="--dry-run-replicas")


# fmt: on
GROUPS: Final = (
    ModelFlags,
    LayerFlags,
    ParallelFlags,
    PipelineFlags,
    TrainFlags,
    PrecisionFlags,
    EightBitFlags,
    RecomputeFlags,
    OptimizerFlags,
    DataFlags,
    TokenizerFlags,
    CorpusFlags,
    FillFlags,
    ReplicaFlags,
    ClusterFlags,
    CheckpointFlags,
    GuardFlags,
    LogFlags,
    RecordFlags,
)
"""All groups, in the order of the help."""

DECLARED: Final = all_declarations(GROUPS)
"""All flags, as they stand on a command line."""
