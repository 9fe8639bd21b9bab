"""Falcon: attention and MLP read the same input, by one norm (7B, 11B) or by two norms (40B, 180B).

The older architecture has one key/value head (``multi_query``) or as many as query heads.
"""

from typing import Any, Final

from megatron.checkpoint.foreign.family import Family, Values
from megatron.checkpoint.foreign.fields import MOST_LAYERS, Fields
from megatron.checkpoint.foreign.layouts import ForeignError, Layout, Same, Table
from megatron.checkpoint.foreign.plain_layers import named, read_function, written_function
from megatron.checkpoint.foreign.rotation import read_rotation, write_rotation
from megatron.model.ownership import FINAL_NORM, LAYERS, OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.model.settings import ModelSettings


class _Norm(Layout):
    """A norm before attention or the MLP, which has another name where there are two norms.

    Args:
        name: its name.
        beside: its name if attention and the MLP have a norm each, and read the same input.
    """

    def __init__(self, name: str, beside: str) -> None:
        super().__init__(name)
        self._beside = beside

    def names_in(self, model: ModelSettings) -> tuple[str, ...]:
        """As in ``Layout``."""
        are_two = model.block.parallel_attn and model.block.parallel_layernorm
        return (self._beside,) if are_two else self.names


def _read(c: Fields) -> Values:
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    if hidden % heads or hidden // heads % 2:
        raise ForeignError(
            f"{c.origin}: num_attention_heads {heads} does not divide hidden_size {hidden} into "
            "even widths, and RoPE turns pairs of channels"
        )
    c.check("alibi", (False,), False)  # its slopes are divided by the root of a head's width
    return (
        _norms(c)
        | read_rotation(c)
        | read_function(c, "activation", "gelu")
        | {
            "num_layers": c.whole("num_hidden_layers", most=MOST_LAYERS),
            "hidden_size": hidden,
            "ffn_hidden_size": c.whole("ffn_hidden_size", 4 * hidden),
            "num_attention_heads": heads,
            "num_query_groups": _groups(c, heads),
            "kv_channels": hidden // heads,
            "max_position_embeddings": c.whole("max_position_embeddings", 2048),
            "vocab_size": c.whole("vocab_size"),
            "norm_epsilon": c.positive("layer_norm_epsilon", 1e-5),
            "add_bias_linear": c.truth("bias", False),
            "attention_dropout": c.share("attention_dropout", 0.0),
            "hidden_dropout": c.share("hidden_dropout", 0.0),
            "init_method_std": c.number("initializer_range", 0.02),
            "tie_embeddings": c.truth("tie_word_embeddings", True),
        }
    )


def _groups(c: Fields, heads: int) -> int:
    is_new = c.truth("new_decoder_architecture", False)
    groups = c.whole("num_kv_heads", heads)
    if heads % groups:
        raise c.fault("num_kv_heads", f"a divisor of num_attention_heads {heads}")
    if is_new:
        return groups
    if c.truth("multi_query", True):
        return 1
    if groups != heads:
        raise c.fault("num_kv_heads", f"num_attention_heads {heads}, without multi_query")
    return heads


def _norms(c: Fields) -> Values:
    """Return whether both branches read the same input, and whether they have a norm each."""
    is_new, is_parallel = c.truth("new_decoder_architecture", False), c.truth("parallel_attn", True)
    number: Any = c.any("num_ln_in_parallel_attn", 2 if is_new else 1)
    if is_new and not is_parallel:
        raise c.fault("parallel_attn", "true, as new_decoder_architecture needs it")
    if type(number) is not int or number not in ((1, 2) if is_new else (1,)):
        wanted = "1 or 2" if is_new else "1, as new_decoder_architecture is false"
        raise c.fault("num_ln_in_parallel_attn", wanted)
    return {"parallel_attn": is_parallel, "parallel_layernorm": is_parallel and number == 2}


def _write(model: ModelSettings) -> Values:
    block, attention = model.block, model.attention
    groups, heads = attention.num_query_groups, attention.num_attention_heads
    is_new = block.parallel_layernorm or groups not in (1, heads)
    positions = max(model.positions.max_position_embeddings, model.seq_length)
    if model.rope_scaling.rope_type == "dynamic":
        positions = model.rope_scaling.original_max_position_embeddings
    return write_rotation(model) | {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.mlp.ffn_hidden_size,
        "num_attention_heads": heads,
        "num_kv_heads": groups,
        "new_decoder_architecture": is_new,
        "multi_query": groups == 1 and not is_new,
        "parallel_attn": block.parallel_attn,
        "num_ln_in_parallel_attn": 2 if block.parallel_layernorm else 1,
        "max_position_embeddings": positions,
        "vocab_size": model.vocab_size,
        "activation": written_function(model),
        "layer_norm_epsilon": model.norm.norm_epsilon,
        "bias": block.add_bias_linear,
        "attention_dropout": attention.attention_dropout,
        "hidden_dropout": block.hidden_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": model.vocabulary.tie_embeddings,
    }


_LAYER: Final = "transformer.h.{}"
_TABLE: Final[Table] = {
    WORD_EMBEDDINGS: Same("transformer.word_embeddings.weight"),
    OUTPUT_LAYER: Same("lm_head.weight"),
    **named(
        {
            f"{LAYERS}self_attention.linear_qkv": f"{_LAYER}.self_attention.query_key_value",
            f"{LAYERS}self_attention.linear_proj": f"{_LAYER}.self_attention.dense",
            f"{LAYERS}mlp.linear_fc1": f"{_LAYER}.mlp.dense_h_to_4h",
            f"{LAYERS}mlp.linear_fc2": f"{_LAYER}.mlp.dense_4h_to_h",
            FINAL_NORM: "transformer.ln_f",
        }
    ),
    **{
        f"{LAYERS}{ours}.{kind}": _Norm(f"{_LAYER}.{name}.{kind}", f"{_LAYER}.{beside}.{kind}")
        for ours, name, beside in (
            ("input_layernorm", "input_layernorm", "ln_attn"),
            ("pre_mlp_layernorm", "post_attention_layernorm", "ln_mlp"),
        )
        for kind in ("weight", "bias")
    },
}

FALCON: Final = Family(
    "falcon",
    "falcon",
    "FalconForCausalLM",
    "transformer.",
    _TABLE,
    _read,
    _write,
    aliases={"n_embed": "hidden_size"},
)
