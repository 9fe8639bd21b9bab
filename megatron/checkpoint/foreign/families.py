"""The families of Hugging Face's models that can be converted, and the choice among them."""

from collections.abc import Mapping
from typing import Final

from megatron.checkpoint.foreign.bloom import BLOOM
from megatron.checkpoint.foreign.cohere import COHERE2
from megatron.checkpoint.foreign.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2
from megatron.checkpoint.foreign.dots import DOTS1
from megatron.checkpoint.foreign.ernie import ERNIE4_5
from megatron.checkpoint.foreign.falcon import FALCON
from megatron.checkpoint.foreign.family import EXPERTS, Family
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.gemma import GEMMA, GEMMA2, GEMMA3
from megatron.checkpoint.foreign.glm import GLM, GLM4, GLM4_MOE
from megatron.checkpoint.foreign.gpt2 import GPT2
from megatron.checkpoint.foreign.gpt_neox import GPT_NEOX
from megatron.checkpoint.foreign.gpt_oss import GPT_OSS
from megatron.checkpoint.foreign.granite import GRANITE, GRANITE_MOE
from megatron.checkpoint.foreign.hunyuan import HUNYUAN
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.checkpoint.foreign.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from megatron.checkpoint.foreign.minimax import MINIMAX_M2
from megatron.checkpoint.foreign.mixtures import MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from megatron.checkpoint.foreign.nemotron import NEMOTRON
from megatron.checkpoint.foreign.olmo import OLMO2, OLMO3
from megatron.checkpoint.foreign.opt import OPT
from megatron.checkpoint.foreign.phi3 import PHI3
from megatron.checkpoint.foreign.smollm3 import SMOLLM3
from megatron.checkpoint.foreign.starcoder2 import STARCODER2
from megatron.model.ownership import LAYERS
from megatron.model.settings import ModelSettings

FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        *(GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3),
        *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS),
        *(OLMO2, OLMO3, PHI3, GPT_NEOX, GRANITE, SMOLLM3, FALCON, STARCODER2, OPT, BLOOM),
        *(COHERE2, GLM4, GLM, GLM4_MOE, NEMOTRON, GRANITE_MOE, ERNIE4_5, DOTS1, KIMI_K2),
        *(MINIMAX_M2, HUNYUAN),
    )
}
"""Families by name; a model that fits several families is written as the first of them."""

_MIXTURES: Final = tuple(
    family for family in FAMILIES.values() if f"{LAYERS}mlp.router.weight" in family.table
)


_LACKING: Final = {
    "ernie4_5_moe": "it adds a bias to the softmax by which tokens choose experts, and this "
    "program adds biases to sigmoids alone",
    "internlm2": "only code in its own folder computes it, and no version of transformers with "
    "which an import could be compared",
    "qwen3_next": "most of its layers have linear attention, which this program lacks",
}
"""Why no model of a kind can be converted, for kinds that people may try."""


def family_of(config: Fields) -> Family:
    """Return the family of a ``config.json``.

    Raises:
        ForeignError: the family is unknown, or the weights are quantised.
    """
    kind = config.any("model_type")
    if isinstance(kind, str) and kind in _LACKING:
        raise ForeignError(
            f"{config.origin}: model_type {kind} cannot be converted: {_LACKING[kind]}"
        )
    found = next((one for one in FAMILIES.values() if one.model_type == kind), None)
    experts = [f"{n} {config.any(n)}" for n in EXPERTS if n in config and config.any(n) != 1]
    if (found is None and "moe" in str(kind)) or (experts and found not in _MIXTURES):
        told = f" ({experts[0]})" if experts else ""
        raise ForeignError(
            f"{config.origin}: a {kind} is a mixture of experts{told}, of which only "
            f"{', '.join(one.model_type for one in _MIXTURES)} can be converted"
        )
    if "quantization_config" in config:
        raise ForeignError(f"{config.origin}: the weights are quantised{_way_out(config)}")
    if found is None:
        known = ", ".join(one.model_type for one in FAMILIES.values())
        inner = config.part("text_config") if "text_config" in config else None
        hint = (
            f"; of a model with images too, save the {inner.any('model_type', 'text')} part alone"
            if inner is not None
            else ""
        )
        raise ForeignError(
            f"{config.origin}: model_type {str(kind)[:40]!r} is none of {known}{hint}"
        )
    return found


def _way_out(config: Fields) -> str:
    quantised = config.part("quantization_config")
    if quantised is not None and quantised.any("quant_method", None) == "mxfp4":
        return (
            " (MXFP4): let transformers make bf16 of them, by from_pretrained(..., "
            "quantization_config=Mxfp4Config(dequantize=True)) and save_pretrained, and convert "
            "that folder"
        )
    return ": convert those that they were made of"


def family_for(model: ModelSettings) -> Family:
    """Return the first family that can describe a model.

    Raises:
        ForeignError: no family can; the message says how the closest family differs.
    """
    faults = []
    for family in FAMILIES.values():
        try:
            family.config_of(model)
        except ForeignError as error:
            faults.append(str(error))
        else:
            return family
    closest = min(faults, key=len)
    raise ForeignError(f"no family has such models; the closest one: {closest}")
