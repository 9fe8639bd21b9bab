"""Passes as CUDA graphs: time and memory of every kind of model that allows them, with and without.

Passes are short here, so that their host decides the time of an iteration without graphs. Both ways
train the same weights on the same tokens, and must come to the same losses.
"""

from dataclasses import replace
from typing import Final

import torch

from megatron.run.command_line import parse
from megatron.simulator.costs.gpus import GIB
from tools.gpu_sections.predicted import Measured, train_some
from tools.gpu_sections.timing import Scale, Section, in_a_line, reason, table

WITHIN: Final = 1e-3
"""Of its size a loss may differ: kernels of attention may add gradients in any order."""

_LLAMA: Final = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 4"
)
_LATENT: Final = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 64 "
    "--qk-pos-emb-head-dim 32 --v-head-dim 64 --qk-layernorm --rope-type rope"
)

_EXPERTS: Final = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256"

MODELS: Final[dict[str, str]] = {
    "GPT": "",
    "Llama": _LLAMA,
    "Llama, W apart (zb-h1)": f"{_LLAMA} --pipeline-schedule zb-h1",
    "Llama, layers computed again": (
        f"{_LLAMA} --recompute-granularity full --recompute-method uniform"
    ),
    "wide residual stream": f"{_LLAMA} --fp32-residual-connection",
    "latent attention": _LATENT,
    "sinks, windows": (
        f"{_LLAMA} --window-size 128,0 --window-attn-skip-freq 2 --softmax-type learnable"
    ),
    "capped scores and logits": f"{_LLAMA} --attn-logit-softcapping 50 --logit-softcap 30",
    "squared ReLU": "--squared-relu",
    "further tokens": f"{_LLAMA} --mtp-num-layers 1",
    "mixture of experts": f"{_LLAMA} {_EXPERTS} --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001",
    "mixture, W apart (zb-h1)": f"{_LLAMA} {_EXPERTS} --pipeline-schedule zb-h1",
    "mixture with capacities": (
        f"{_LLAMA} {_EXPERTS} --moe-expert-capacity-factor 1.25 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    ),
    "8 bits, delayed": f"{_LLAMA} --fp8-format hybrid",
    "8 bits, tensorwise, W apart (zb-h1)": (
        f"{_LLAMA} --fp8-format hybrid --fp8-recipe tensorwise --pipeline-schedule zb-h1"
    ),
    "8 bits, blockwise": f"{_LLAMA} --fp8-format e4m3 --fp8-recipe blockwise",
    "positions from documents": "--position-embedding-type rope --reset-position-ids",
}
"""Flags of every kind of model whose passes differ in what they launch."""

_LARGE: Final = (
    "--hidden-size 1024 --num-attention-heads 16 --num-layers 8 --seq-length 1024 "
    "--vocab-size 32000"
)
_SMALL: Final = (
    "--hidden-size 64 --num-attention-heads 4 --num-layers 2 --seq-length 32 --vocab-size 250"
)
_COMMON: Final = (
    "--micro-batch-size 1 --global-batch-size 4 --bf16 --lr 1e-4 --train-iters 5 --mock-data "
    "--attention-dropout 0 --hidden-dropout 0"
)

_HEAD: Final = (
    "model", "launched one by one, ms", "replayed, ms", "one by one / replayed", "reserved, GiB",
    "with graphs, GiB", "slots", "largest difference of a loss",
)  # fmt: skip


def measure(scale: Scale) -> Section:
    """Train every model both ways.

    Raises:
        RuntimeError: if no model was trained.
    """
    rows: list[tuple[object, ...]] = []
    failed: dict[str, str] = {}
    for name, flags in MODELS.items():
        try:
            rows.append((name, *_row(scale, flags)))
            print(in_a_line(rows[-1]), flush=True)
        except Exception as error:  # whatever it is, the others go on
            failed[name] = reason(error)
            print(f"{name}: failed: {failed[name]}", flush=True)
        scale.forget_peak()
    if not rows:
        raise RuntimeError(f"no model was trained: {failed}")
    bad = [str(row[0]) for row in rows if not float(str(row[-1])) <= WITHIN]
    said = [
        f"`{_SMALL if scale.small else _LARGE} {_COMMON}`; the iteration has 4 microbatches and "
        f"the step. Losses that differ by more than {WITHIN:g}: {', '.join(bad) or 'none'}.",
    ]
    if not captures(scale):
        said += ["", "A CPU captures nothing: both ways are the same."]
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        said += ["", f"**Failed: {reasons}.**"]
    values = {
        "rows": [dict(zip(_HEAD, row, strict=True)) for row in rows],
        "not within": bad,
        "failed": failed,
    }
    return Section([*said, "", *table(_HEAD, rows)], values)


def captures(scale: Scale) -> bool:
    """Return whether passes are captured here."""
    return scale.device.type == "cuda"


def _row(scale: Scale, flags: str) -> tuple[object, ...]:
    plain, replayed = (_trained(scale, flags, captured=own) for own in (False, True))
    if captures(scale) and not replayed.graph_slots:
        raise RuntimeError("no pass was captured, so that nothing is said of graphs")
    off = max(
        abs(one - other) / abs(one)
        for one, other in zip(plain.losses, replayed.losses, strict=True)
    )
    return (
        1e3 * plain.iteration,
        1e3 * replayed.iteration,
        plain.iteration / replayed.iteration,
        plain.reserved / GIB,
        replayed.reserved / GIB,
        replayed.graph_slots,
        f"{off:.1e}",
    )


def _trained(scale: Scale, flags: str, *, captured: bool) -> Measured:
    """Train a model from the same weights on the same tokens.

    Raises:
        ValueError: if the model allows no graphs.
    """
    torch.manual_seed(1234)
    size = _SMALL if scale.small else _LARGE
    config = parse(f"{size} {_COMMON} {flags} --device {scale.device.type}".split(), 1, speak=False)
    if not config.train.could_capture:
        raise ValueError("the model allows no graphs")
    own = replace(config.train, captures_passes=captured and captures(scale))
    return train_some(scale, replace(config, train=own))
