"""Ernie 4.5 (dense): Llama that turns neighbouring channels together, with one field for biases."""

from typing import Final

from megatron.checkpoint.foreign.family import Values, llama_like
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.llama import NORMS, common_fields, written_fields
from megatron.model.settings import ModelSettings

_BASE: Final = 500_000


def _read(c: Fields) -> Values:
    given = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True} | dict(c.all)
    if "head_dim" not in given:
        given["head_dim"] = 128
    common = common_fields(Fields(given, c.origin), groups=2, base=_BASE)
    return common | {
        "rotary_interleaved": True,
        "add_bias_linear": c.truth("use_bias", False),
    }


def _write(model: ModelSettings) -> Values:
    return written_fields(model) | {"use_bias": model.block.add_bias_linear}


ERNIE4_5: Final = llama_like("ernie4_5", "Ernie4_5", NORMS, _read, _write)
