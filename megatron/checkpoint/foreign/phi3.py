"""Phi-3 and Phi-4: Llama with one matrix for queries, keys and values, and one for gate and up."""

from typing import Final

from megatron.checkpoint.foreign.family import (
    Values,
    llama_like,
    sizes,
    windows,
    written_sizes,
    written_window,
)
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import Heads, InOne, Same, Table
from megatron.checkpoint.foreign.llama import NORMS, check_head_width
from megatron.checkpoint.foreign.plain_layers import read_dropout
from megatron.checkpoint.foreign.rotation import read_rotation, scaling_of, write_rotation
from megatron.model.ownership import LAYERS
from megatron.model.settings import ModelSettings

_EPSILON: Final = 1e-5
_LENGTH: Final = 4096
"""Tokens of a sample in the original training, if a file does not tell them."""


def _read(c: Fields) -> Values:
    c.check("hidden_act", ("silu", "swish"), "silu")
    given = {"rms_norm_eps": _EPSILON, "original_max_position_embeddings": _LENGTH} | dict(c.all)
    filled, scaling = Fields(given, c.origin), scaling_of(c)
    if scaling is not None:  # transformers has no other kinds in this family
        kind = scaling.any("rope_type", scaling.any("type", "default"))
        Fields({"rope_type": kind}, scaling.origin).check("rope_type", ("default", "longrope"))
        if kind == "longrope":  # transformers counts the factors by hidden_size and heads alone
            check_head_width(c, "Phi-3 with longrope")
    common = sizes(filled)
    size = c.whole_or_none("sliding_window", None)
    return (
        common
        | read_rotation(filled, share=1.0)
        | read_dropout(c, "resid_pdrop", "embd_pdrop", 0.0)
        | windows(Fields({}, c.origin), size, [1] * common["num_layers"])
        | {"activation": "swiglu", "tie_embeddings": c.truth("tie_word_embeddings", False)}
    )


def _write(model: ModelSettings) -> Values:
    dropout = model.block.hidden_dropout
    written = written_sizes(model) | write_rotation(model)
    scaling = written.get("rope_scaling", {})
    return written | {
        "hidden_act": "silu",
        "partial_rotary_factor": model.positions.rotary_percent,
        "original_max_position_embeddings": scaling.get(
            "original_max_position_embeddings", _LENGTH
        ),
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "sliding_window": written_window(model),
        "pad_token_id": None,  # by default a token that smaller vocabularies lack
    }


_LAYER: Final = "model.layers.{}"
_TABLE: Final[Table] = {
    f"{LAYERS}self_attention.linear_qkv.weight": InOne(
        f"{_LAYER}.self_attn.qkv_proj.weight", Heads("q", "k", "v")
    ),
    f"{LAYERS}mlp.linear_fc1.weight": Same(f"{_LAYER}.mlp.gate_up_proj.weight"),
}

PHI3: Final = llama_like("phi3", "Phi3", NORMS, _read, _write, more=_TABLE)
