"""The flags a user can give, in Megatron's flat names with Megatron's defaults.

Each class is a group of the help text. ``None`` means "not given": what it stands for is decided in
``arguments``, what is allowed in ``validate``. Nothing below the entrypoint sees these classes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron.training.config import PipelineSchedule, VocabParallel


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
    pipeline_schedule: PipelineSchedule = "1f1b"
    """Building block of the pipeline's plan."""
    vocab_parallel: Annotated[VocabParallel | None, _unset("none", "{none,vocab-1,vocab-2}")] = None
    """Vocabulary layers as passes of every rank, with two barriers (vocab-1) or one (vocab-2)."""
    enable_vocab_parallel: bool = False
    """The original's name of --vocab-parallel vocab-2."""
    disable_backward_fusion: bool = False
    """With --enable-vocab-parallel: vocab-1."""
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


@dataclass(frozen=True)
class Flags:
    """Pretrain GPT with vocabulary parallelism in pipeline parallelism."""

    model: ModelFlags
    parallel: ParallelFlags
    train: TrainFlags
    optimizer: OptimizerFlags
    data: DataFlags
    log: LogFlags
