"""OPT: GPT-2's layers with ReLU; row i + 2 of the position table belongs to position i."""

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from megatron.checkpoint.foreign.family import Family, Values
from megatron.checkpoint.foreign.fields import MOST_LAYERS, Fields
from megatron.checkpoint.foreign.layouts import ForeignError, Heads, Layout, Same, Table
from megatron.checkpoint.foreign.plain_layers import named, read_function, written_function
from megatron.model.ownership import (
    FINAL_NORM,
    LAYERS,
    OUTPUT_LAYER,
    POSITION_EMBEDDINGS,
    WORD_EMBEDDINGS,
)
from megatron.model.settings import ModelSettings

_OFFSET: Final = 2
"""Rows of their position table that come before the row of position 0; padding reads row 1."""

_EPSILON: Final = 1e-5
"""Epsilon of all norms, which no field changes."""


class _Rolled(Layout):
    """A table whose first rows are the last rows of ours, where no position reads them."""

    def join(self, theirs: Sequence[Tensor], model: ModelSettings) -> Tensor:
        """As in ``Layout``."""
        return theirs[0].roll(-_OFFSET, 0)

    def split(self, ours: Tensor, model: ModelSettings) -> list[Tensor]:
        """As in ``Layout``."""
        return [ours.roll(_OFFSET, 0)]


def _read(c: Fields) -> Values:
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    if hidden % heads:
        raise ForeignError(
            f"{c.origin}: num_attention_heads {heads} does not divide hidden_size {hidden}"
        )
    c.check("do_layer_norm_before", (True,), True)
    c.check("_remove_final_layer_norm", (False,), False)
    c.check("layer_norm_elementwise_affine", (True,), True)
    c.check("layerdrop", (0, 0.0), 0.0)
    if c.whole("word_embed_proj_dim", hidden) != hidden:
        raise c.fault("word_embed_proj_dim", f"hidden_size {hidden}")
    return read_function(c, "activation_function", "relu") | {
        "num_layers": c.whole("num_hidden_layers", most=MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_hidden_size": c.whole("ffn_dim"),
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "max_position_embeddings": c.whole("max_position_embeddings") + _OFFSET,
        "vocab_size": c.whole("vocab_size"),
        "norm_epsilon": _EPSILON,
        "attention_dropout": c.share("attention_dropout", 0.0),
        "hidden_dropout": c.share("dropout", 0.1),
        "init_method_std": c.number("init_std", 0.02),
        "add_bias_linear": c.truth("enable_bias", True),
        "tie_embeddings": c.truth("tie_word_embeddings", True),
    }


def _write(model: ModelSettings) -> Values:
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_dim": model.mlp.ffn_hidden_size,
        "num_attention_heads": model.attention.num_attention_heads,
        "max_position_embeddings": model.positions.max_position_embeddings - _OFFSET,
        "vocab_size": model.vocab_size,
        "activation_function": written_function(model),
        "attention_dropout": model.attention.attention_dropout,
        "dropout": model.block.hidden_dropout,
        "init_std": model.init_method_std,
        "enable_bias": model.block.add_bias_linear,
        "tie_word_embeddings": model.vocabulary.tie_embeddings,
    }


_LAYER: Final = "model.decoder.layers.{}"
_ATTENTION: Final = f"{_LAYER}.self_attn"
_TABLE: Final[Table] = {
    WORD_EMBEDDINGS: Same("model.decoder.embed_tokens.weight"),
    f"{POSITION_EMBEDDINGS}.weight": _Rolled("model.decoder.embed_positions.weight"),
    OUTPUT_LAYER: Same("lm_head.weight"),
    **named(
        {
            f"{LAYERS}input_layernorm": f"{_LAYER}.self_attn_layer_norm",
            f"{LAYERS}self_attention.linear_proj": f"{_ATTENTION}.out_proj",
            f"{LAYERS}pre_mlp_layernorm": f"{_LAYER}.final_layer_norm",
            f"{LAYERS}mlp.linear_fc1": f"{_LAYER}.fc1",
            f"{LAYERS}mlp.linear_fc2": f"{_LAYER}.fc2",
            FINAL_NORM: "model.decoder.final_layer_norm",
        }
    ),
    **{
        f"{LAYERS}self_attention.linear_qkv.{kind}": Heads(
            *(f"{_ATTENTION}.{part}_proj.{kind}" for part in "qkv")
        )
        for kind in ("weight", "bias")
    },
}

OPT: Final = Family(
    "opt", "opt", "OPTForCausalLM", "model.", _TABLE, _read, _write, unread_positions=_OFFSET
)
