"""Layouts that others published and trained dense GPTs with: 40 of 8 to 1,024 GPUs.

Every layout is a command line of this project with its number of GPUs. Its source says the model,
the batch, the layout and the GPU. Optimizer states are sharded, layers computed again and gradients
kept in bf16 only where a source says so. A micro batch that no source says is 1. Layouts with
sharded weights (FSDP, ZeRO-3) are no layouts of this project.
"""

from functools import cache
from math import prod
from typing import Final, NamedTuple

from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig

SC21: Final = "arXiv 2104.04473, table 1"
SELECTIVE: Final = "arXiv 2205.05198, table 5"
MEGASCALE: Final = "arXiv 2402.15627, table 2: its Megatron-LM baseline"
README: Final = "Megatron-LM README, model table of 2024"
SCRIPT: Final = "NVIDIA/Megatron-LM, {}"
VOCABULARY: Final = "arXiv 2411.05288, table {}: peak of {} GiB published"
LAUNCHER: Final = "NVIDIA/NeMo-Framework-Launcher, conf/training/{}.yaml"
RECIPE: Final = "NVIDIA/NeMo, scripts/performance: model_configs_h100.csv, bf16; gradients in bf16"
SUMMARY: Final = (
    "NVIDIA/NeMo, performance_summary.md, container 24.07, 8 bits; bf16 gradients assumed"
)
BLOOM: Final = "BLOOM-176B launch list; BigScience's model page: 60 GB on each GPU published"

WHOLE: Final = " --recompute-granularity full --recompute-method uniform"
SELECTED: Final = " --sequence-parallel --recompute-activations"
ZERO: Final = " --use-distributed-optimizer"
SHARDED: Final = " --sequence-parallel" + ZERO
NARROW_GRADIENTS: Final = " --use-precision-aware-optimizer --main-grads-dtype bf16"
LAST_AND_FIRST: Final = (
    " --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
)


class PublicLayout(NamedTuple):
    """A published layout.

    Attributes:
        name: the model and the GPUs in a few words.
        source: where it is published, and what its source leaves out.
        gpu: as in ``GPUS``.
        gpus: of the whole job.
        flags: of ``pretrain_gpt.py``, without those of a dry run.
    """

    name: str
    source: str
    gpu: str
    gpus: int
    flags: str


def gpt(layers: int, hidden: int, heads: int, seq: int = 2048, vocabulary: int = 51200) -> str:
    """Return the flags of a GPT like GPT-3: GELU, learned positions, biases, tied embeddings."""
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--seq-length {seq} --max-position-embeddings {seq} --vocab-size {vocabulary}"
    )


def llama(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, seq: int, vocabulary: int = 32000
) -> str:
    """Return the flags of a Llama: gated SiLU, rotary positions, no biases and no dropout."""
    shared = f" --group-query-attention --num-query-groups {groups}" if groups < heads else ""
    return (
        f"{gpt(layers, hidden, heads, seq, vocabulary)} --ffn-hidden-size {ffn}{shared} --swiglu "
        "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
    )


def nemotron(layers: int, hidden: int, heads: int, groups: int, seq: int = 4096) -> str:
    """Return the flags of a Nemotron: squared ReLU, half of a head rotated, 256,000 entries."""
    shared = f" --group-query-attention --num-query-groups {groups}" if groups < heads else ""
    return (
        f"{gpt(layers, hidden, heads, seq, 256000)}{shared} --squared-relu --disable-bias-linear "
        "--position-embedding-type rope --rotary-percent 0.5 "
        "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
    )


def by(tensor: int, pipeline: int = 1, chunks: int = 1, context: int = 1) -> str:
    """Return the flags of a layout: t, p, model chunks of a pipeline rank, and c."""
    interleaved = f" --num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
    return (
        f" --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} "
        f"--context-parallel-size {context}{interleaved}"
    )


def batch(micro: int, whole: int, precision: str = "bf16") -> str:
    """Return the flags of the micro batch, the global batch and the precision."""
    return f" --micro-batch-size {micro} --global-batch-size {whole} --{precision}"


LLAMA2_7B: Final = llama(32, 4096, 11008, 32, 32, 4096)
LLAMA2_13B: Final = llama(40, 5120, 13824, 40, 40, 4096)
LLAMA2_70B: Final = llama(80, 8192, 28672, 64, 8, 4096)
LLAMA3_8B: Final = llama(32, 4096, 14336, 32, 8, 8192, 128256)
LLAMA3_70B: Final = llama(80, 8192, 28672, 64, 8, 8192, 128256)
LLAMA3_405B: Final = llama(126, 16384, 53248, 128, 8, 8192, 128256)
GPT_22B: Final = gpt(48, 6144, 64)
GPT_175B: Final = gpt(96, 12288, 96)
GPT_530B: Final = gpt(105, 20480, 128)
GPT_1T: Final = gpt(128, 25600, 160)


def _of_megatron() -> tuple[PublicLayout, ...]:
    """Return the rows of Megatron-LM's papers and of its README."""

    def sc21(name: str, gpus: int, flags: str) -> PublicLayout:
        return PublicLayout(f"{name} on {gpus}", SC21, "A100", gpus, flags + WHOLE)

    def selective(name: str, gpus: int, flags: str, again: str) -> PublicLayout:
        how = "whole layers again" if again == WHOLE else "selective"
        return PublicLayout(f"{name} on {gpus}, {how}", SELECTIVE, "A100", gpus, flags + again)

    of_22b = GPT_22B + by(8) + batch(4, 4, "fp16")
    of_175b = GPT_175B + by(8, 8, 3) + batch(1, 64, "fp16")
    of_530b = GPT_530B + by(8, 35, 3) + batch(1, 280, "fp16")
    of_1t = GPT_1T + by(8, 64) + batch(1, 512, "fp16")
    megascale = (
        gpt(96, 12288, 128, vocabulary=64000) + by(8, 8, 6) + batch(1, 768) + " --sequence-parallel"
    )
    unsaid = MEGASCALE + "; micro batch is not published, sequence parallelism is assumed"
    unsaid_here = README + "; micro batch is not published"
    return (
        sc21("1.7B", 32, gpt(24, 2304, 24) + by(1) + batch(16, 512, "fp16")),
        sc21("3.6B", 64, gpt(30, 3072, 32) + by(2) + batch(16, 512, "fp16")),
        sc21("7.5B", 128, gpt(36, 4096, 32) + by(4) + batch(16, 512, "fp16")),
        sc21("18.4B", 256, gpt(40, 6144, 48) + by(8) + batch(8, 1024, "fp16")),
        sc21("39.1B", 512, gpt(48, 8192, 64) + by(8, 2) + batch(4, 1536, "fp16")),
        sc21("76.1B", 1024, gpt(60, 10240, 80) + by(8, 4, 3) + batch(2, 1792, "fp16")),
        selective("22B", 8, of_22b, WHOLE),
        selective("22B", 8, of_22b, SELECTED),
        selective("175B", 64, of_175b, WHOLE),
        selective("175B", 64, of_175b, SELECTED),
        selective("530B", 280, of_530b, WHOLE),
        selective("530B", 280, of_530b, SELECTED),
        selective("1T", 512, of_1t, WHOLE),
        selective("1T", 512, of_1t, SELECTED),
        PublicLayout("175B of MegaScale on 1024", unsaid, "A100", 1024, megascale),
        PublicLayout(
            "1.7B of the README on 48",
            unsaid_here,
            "H100",
            48,
            gpt(24, 2048, 16, 4096, 131072) + by(1) + batch(1, 192) + ZERO,
        ),
        PublicLayout(
            "32B of the README on 384",
            unsaid_here,
            "H100",
            384,
            gpt(48, 7168, 56, 4096, 131072) + by(8) + batch(1, 192) + SHARDED,
        ),
    )


def _of_launch_lists() -> tuple[PublicLayout, ...]:
    """Return the launch lists whose number of GPUs is published, and the runs of 2411.05288."""

    def split(
        table: int, gib: float, gpus: int, flags: str, schedule: str, treatment: str
    ) -> PublicLayout:
        source = VOCABULARY.format(table, gib)
        plan = f" --pipeline-schedule {schedule} --vocab-parallel {treatment}"
        untied = " --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
        words = flags + by(1, gpus) + batch(1, 128, "fp16") + plan + untied
        return PublicLayout(f"{schedule} {treatment} on {gpus}", source, "A100", gpus, words)

    return (
        PublicLayout(
            "175B of Megatron-LM's script on 1024",
            SCRIPT.format("examples/gpt3/train_gpt3_175b_distributed.sh; 1,024 GPUs: README"),
            "A100",
            1024,
            GPT_175B + by(8, 16) + batch(1, 1536, "fp16"),
        ),
        PublicLayout(
            "345M of Megatron-LM's script on 8",
            SCRIPT.format("examples/pretrain_gpt_distributed_with_mp.sh"),
            "A100",
            8,
            gpt(24, 1024, 16, 1024, 50257) + by(2, 2) + batch(4, 16, "fp16") + WHOLE,
        ),
        PublicLayout(
            "BLOOM-176B on 384",
            BLOOM,
            "A100",
            384,
            gpt(70, 14336, 112, vocabulary=250880)
            + " --position-embedding-type alibi --embed-layernorm"
            + by(4, 12)
            + LAST_AND_FIRST
            + batch(2, 2048)
            + WHOLE
            + ZERO,
        ),
        split(5, 27.34, 8, gpt(32, 3072, 24, 4096, 256000), "1f1b", "vocab-1"),
        split(5, 39.92, 16, gpt(48, 4096, 32, 4096, 256000), "1f1b", "vocab-2"),
        split(5, 73.05, 32, gpt(64, 5120, 40, 4096, 256000), "1f1b", "none"),
        split(6, 49.38, 32, gpt(64, 6144, 48, 4096, 256000), "v-half", "vocab-1"),
    )


def _of_nemo() -> tuple[PublicLayout, ...]:
    """Return the layouts of NeMo's launcher, of its recipes and of its performance summary."""

    def launched(name: str, file: str, gpu: str, gpus: int, flags: str) -> PublicLayout:
        return PublicLayout(f"{name} on {gpus}", LAUNCHER.format(file), gpu, gpus, flags + SHARDED)

    def recipe(name: str, gpus: int, flags: str) -> PublicLayout:
        words = flags + SHARDED + NARROW_GRADIENTS
        return PublicLayout(f"{name} on {gpus}", RECIPE, "H100", gpus, words)

    def summed_up(name: str, gpus: int, flags: str) -> PublicLayout:
        words = flags + SHARDED + NARROW_GRADIENTS + " --fp8-format hybrid"
        return PublicLayout(f"{name} on {gpus}, 8 bits", SUMMARY, "H100", gpus, words)

    again = " --recompute-activations"
    return (
        launched("5B", "gpt3/5b", "A100", 128, gpt(24, 4096, 32) + by(1) + batch(4, 2048)),
        launched(
            "20B", "gpt3/20b", "A100", 512, gpt(44, 6144, 48) + by(4) + batch(4, 2048) + again
        ),
        launched(
            "40B", "gpt3/40b", "A100", 1024, gpt(48, 8192, 64) + by(8) + batch(4, 2048) + again
        ),
        launched(
            "175B", "gpt3/175b", "A100", 1024, GPT_175B + by(4, 8, 12) + batch(1, 2048) + again
        ),
        launched("Llama 2 7B", "llama/llama2_7b", "H100", 128, LLAMA2_7B + by(1) + batch(1, 2048)),
        launched(
            "Llama 2 13B", "llama/llama2_13b", "H100", 256, LLAMA2_13B + by(2) + batch(1, 2048)
        ),
        launched(
            "Llama 2 70B",
            "llama/llama2_70b",
            "H100",
            1024,
            LLAMA2_70B + by(4, 4, 20) + batch(1, 2048),
        ),
        recipe("GPT-3 175B", 128, GPT_175B + by(4, 8, 6) + batch(1, 256)),
        recipe(
            "Llama 3.1 405B", 1024, LLAMA3_405B + by(8, 8, 8, 2) + batch(1, 512) + LAST_AND_FIRST
        ),
        recipe("Llama 3 70B", 64, LLAMA3_70B + by(4, 4, 5, 2) + batch(1, 128)),
        recipe("Llama 3 8B", 8, LLAMA3_8B + by(1, context=2) + batch(1, 128)),
        recipe("Nemotron-4 15B", 64, nemotron(32, 6144, 48, 8) + by(2) + batch(2, 256)),
        recipe("Nemotron-4 340B", 256, nemotron(96, 18432, 96, 8) + by(8, 8, 12) + batch(1, 64)),
        summed_up("Llama 2 7B", 8, LLAMA2_7B + by(1) + batch(1, 128)),
        summed_up("Llama 2 13B", 16, LLAMA2_13B + by(1, 4, 10) + batch(1, 128)),
        summed_up("Llama 2 70B", 64, LLAMA2_70B + by(4, 4, 20) + batch(1, 128)),
    )


SOUND: Final = (*_of_megatron(), *_of_launch_lists(), *_of_nemo())


@cache
def config(layout: PublicLayout) -> RunConfig:
    """Return the whole job as a dry run, which needs no GPU, reads it from its command line."""
    words = layout.flags.split()
    sizes = [
        int(words[words.index(f"--{axis}-parallel-size") + 1])
        for axis in ("tensor-model", "pipeline-model", "context")
    ]
    replicas, rest = divmod(layout.gpus, prod(sizes))
    assert not rest, f"{layout.name}: {layout.gpus} GPUs are no multiple of {prod(sizes)}"
    words += ["--train-iters", "1", "--lr", "1e-4", "--dry-run", "--dry-run-gpu", layout.gpu]
    words += ["--dry-run-replicas", str(replicas)]
    return parse(words, world_size=1, speak=False)
