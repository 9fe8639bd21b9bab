"""The flags a user can give, in Megatron's flat names with Megatron's defaults.

Each class is a group of the help text. ``None`` means "not given": what it stands for is decided in
``resolve``, and for the pipeline in ``pipeline_flags``. What is allowed is checked in ``ranges``,
``validate`` and ``validate_log``, and where it takes other values to tell, where those are resolved
or planned with. ``arguments`` calls them all; nothing below it sees these classes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from megatron.schedules.catalogue import CHUNKED_SCHEDULES, SCHEDULE_NAMES

VocabParallel = Literal["none", "redis", "naive", "vocab-1", "vocab-2", "interlaced"]
PipelineSchedule = Literal[SCHEDULE_NAMES]


def _unset(means: str, metavar: str = "INT") -> object:
    """Help for a flag that may be left unset: what that means, and the form of its values."""
    hint = f"({means})" if means == "required" else f"(default: {means})"
    return tyro.conf.arg(help_behavior_hint=hint, metavar=metavar)


@dataclass(frozen=True)
class ModelFlags:
    """The model's shape and mathematics."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the model."""
    num_attention_heads: int
    """Query heads."""
    seq_length: int
    """Tokens per sample."""
    max_position_embeddings: Annotated[int | None, _unset("--seq-length")] = None
    """Longest sequence; rows of the learned position table."""
    ffn_hidden_size: Annotated[
        int | None, _unset("4 x hidden; with --swiglu 8/3 x hidden in multiples of 64")
    ] = None
    """Width of the MLP."""
    group_query_attention: bool = False
    """Share key/value heads among query heads."""
    num_query_groups: Annotated[
        int | None, _unset("1, or heads without --group-query-attention")
    ] = None
    """Key/value heads; needs --group-query-attention."""
    kv_channels: Annotated[int | None, _unset("hidden / heads")] = None
    """Width of a head."""
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """A learned table, or rotated queries and keys."""
    rotary_base: int = 10000
    """RoPE theta."""
    rotary_percent: float = 1.0
    """Share of each head that RoPE rotates."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of all norms."""
    norm_epsilon: float = 1e-5
    """Epsilon of all norms."""
    swiglu: bool = False
    """SiLU-gated MLP instead of GELU."""
    qk_layernorm: bool = False
    """Normalise queries and keys per head."""
    disable_bias_linear: bool = False
    """No biases in the linear layers."""
    untie_embeddings_and_output_weights: bool = False
    """An output matrix of its own."""
    attention_dropout: float = 0.1
    """Dropout on attention probabilities."""
    hidden_dropout: float = 0.1
    """Dropout on the embedding and on the residual branches."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over the vocabulary."""
    z_loss_coeff: float = 0.0
    """Weight of the squared log-partition in the loss."""
    logit_softcap: float = 0.0
    """c of c tanh(logit / c); 0: off."""


@dataclass(frozen=True)
class ParallelFlags:
    """The layout over ranks."""

    pipeline_model_parallel_size: int = 1
    """Pipeline ranks."""
    vocab_parallel: Annotated[
        VocabParallel | None, _unset("none", "{" + ",".join(get_args(VocabParallel)) + "}")
    ] = None
    """Vocabulary layers whole on the first and the last stage (none), which have fewer transformer
    layers for it (redis); or as passes of every rank with one barrier (vocab-2), two (vocab-1), two
    that nobody works beside (interlaced), or three (naive)."""
    enable_vocab_parallel: bool = False
    """The original's name of --vocab-parallel vocab-2."""
    disable_backward_fusion: bool = False
    """With --enable-vocab-parallel: vocab-1."""
    use_interlaced_schedule: bool = False
    """The original's name of --vocab-parallel interlaced."""
    make_vocab_size_divisible_by: int = 128
    """The rows of every vocabulary shard are a multiple of this."""
    tensor_model_parallel_size: int = 1
    """Tensor-parallel ranks; only 1 so far."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to compute on; auto takes CUDA where there is one."""
    distributed_backend: Annotated[
        Literal["nccl", "gloo"] | None, _unset("nccl on CUDA, gloo on CPUs", "{nccl,gloo}")
    ] = None
    """Communication library."""
    distributed_timeout_minutes: int = 10
    """How long a collective may wait."""


@dataclass(frozen=True)
class PipelineFlags:
    """The pipeline's schedule, and what its stages hold."""

    pipeline_schedule: Annotated[
        PipelineSchedule | None, _unset("1f1b", "{" + ",".join(get_args(PipelineSchedule)) + "}")
    ] = None
    """What makes the plan; auto takes the fastest of all. optimal is for tools/simulate.py only."""
    schedule_file: Annotated[Path | None, _unset("none", "PATH")] = None
    """Train this plan, as tools/simulate.py --save-plan writes it: --pipeline-schedule file."""
    measured_costs: Annotated[Path | None, _unset("by FLOPs", "PATH")] = None
    """Costs of passes to plan with, as --schedule-costs saves them."""
    zero_bubble_max_pending_backward: Annotated[
        float | None, _unset("no limit", "MICROBATCHES")
    ] = None
    """The most microbatches in flight on a rank. zb-auto fills them, auto looks for what fits, any
    other schedule that holds more is refused."""
    enable_zero_bubble: bool = False
    """zb-auto with --zero-bubble-max-pending-backward, else zb-1p, which holds as much as 1f1b."""
    zero_bubble_v_schedule: bool = False
    """zb-v, or what --zero-bubble-v-schedule-mem-setup says; with or without --enable-zero-bubble.
    """
    zero_bubble_v_schedule_mem_setup: Annotated[
        Literal["half", "min", "zb"] | None, _unset("zb", "{half,min,zb}")
    ] = None
    """v-half, v-min or zb-v."""
    num_virtual_stages_per_pipeline_rank: Annotated[
        int | None, _unset(f"the schedule's least; for {' or '.join(CHUNKED_SCHEDULES)}")
    ] = None
    """Model chunks of a rank; without a --pipeline-schedule implies interleaved."""
    num_layers_per_virtual_pipeline_stage: Annotated[int | None, _unset("by the former")] = None
    """The same by the layers of a chunk."""
    layer_distribution: Annotated[str | None, _unset("even", "{even,remainder,redis}|N,N,...")] = (
        None
    )
    """Layers of the stages: as many everywhere; one more on the first ones; the slowest as fast as
    possible; or as listed, in the order in which the data flows."""
    enable_layer_redistribution: bool = False
    """The original's name of --vocab-parallel redis."""
    final_stage_num_layers: Annotated[int | None, _unset("balanced by FLOPs")] = None
    """With redis: layers of the last stage."""
    decoder_first_pipeline_num_layers: Annotated[int | None, _unset("as the others")] = None
    """Layers of the first stage; the others share the rest."""
    decoder_last_pipeline_num_layers: Annotated[int | None, _unset("as the others")] = None
    """Layers of the last stage; the others share the rest."""
    account_for_embedding_in_pipeline_split: bool = False
    """The embedding counts as one of the first stage's layers."""
    account_for_loss_in_pipeline_split: bool = False
    """The output layer counts as one of the last stage's layers."""


@dataclass(frozen=True)
class TrainFlags:
    """Length, batch size and precision."""

    micro_batch_size: int
    """Samples per microbatch."""
    global_batch_size: Annotated[int | None, _unset("one microbatch")] = None
    """Samples per iteration."""
    train_iters: Annotated[int | None, _unset("by --train-samples")] = None
    """Iterations of the whole job."""
    train_samples: Annotated[int | None, _unset("by --train-iters")] = None
    """Samples of the whole job."""
    exit_interval: Annotated[int | None, _unset("never")] = None
    """Stop after the first iteration that this number divides."""
    seed: int = 1234
    """Of weights, data order and dropout."""
    bf16: bool = False
    """bf16 parameters and activations, fp32 master weights and gradients. Default: all fp32."""
    eval_interval: Annotated[int | None, _unset("no evaluation")] = None
    """Iterations between evaluations."""
    eval_iters: int = 100
    """Batches per evaluation; 0: no evaluation."""
    load: Annotated[Path | None, _unset("from scratch", "PATH")] = None
    """Folder of a checkpoint to go on from."""


@dataclass(frozen=True)
class OptimizerFlags:
    """AdamW, clipping and the learning rate."""

    lr: Annotated[float | None, _unset("required", "FLOAT")] = None
    """Peak learning rate."""
    min_lr: float = 0.0
    """Final learning rate."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the decay after the warm-up."""
    lr_decay_iters: Annotated[int | None, _unset("--train-iters")] = None
    """Iterations until --min-lr is reached."""
    lr_decay_samples: Annotated[int | None, _unset("--train-samples")] = None
    """The same in samples, with --train-samples."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = 0
    """The same in samples, with --train-samples."""
    lr_warmup_fraction: Annotated[float | None, _unset("by one of the above", "FLOAT")] = None
    """The same as a share of the decay span."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""
    weight_decay: float = 0.01
    """Decoupled decay; not on biases and vectors."""
    adam_beta1: float = 0.9
    """First-moment decay."""
    adam_beta2: float = 0.999
    """Second-moment decay."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_grad: float = 1.0
    """Limit of the global gradient norm; 0: off."""
    optimizer: Literal["adam"] = "adam"
    """The only one so far; with decoupled weight decay."""
    enable_optimizer_post_validation: bool = False
    """Step without waiting for the other ranks, and take back a step that proves wrong."""


@dataclass(frozen=True)
class DataFlags:
    """Corpus and tokenizer."""

    data_path: Annotated[tuple[str, ...], _unset("required", "[WEIGHT] PREFIX ...")] = ()
    """Prefix of a .bin and .idx file; several with a weight before each."""
    split: str = "969,30,1"
    """Shares of the documents for training, validation and test."""
    tokenizer_type: Annotated[str | None, _unset("required", "STR")] = None
    """Megatron's name: GPTSentencePieceTokenizer, SentencePieceTokenizer or NullTokenizer."""
    tokenizer_model: Annotated[Path | None, _unset("none", "PATH")] = None
    """File of the tokenizer."""
    vocab_size: Annotated[int | None, _unset("the tokenizer's")] = None
    """Entries before padding."""
    data_cache_path: Annotated[Path | None, _unset("beside the data", "PATH")] = None
    """Folder of the sample indices."""
    eod_mask_loss: bool = False
    """No loss where the input is the end of a document."""


@dataclass(frozen=True)
class LogFlags:
    """Printed lines and traces."""

    log_interval: int = 100
    """Iterations per printed line."""
    peak_tflops: Annotated[float | None, _unset("by GPU name, else measured", "FLOAT")] = None
    """Peak of one rank in TFLOP/s, for the MFU."""
    profile: bool = False
    """Write a torch profiler trace."""
    profile_step_start: int = 10
    """First traced iteration."""
    profile_step_end: int = 12
    """First iteration that is no longer traced."""
    profile_dir: Path = Path("profile")
    """Folder of the traces."""
    record_timeline: Annotated[Path | None, _unset("none", "PATH")] = None
    """File for the measured timeline of the last iteration, in the simulator's format."""
    profile_schedule_start: Annotated[int | None, _unset("never")] = None
    """First iteration whose passes are timed."""
    profile_schedule_end: Annotated[int | None, _unset("three iterations later")] = None
    """First iteration whose passes are no longer timed."""
    schedule_costs: Annotated[Path | None, _unset("not saved", "PATH")] = None
    """File for the measured costs of passes, for --measured-costs or tools/simulate.py."""
    replan: bool = False
    """Make the plan anew from the measured costs, and go on with it."""
    dry_run: bool = False
    """Only say what would run: the plan, its time, its memory. Needs no ranks, devices or data."""
    dry_run_gpu: Annotated[str | None, _unset("A100", "NAME")] = None
    """With --dry-run: the GPU to predict for."""


@dataclass(frozen=True)
class Flags:
    """Pretrain GPT with vocabulary parallelism in pipeline parallelism."""

    model: ModelFlags
    parallel: ParallelFlags
    pipeline: PipelineFlags
    train: TrainFlags
    optimizer: OptimizerFlags
    data: DataFlags
    log: LogFlags
