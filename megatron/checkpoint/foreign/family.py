"""Families of Hugging Face's models: tensor names, and ``config.json`` as fields of our model.

"Our" names and fields belong to this program, "their" names and fields to Hugging Face.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from megatron.checkpoint.foreign.derived import Follows
from megatron.checkpoint.foreign.fields import MOST_LAYERS, Fields
from megatron.checkpoint.foreign.layouts import ForeignError, Halves, Heads, Same, Table
from megatron.checkpoint.foreign.same_models import OF_TRAINING, same_layers
from megatron.flags.tree import values_of
from megatron.layers.patterns import LayerPattern
from megatron.model.maximal_update import in_usual_terms
from megatron.model.ownership import (
    FINAL_NORM,
    LAYERS,
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
)
from megatron.model.settings import ModelSettings

Values = dict[str, Any]
"""Fields of ``ModelSettings``, or of a ``config.json``, by name."""


EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Fields of ``config.json`` that say how many experts a layer has."""


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
        tables: for each ending of the names of tensors that are no weights, their check.
        aliases: for each second name of a field of ``config.json``, the field's name.
        unread_positions: last rows of the learned position table that no position reads.
    """

    name: str
    model_type: str
    architecture: str
    base: str
    table: Table
    read: Callable[[Fields], Values]
    write: Callable[[ModelSettings], Values]
    tables: Mapping[str, Follows] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    unread_positions: int = 0

    def model_of(self, config: Fields, seq_length: int | None = None) -> ModelSettings:
        """Return the model of a ``config.json``.

        Args:
            config: fields of ``config.json``.
            seq_length: tokens per sample; ``None``: as many as the model has positions. A model
                without a learned table gets positions for more tokens than ``config.json`` says.

        Raises:
            ForeignError: a field is damaged, or has a value that this program does not support; or
                samples have more tokens than there are learned positions.
        """
        config = config.renamed(self.aliases)
        values = self.read(config)
        positions = values["max_position_embeddings"] - self.unread_positions
        length = positions if seq_length is None else seq_length
        if "position_embedding_type" in values:  # RoPE and ALiBi have no last position
            values["max_position_embeddings"] = max(positions, length)
        elif length > positions:
            name = "n_positions" if "n_positions" in config else "max_position_embeddings"
            raise ForeignError(
                f"{config.origin}: {name} {positions} is less than --seq-length {length}"
            )
        values.setdefault("rope_type", "rope")
        if values.get("num_experts") == 1:
            name = next(name for name in EXPERTS if name in config)
            raise config.fault(name, "more than 1: a layer with one expert is no mixture")
        model = ModelSettings.of(**values, seq_length=length)
        _check_choice(config, model)
        heads, groups = model.attention.num_attention_heads, model.attention.num_query_groups
        if heads % groups:
            raise ForeignError(
                f"{config.origin}: num_attention_heads {heads} is no multiple of "
                f"num_key_value_heads {groups}"
            )
        return model

    def config_of(self, model: ModelSettings) -> Values:
        """Return the ``config.json`` of a model.

        Raises:
            ForeignError: the family has no such models; the message names the fields that differ.
        """
        model = in_usual_terms(model)
        try:
            written = self.write(model)
            again = self.model_of(Fields(written, self.name), model.seq_length)
        except ForeignError as error:
            raise ForeignError(f"{self.name} has no such model: {error}") from error
        mine = values_of(same_layers(model))
        theirs = values_of(same_layers(again.replaced(**{n: mine[n] for n in OF_TRAINING})))
        other = [f"{name} {mine[name]}" for name in mine if mine[name] != theirs[name]]
        if model.experts.num_experts and model.balance.is_by_sinkhorn:
            other.append("moe_router_load_balancing_type sinkhorn")
        if other:
            raise ForeignError(f"{self.name} has no models with {', '.join(other)}")
        return {"architectures": [self.architecture], "model_type": self.model_type} | written


def _check_choice(config: Fields, model: ModelSettings) -> None:
    """Refuse a number of chosen experts with which a router cannot be trained."""
    experts, topk = model.experts.num_experts, model.experts.moe_router_topk
    if experts and topk > experts:
        name = next((name for name in EXPERTS if name in config), "the number of experts")
        raise config.fault("num_experts_per_tok", f"at most {name} {experts}")
    if experts and topk == 1 and not model.experts.moe_router_pre_softmax:
        raise config.fault(
            "num_experts_per_tok",
            "more than 1: here the weights of chosen experts sum to 1, so one weight never changes",
        )


QK_NORMS: Final = {
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}
"""Their names of the norms of queries and keys, by our names."""


def check_widths(c: Fields) -> None:
    """Refuse a hidden size that heads do not divide, as ``transformers`` does in some families.

    It does so whatever ``head_dim`` is.
    """
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    if hidden % heads:
        raise c.fault("hidden_size", f"a multiple of num_attention_heads {heads}")


def sizes(c: Fields, *, head_dim: int | None = None, groups: int | None = None) -> Values:
    """Return the fields of our model that all families since Llama name alike.

    Args:
        c: fields of ``config.json``.
        head_dim: default of the width of a head; ``None``: hidden size / heads.
        groups: default of the number of key/value heads; ``None``: as many as heads.
    """
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    if head_dim is None and "head_dim" not in c and hidden % heads:
        raise ForeignError(
            f"{c.origin}: num_attention_heads {heads} does not divide hidden_size {hidden}"
        )
    width = c.whole("head_dim", head_dim or max(hidden // heads, 1))
    if width % 2:
        raise ForeignError(
            f"{c.origin}: head_dim {width} (of num_attention_heads {heads}, hidden_size {hidden}) "
            "is odd, and RoPE turns pairs of channels"
        )
    return {
        "num_layers": c.whole("num_hidden_layers", most=MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_hidden_size": c.whole("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": heads
        if c.is_null("num_key_value_heads")
        else c.whole("num_key_value_heads", groups or heads),
        "kv_channels": width,
        "max_position_embeddings": c.whole("max_position_embeddings"),
        "vocab_size": c.whole("vocab_size"),
        "init_method_std": c.number("initializer_range", 0.02),
        "attention_dropout": c.share("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "norm_epsilon": c.positive("rms_norm_eps", 1e-6),
        "add_bias_linear": False,
    }


def written_sizes(model: ModelSettings) -> Values:
    """Return the fields of ``config.json`` that ``sizes`` reads, and ``tie_word_embeddings``."""
    positions = max(model.positions.max_position_embeddings, model.seq_length)
    if model.rope_scaling.rope_type == "dynamic":
        positions = model.rope_scaling.original_max_position_embeddings
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.mlp.ffn_hidden_size,
        "num_attention_heads": model.attention.num_attention_heads,
        "num_key_value_heads": model.attention.num_query_groups,
        "head_dim": model.attention.kv_channels,
        "max_position_embeddings": positions,
        "vocab_size": model.vocab_size,
        "initializer_range": model.init_method_std,
        "attention_dropout": model.attention.attention_dropout,
        "rms_norm_eps": model.norm.norm_epsilon,
        "tie_word_embeddings": model.vocabulary.tie_embeddings,
    }


def biases(c: Fields) -> Values:
    """Return the fields of ``ModelSettings`` about the biases of linear layers.

    ``attention_bias`` is about queries, keys, values and the projection of attention's output;
    ``mlp_bias`` is about the MLP.

    Raises:
        ForeignError: the MLP alone has biases.
    """
    attention, mlp = c.truth("attention_bias", False), c.truth("mlp_bias", False)
    if mlp and not attention:
        raise ForeignError(
            f"{c.origin}: mlp_bias is true and attention_bias is false, and this program has "
            "biases in all linear layers, in those of attention alone, or in none"
        )
    alone = attention and not mlp
    return {"add_bias_linear": mlp, "add_qkv_bias": alone, "add_proj_bias": alone}


def attention_biases(c: Fields) -> Values:
    """As ``biases``, in a family whose MLP never has biases."""
    return biases(Fields({"attention_bias": c.truth("attention_bias", False)}, c.origin))


def written_biases(model: ModelSettings) -> Values:
    """Return the fields of ``config.json`` that ``biases`` reads."""
    everywhere, own = model.block.add_bias_linear, model.attention
    return {"attention_bias": everywhere or own.add_proj_bias, "mlp_bias": everywhere}


def windows(
    c: Fields, size: int | None, local: list[int], base_local: float | None = None
) -> Values:
    """Return the fields of ``ModelSettings`` about windows (a query attends to near tokens only).

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
        "window_attn_skip_freq": LayerPattern(listed=tuple(local)),
        "rotary_base_local": base_local,
    }


def written_window(model: ModelSettings) -> int | None:
    """Return how many positions a query attends to in layers with a window, its own included.

    ``None``: no layer has a window.
    """
    size, layers = model.attention.window_size, range(model.num_layers)
    return size + 1 if size is not None and any(map(model.attention.is_local, layers)) else None


def layer_types(model: ModelSettings) -> list[str]:
    """Return for every layer whether it has the window, in Hugging Face's words."""
    kinds = {True: "sliding_attention", False: "full_attention"}
    return [kinds[model.attention.is_local(i)] for i in range(model.num_layers)]


def llama_like(
    name: str,
    class_name: str,
    norms: Mapping[str, str],
    read: Callable[[Fields], Values],
    write: Callable[[ModelSettings], Values],
    tables: Mapping[str, Follows] | None = None,
    more: Table | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Family:
    """Return a family whose layers have the structure of Llama's layers.

    Args:
        name: name of the family, and its ``model_type``.
        class_name: beginning of the name of its class of ``transformers``.
        norms: their names of the norms of a layer, by our names.
        read: as in ``Family``.
        write: as in ``Family``.
        tables: as in ``Family``.
        more: layouts of further tensors, which replace layouts of the same name.
        aliases: as in ``Family``.
    """
    table, architecture = {**_projections(norms), **(more or {})}, f"{class_name}ForCausalLM"
    return Family(
        name, name, architecture, "model.", table, read, write, tables or {}, aliases or {}
    )


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
