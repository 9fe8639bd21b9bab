"""The models of docs/reference/published_2026.csv: their sizes as flags of this project.

Sizes are those of the models' own configurations (``config.json`` of Llama, Qwen3, GPT-OSS,
DeepSeek-V3, Kimi-K2 and Mixtral on Hugging Face; NeMo's configurations of GPT-3, Nemotron and
Grok-1). A test compares their FLOPs with the TFLOP/s that the sources give.
"""

import re
from dataclasses import dataclass
from typing import Final

_MODERN: Final = "--disable-bias-linear --position-embedding-type rope --normalization RMSNorm "
_UNTIED: Final = "--untie-embeddings-and-output-weights "
_LATENT: Final = (
    f"{_MODERN}{_UNTIED}--swiglu --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 "
    "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --num-layers 61 "
    "--hidden-size 7168 --ffn-hidden-size 18432 --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 "
    "--moe-router-score-function sigmoid --moe-router-dtype fp32 "
)


def _gpt3(layers: int, hidden: int, heads: int) -> str:
    return f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "


def _grouped(heads: int, groups: int) -> str:
    shared = f"--group-query-attention --num-query-groups {groups} " if groups < heads else ""
    return f"--num-attention-heads {heads} {shared}"


def _llama(layers: int, hidden: int, ffn: int, heads: int, groups: int) -> str:
    return (
        f"{_MODERN}{_UNTIED}--swiglu --num-layers {layers} --hidden-size {hidden} "
        f"--ffn-hidden-size {ffn} {_grouped(heads, groups)}"
    )


def _nemotron(layers: int, hidden: int, heads: int, groups: int) -> str:
    return (
        "--disable-bias-linear --position-embedding-type rope --rotary-percent 0.5 "
        f"{_UNTIED}--squared-relu --num-layers {layers} --hidden-size {hidden} "
        f"--ffn-hidden-size {4 * hidden} {_grouped(heads, groups)}"
    )


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, groups: int) -> str:
    return f"{_llama(layers, hidden, ffn, heads, groups)}--kv-channels 128 --qk-layernorm "


def _experts(number: int, chosen: int, ffn: int) -> str:
    return (
        f"--num-experts {number} --moe-router-topk {chosen} --moe-ffn-hidden-size {ffn} "
        "--moe-router-dtype fp32 "
    )


@dataclass(frozen=True)
class SharedModel:
    """A model of the published iterations.

    Attributes:
        family: models of one family are left out together when constants are validated.
        flags: its sizes, without sequence and vocabulary.
        layers: transformer layers.
        mixture: whether it has experts.
    """

    family: str
    flags: str
    layers: int
    mixture: bool = False


_LLAMA_8B: Final = _llama(32, 4096, 14336, 32, 8)
_LLAMA_70B: Final = _llama(80, 8192, 28672, 64, 8)
_GPT_OSS: Final = (
    f"{_MODERN}{_UNTIED}--hidden-size 2880 --kv-channels 64 {_grouped(64, 8)}--add-qkv-bias "
    "--quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1 --softmax-type learnable "
    "--window-size 128,0 --window-attn-skip-freq 2 "
)

_MODELS: Final = (
    (r"LLAMA2-7B", SharedModel("Llama 7B", _llama(32, 4096, 11008, 32, 32), 32)),
    (r"LLAMA2-13B", SharedModel("Llama 13B", _llama(40, 5120, 13824, 40, 40), 40)),
    (r"LLAMA2-70B", SharedModel("Llama 70B", _LLAMA_70B, 80)),
    (r"LLAMA-?3(\.1)?[-_ ]8B", SharedModel("Llama 8B", _LLAMA_8B, 32)),
    (r"LLAMA-?3(\.1)?[-_ ]70B", SharedModel("Llama 70B", _LLAMA_70B, 80)),
    (
        r"LLAMA-?3(\.1)?[-_ ]405B",
        SharedModel("Llama 405B", _llama(126, 16384, 53248, 128, 8), 126),
    ),
    (r"GPT3-175B", SharedModel("GPT-3 175B", _gpt3(96, 12288, 96), 96)),
    (r"GPT3-20B", SharedModel("GPT-3 20B", _gpt3(44, 6144, 48), 44)),
    (r"GPT3-5B", SharedModel("GPT-3 5B", _gpt3(24, 4096, 32), 24)),
    (r"Nemotron-8B", SharedModel("Nemotron 8B", _nemotron(32, 4096, 32, 32), 32)),
    (r"Nemotron-15B", SharedModel("Nemotron 15B", _nemotron(32, 6144, 48, 8), 32)),
    (r"Nemotron-22B", SharedModel("Nemotron 22B", _nemotron(40, 6144, 48, 48), 40)),
    (r"Nemotron-340B", SharedModel("Nemotron 340B", _nemotron(96, 18432, 96, 8), 96)),
    (r"Qwen3-8B", SharedModel("Qwen3 8B", _qwen3(36, 4096, 12288, 32, 8), 36)),
    (
        r"Qwen3.(MoE )?30B",
        SharedModel(
            "Qwen3 30B-A3B",
            f"{_qwen3(48, 2048, 6144, 32, 4)}{_experts(128, 8, 768)}",
            48,
            mixture=True,
        ),
    ),
    (
        r"Qwen3.235B",
        SharedModel(
            "Qwen3 235B-A22B",
            f"{_qwen3(94, 4096, 12288, 64, 4)}{_experts(128, 8, 1536)}",
            94,
            mixture=True,
        ),
    ),
    (
        r"Grok-1 314B",
        SharedModel(
            "Grok-1",
            f"{_llama(64, 6144, 32768, 48, 8)}{_experts(8, 2, 32768)}",
            64,
            mixture=True,
        ),
    ),
    (
        r"Mixtral-8x7B",
        SharedModel(
            "Mixtral 8x7B", f"{_llama(32, 4096, 14336, 32, 8)}{_experts(8, 2, 14336)}", 32, True
        ),
    ),
    (
        r"GPT.OSS 120B",
        SharedModel(
            "GPT-OSS 120B", f"{_GPT_OSS}--num-layers 36 {_experts(128, 4, 2880)}", 36, mixture=True
        ),
    ),
    (
        r"DeepSeekV3|DSV3",
        SharedModel(
            "DeepSeek-V3",
            f"{_LATENT}--num-attention-heads 128 --num-experts 256 "
            "--moe-layer-freq ([0]*3+[1]*58) --mtp-num-layers 1 ",
            61,
            mixture=True,
        ),
    ),
    (
        r"Kimi.K2",
        SharedModel(
            "Kimi K2",
            f"{_LATENT}--num-attention-heads 64 --num-experts 384 --moe-layer-freq ([0]*1+[1]*60) ",
            61,
            mixture=True,
        ),
    ),
)
"""Pattern of a name in the table, and the model."""


def model_of(name: str) -> SharedModel | None:
    """Return the model that the table calls ``name``; ``None``: its sizes are not known here.

    A proxy of another depth has the number of layers that its name says.
    """
    for pattern, model in _MODELS:
        if re.match(pattern, name, re.IGNORECASE):
            return _shortened(_without_further(model, name), name)
    return None


def _shortened(model: SharedModel, name: str) -> SharedModel:
    depth = re.search(r"proxy, (\d+) layers", name)
    if depth is None:
        return model
    flags = model.flags.replace(f"--num-layers {model.layers} ", f"--num-layers {depth[1]} ")
    return SharedModel(model.family, flags, int(depth[1]), model.mixture)


def _without_further(model: SharedModel, name: str) -> SharedModel:
    if "w/o MTP" not in name:
        return model
    flags = model.flags.replace("--mtp-num-layers 1 ", "")
    return SharedModel(model.family, flags, model.layers, model.mixture)
