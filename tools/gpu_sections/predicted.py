"""Models of several kinds train on one GPU beside what a dry run predicts of their time and memory.

A dry run's times of launches come from machines that others have measured. Here they meet this one.
"""

from statistics import median
from typing import Final, NamedTuple

import torch

from megatron.data.microbatch import Microbatch
from megatron.parallel.groups import single_rank
from megatron.planning.forecast_run import forecast_run
from megatron.planning.run_plan import make_run_plan
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.runtime.batch import to_device
from megatron.simulator.costs.gpus import GIB, Gpu, gpu_of_driver
from megatron.training.metrics.peak_memory import peak_memory
from megatron.training.setup import build_train_state
from megatron.training.warm_up import warm_up
from tools.benchmarking.case import microbatch_of
from tools.benchmarking.run import recorded_step
from tools.gpu_sections.timing import Scale, Section, table

WARM_UPS: Final = 2
ITERATIONS: Final = 3

_GPT: Final = "--hidden-size 2048 --num-attention-heads 16 --num-layers 8"
_LLAMA: Final = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-size 4096 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --ffn-hidden-size 14336"
)
_EXPERTS: Final = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--hidden-size 2048 --num-attention-heads 16 --num-layers 4 --num-experts 16 "
    "--moe-router-topk 4 --moe-ffn-hidden-size 1024 --moe-router-dtype fp32"
)

_GPT_32K: Final = f"{_GPT} --seq-length 2048 --vocab-size 32000"
_GPT_256K: Final = f"{_GPT} --seq-length 2048 --vocab-size 256000"
_LLAMA_4K: Final = f"{_LLAMA} --num-layers 4 --seq-length 4096 --vocab-size 128000"
_LLAMA_32K: Final = f"{_LLAMA} --num-layers 2 --seq-length 32768 --vocab-size 32000"
_AGAIN: Final = "--recompute-granularity full --recompute-method uniform"

MODELS: Final[dict[str, str]] = {
    "GPT 2048, 32k": _GPT_32K,
    "the same, its passes replayed": f"{_GPT_32K} --cuda-graph-impl local",
    "GPT 2048, 256k": _GPT_256K,
    "GPT 2048, 256k, logits formed again": f"{_GPT_256K} --vocab-recompute",
    "Llama 4096, 128k": _LLAMA_4K,
    "the same in 8 bits": f"{_LLAMA_4K} --fp8-format hybrid --fp8-recipe tensorwise",
    "the same in 8 bits, by blocks": f"{_LLAMA_4K} --fp8-format e4m3 --fp8-recipe blockwise",
    "the same in 16 bits, layers computed again": f"{_LLAMA_4K} {_AGAIN}",
    "Llama 4096, sequences of 32k": _LLAMA_32K,
    "the same in 4 slices": f"{_LLAMA_32K} --num-seq-splits 4",
    "16 experts": f"{_EXPERTS} --seq-length 4096 --vocab-size 128000",
}
"""Flags of every model that a GPU trains."""

_COMMON: Final = (
    "--micro-batch-size 1 --global-batch-size 4 --bf16 --lr 1e-4 --train-iters 5 --mock-data "
    "--attention-dropout 0 --hidden-dropout 0 --device cuda"
)
_SMALL: Final = (
    "--hidden-size 64 --num-attention-heads 4 --num-layers 2 --seq-length 32 --vocab-size 250 "
    f"{_COMMON.replace('cuda', 'cpu')}"
)


def flags_of(model: str) -> str:
    """Return the flags of a model, without a device."""
    return f"{MODELS[model]} {_COMMON}".replace(" --device cuda", "")


class Measured(NamedTuple):
    """What a model took.

    Attributes:
        iteration: seconds of an iteration.
        step: seconds of the optimizer's step within.
        memory: bytes of tensors at the peak.
        reserved: bytes of PyTorch's allocator at the peak; on a CPU as ``memory``.
        losses: of all iterations.
        graph_slots: slots of captured passes.
    """

    iteration: float
    step: float
    memory: int
    reserved: int
    losses: list[float]
    graph_slots: int


def measure(scale: Scale) -> Section:
    """Train every model for some iterations, and predict the same."""
    models = {"small": _SMALL} if scale.small else {n: f"{f} {_COMMON}" for n, f in MODELS.items()}
    name = torch.cuda.get_device_name() if scale.device.type == "cuda" else "A100"
    gpu = gpu_of_driver(name)
    if gpu is None:
        return Section([f"No data sheet of {name} is known, so nothing can be predicted."], {})
    found = {model: _row(scale, flags, gpu) for model, flags in models.items()}
    head = (
        "model",
        "iteration, ms",
        "predicted",
        "off by",
        "its step, ms",
        "predicted",
        "peak, GiB",
        "predicted",
        "off by",
    )
    keys = ("iteration", "predicted", "off", "step", "step predicted", "memory", "counted", "more")
    said = f"4 microbatches of one sample, bf16; predicted for {gpu.name} as a dry run does."
    values = {model: dict(zip(keys, row, strict=True)) for model, row in found.items()}
    rows = [(model, *row) for model, row in found.items()]
    return Section([said, "", *table(head, rows)], values)


def _row(scale: Scale, flags: str, gpu: Gpu) -> tuple[object, ...]:
    config = parse(flags.split(), 1, speak=False)
    forecast = forecast_run(config, make_run_plan(config), gpu)
    seconds, [counted] = forecast.outcome.seconds, forecast.outcome.peak
    own = forecast.outcome.step
    try:
        found = train_some(scale, config)
    except torch.cuda.OutOfMemoryError:
        return ("out of memory", 1e3 * seconds, "", "", 1e3 * own, "", counted / GIB, "")
    return (
        1e3 * found.iteration,
        1e3 * seconds,
        f"{seconds / found.iteration - 1:+.1%}",
        1e3 * found.step,
        1e3 * own,
        found.memory / GIB,
        counted / GIB,
        f"{counted / found.memory - 1:+.2%}",
    )


def train_some(scale: Scale, config: RunConfig) -> Measured:
    """Train a model on one rank for some iterations, on random tokens."""
    before = _held_now(scale)
    reserved = torch.cuda.memory_reserved(scale.device) if scale.device.type == "cuda" else before
    state = build_train_state(config, single_rank(scale.device), make_run_plan(config))
    if config.train.captures_passes:
        warm_up(config, state)  # no kernel may be loaded while passes are captured
    batch = to_device(_batch(config), scale.device)
    wholes, steps, losses = [], [], []
    for iteration in range(WARM_UPS + ITERATIONS):
        taken, _ = recorded_step(state, batch, iteration)
        wholes.append(taken["schedule"] + taken["update"])
        steps.append(taken["update"])
        losses.append(taken["loss"])
    peak, slots = peak_memory(scale.device), state.pipeline.graph_slots
    state.close()
    return Measured(
        median(wholes[WARM_UPS:]),
        median(steps[WARM_UPS:]),
        peak.held - before,
        (peak.held if peak.reserved is None else peak.reserved) - reserved,
        losses,
        slots,
    )


def _held_now(scale: Scale) -> int:
    """Forget the peak, and return the bytes that are held: hooks of an earlier model keep some.

    Workspaces of cuBLAS are given back, so that every model has its own.
    """
    on_gpu = scale.device.type == "cuda"
    if on_gpu:
        torch._C._cuda_clearCublasWorkspaces()
    scale.forget_peak()
    return torch.cuda.memory_allocated(scale.device) if on_gpu else 0


def _batch(config: RunConfig) -> list[Microbatch]:
    """Return random tokens."""
    b, s = config.train.micro_batch_size, config.model.seq_length
    count = config.train.num_microbatches
    drawn = (torch.randint(config.model.vocab_size, (b, s + 1)) for _ in range(count))
    return list(map(microbatch_of, drawn))
