"""Families of Hugging Face's models: tensor names, and ``config.json`` as fields of our model.

"Our" names and fields belong to this program, "their" names and fields to Hugging Face.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from megatron.checkpoint.foreign.fields import MOST_LAYERS, Fields
from megatron.checkpoint.foreign.layouts import ForeignError, Halves, Heads, Same, Table
from megatron.model.config import ModelConfig, Pattern
from megatron.model.ownership import (
    FINAL_NORM,
    LAYERS,
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
)

Values = dict[str, Any]
"""Fields of ``ModelConfig``, or of a ``config.json``, by name."""


@dataclass(frozen=True)
class Family:
    """A family of models, such as Llama.

    Attributes:
        name: name of the family on a command line.
        model_type: ``model_type`` in ``config.json``.
        architecture: name of the class of ``transformers`` that has an output layer.
        base: prefix of all names except the output layer's; files may lack it.
        table: layout of every tensor.
        read: returns the fields of our model except its sequence length.
        write: returns fields of ``config.json`` without checking that the family has such models;
            ``config_of`` checks it.
        ignored: endings of the names of tensors that are not weights.
    """

    name: str
    model_type: str
    architecture: str
    base: str
    table: Table
    read: Callable[[Fields], Values]
    write: Callable[[ModelConfig], Values]
    ignored: tuple[str, ...] = ()

    def model_of(self, config: Fields, seq_length: int | None = None) -> ModelConfig:
        """Return the model of a ``config.json``.

        Args:
            config: fields of ``config.json``.
            seq_length: tokens per sample; ``None``: as many as the model has positions.

        Raises:
            ForeignError: a field is damaged, or has a value that this program does not support.
        """
        values = self.read(config)
        length = values["max_position_embeddings"] if seq_length is None else seq_length
        model = ModelConfig(**values, seq_length=length)
        heads, groups = model.num_attention_heads, model.num_query_groups
        if heads % groups:
            raise ForeignError(f"{config.origin}: {heads} heads do not form {groups} groups")
        return model

    def config_of(self, model: ModelConfig) -> Values:
        """Return the ``config.json`` of a model.

        Raises:
            ForeignError: the family has no such models; the message names the fields that differ.
        """
        try:
            written = self.write(model)
            again = self.model_of(Fields(written, self.name), model.seq_length)
        except ForeignError as error:
            raise ForeignError(f"{self.name} has no such model: {error}") from error
        mine = vars(_same_layers(model))
        theirs = vars(_same_layers(replace(again, **{n: mine[n] for n in OF_TRAINING})))
        other = [f"{name} {mine[name]}" for name in mine if mine[name] != theirs[name]]
        if model.num_experts and model.router.by_sinkhorn:
            other.append("moe_router_load_balancing_type sinkhorn")
        if other:
            raise ForeignError(f"{self.name} has no models with {', '.join(other)}")
        return {"architectures": [self.architecture], "model_type": self.model_type} | written


QK_NORMS: Final = {
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}
"""Their names of the norms of queries and keys, by our names."""

OF_TRAINING: Final = (
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "label_smoothing",
    "z_loss_coeff",
    "mtp_loss_scaling_factor",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_in_fp32",
    "moe_router_in_fp64",
    "moe_router_bias_update_rate",
    "moe_router_force_load_balancing",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
)
"""Fields of training, on which the weights do not depend; a ``config.json`` may lack them."""


def _same_layers(model: ModelConfig) -> ModelConfig:
    """Return an equal model whose patterns of layers are in a standard form, to be compared."""
    layers = range(model.num_layers)
    has_window = [model.is_local(i) for i in layers]
    local: Values = {
        "window_pattern": pattern_of([int(here) for here in has_window]),
        "no_rope_pattern": tuple(
            int(model.position_embedding_type == "rope" and not model.rotates(i)) for i in layers
        ),
    }
    has_experts = [model.has_experts(i) for i in layers]
    local["moe_layer_pattern"] = tuple(map(int, has_experts))
    if all(has_experts):
        local["ffn_hidden_size"] = model.moe_ffn_hidden_size
    if model.rope_type == "dynamic":  # the original length is their number of positions
        local["max_position_embeddings"] = model.original_max_position_embeddings
    if not any(has_window):
        local |= {"window_size": None, "rotary_base_local": None}
    return replace(model, **local)


def pattern_of(entries: list[int]) -> Pattern:
    """Return a pattern of layers in the shortest form of the flags; empty: all layers.

    Args:
        entries: for every layer 1 (it has the window) or 0.
    """
    if all(entries):
        return ()
    period = entries.index(0) + 1
    repeated = [int((i + 1) % period != 0) for i in range(len(entries))]
    return tuple(entries[:period] if entries == repeated else entries)


def sizes(c: Fields, *, head_dim: int | None = None, groups: int | None = None) -> Values:
    """Return the fields of our model that all families since Llama name alike.

    Args:
        c: fields of ``config.json``.
        head_dim: default of the width of a head; ``None``: hidden size / heads.
        groups: default of the number of key/value heads; ``None``: as many as heads.
    """
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    if head_dim is None and "head_dim" not in c and hidden % heads:
        raise ForeignError(f"{c.origin}: {heads} heads do not share hidden_size {hidden}")
    return {
        "num_layers": c.whole("num_hidden_layers", most=MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_hidden_size": c.whole("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": c.whole("num_key_value_heads", groups or heads),
        "kv_channels": c.whole("head_dim", head_dim or max(hidden // heads, 1)),
        "max_position_embeddings": c.whole("max_position_embeddings"),
        "vocab_size": c.whole("vocab_size"),
        "init_method_std": c.number("initializer_range", 0.02),
        "attention_dropout": c.number("attention_dropout", 0.0, most=1.0),
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "norm_epsilon": c.number("rms_norm_eps", 1e-6),
        "add_bias_linear": False,
    }


def written_sizes(model: ModelConfig) -> Values:
    """Return the fields of ``config.json`` that ``sizes`` reads, and ``tie_word_embeddings``."""
    is_dynamic = model.rope_type == "dynamic"
    positions = (
        model.original_max_position_embeddings if is_dynamic else model.max_position_embeddings
    )
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "max_position_embeddings": positions,
        "vocab_size": model.vocab_size,
        "initializer_range": model.init_method_std,
        "attention_dropout": model.attention_dropout,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
    }


def windows(c: Fields, size: int | None, local: list[int], base_local: int | None = None) -> Values:
    """Return the fields of ``ModelConfig`` about windows (a query attends to near tokens only).

    Args:
        c: fields of ``config.json``.
        size: positions that a query attends to, its own included; ``None``: no window.
        local: for every layer 1 (it has the window) or 0; ``layer_types`` of ``config.json``
            replaces it.
        base_local: RoPE theta of layers with the window.
    """
    kinds = {"sliding_attention": 1, "full_attention": 0}
    if words := c.words("layer_types", kinds, len(local)):
        local = [kinds[word] for word in words]
    if size is None or not any(local):
        return {}
    return {
        "window_size": size - 1,
        "window_pattern": pattern_of(local),
        "rotary_base_local": base_local,
    }


def layer_types(model: ModelConfig) -> list[str]:
    """Return for every layer whether it has the window, in Hugging Face's words."""
    kinds = {True: "sliding_attention", False: "full_attention"}
    return [kinds[model.is_local(i)] for i in range(model.num_layers)]


def llama_like(
    name: str,
    class_name: str,
    norms: Mapping[str, str],
    read: Callable[[Fields], Values],
    write: Callable[[ModelConfig], Values],
    ignored: tuple[str, ...] = (),
    more: Table | None = None,
) -> Family:
    """Return a family whose layers have the structure of Llama's layers.

    Args:
        name: name of the family, and its ``model_type``.
        class_name: beginning of the name of its class of ``transformers``.
        norms: their names of the norms of a layer, by our names.
        read: as in ``Family``.
        write: as in ``Family``.
        ignored: as in ``Family``.
        more: layouts of further tensors, which replace layouts of the same name.
    """
    table, architecture = {**_projections(norms), **(more or {})}, f"{class_name}ForCausalLM"
    return Family(name, name, architecture, "model.", table, read, write, ignored)


def _projections(norms: Mapping[str, str]) -> Table:
    """Return the table of a family whose layers have the structure of Llama's layers."""

    def layer(name: str) -> str:
        return f"model.layers.{{}}.{name}"

    def heads(kind: str) -> Heads:
        return Heads(*(layer(f"self_attn.{part}_proj.{kind}") for part in "qkv"))

    return {
        WORD_EMBEDDINGS: Same("model.embed_tokens.weight"),
        f"{LAYERS}self_attention.linear_qkv.weight": heads("weight"),
        f"{LAYERS}self_attention.linear_qkv.bias": heads("bias"),
        f"{LAYERS}self_attention.linear_proj.weight": Same(layer("self_attn.o_proj.weight")),
        f"{LAYERS}self_attention.linear_proj.bias": Same(layer("self_attn.o_proj.bias")),
        f"{LAYERS}mlp.linear_fc1.weight": Halves(
            layer("mlp.gate_proj.weight"), layer("mlp.up_proj.weight")
        ),
        f"{LAYERS}mlp.linear_fc1.bias": Halves(
            layer("mlp.gate_proj.bias"), layer("mlp.up_proj.bias")
        ),
        f"{LAYERS}mlp.linear_fc2.weight": Same(layer("mlp.down_proj.weight")),
        f"{LAYERS}mlp.linear_fc2.bias": Same(layer("mlp.down_proj.bias")),
        **{f"{LAYERS}{ours}.weight": Same(layer(f"{n}.weight")) for ours, n in norms.items()},
        f"{FINAL_NORM}.weight": Same("model.norm.weight"),
        OUTPUT_LAYER: Same("lm_head.weight"),
    }
