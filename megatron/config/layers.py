"""The parts of a layer: flags and rules. Also makes ``ModelConfig`` from all flags of the model.

A flag has Megatron-LM's name if Megatron-LM has the flag. Other names come from related projects:
MindSpeed-LLM (caps of scores, GeGLU), Megatron-LLM of EPFL (parallel layers), BigScience's
Megatron-DeepSpeed (the norm of embeddings) and Megatron-Bridge (RoPE of local layers).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

from megatron.config.balancing import balancing_fields
from megatron.config.data import CorpusFlags
from megatron.config.experts import expert_fields
from megatron.config.latent_attention import latent_fields
from megatron.config.layer_patterns import parse_pattern, parse_window
from megatron.config.model import ModelFlags
from megatron.config.rope_scaling import rope_scaling_fields
from megatron.flags.declare import CAP, CAP_OR_OFF, FACTOR, STRETCH, WIDTH, Range, flag, up_to
from megatron.flags.groups import Flags, Rule, copied, faults_of, options_of
from megatron.layers.attention import Sinks
from megatron.model.config import ModelConfig, Pattern

_ROPE: Final = "--position-embedding-type rope"
_PATTERN: Final = "N|[0,1,...]"


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class LayerFlags:
    """What the layers are made of, where they differ from a plain GPT's."""

    window_size: str | None = flag(None,
        "Tokens that a position sees: itself, L earlier ones, and 0 later ones.",
        unset="all earlier ones",
        metavar="L,0")
    window_attn_skip_freq: str | None = flag(None,
        "N: every N-th layer sees all earlier positions. Or a list with 1 for each layer with the "
        "window and 0 for each other layer, as in '[1,1,0]*8'.",
        unset="all layers have the window", metavar=_PATTERN,
        idle_without="--window-size")
    attn_logit_softcapping: float = flag(0.0,
        "Cap attention's scores softly: c tanh(score / c), with c this number; 0: off.",
        CAP_OR_OFF)
    softmax_type: Sinks = flag("vanilla",
        "Let one more key without a value take part in attention's softmax, so that a head may "
        "attend to nothing: with a score that every head learns (learnable: attention sinks, as in "
        "GPT-OSS), or with a score of 0 (off-by-one).")
    softmax_scale: float | None = flag(None, "Factor of the products of queries and keys.",
        Range(1e-8, 1000), unset="1 / sqrt(width of a head)", excludes="--query-pre-attn-scalar")
    query_pre_attn_scalar: int | None = flag(None,
        "Divide the products of queries and keys by the root of this number.", WIDTH,
        unset="the width of a head")
    rotary_base_local: int | None = flag(None,
        "RoPE theta of the layers with a window; their frequencies are not scaled.", up_to(10**12),
        unset="theta of all layers", needs="--window-size", idle_without=_ROPE)
    rotary_seq_len_interpolation_factor: int = flag(1,
        "Number by which RoPE divides positions.", STRETCH,
        idle_without=_ROPE)
    no_rope_freq: str | None = flag(None,
        "N: every N-th layer does not rotate. Or a list with 1 for each layer that does not "
        "rotate and 0 for each other layer, as in '[0,0,0,1]*6'.",
        unset="all layers rotate", metavar=_PATTERN, idle_without=_ROPE)
    apply_layernorm_1p: bool = flag(False,
        "Keep the weight of a norm as its distance from 1.")
    post_self_attn_layernorm: bool = flag(False,
        "Normalise attention's output before it joins the residual stream.")
    post_mlp_layernorm: bool = flag(False,
        "Normalise the MLP's output before it joins the residual stream.")
    apply_residual_connection_post_layernorm: bool = flag(False,
        "Add the output of attention, and of the MLP, to the output of the norm before it, not to "
        "that norm's input.")
    parallel_attn: bool = flag(False,
        "Let attention and the MLP read the same norm of a layer's input.")
    parallel_layernorm: bool = flag(False, "With --parallel-attn: give the MLP a norm of its own.",
        idle_without="--parallel-attn")
    geglu: bool = flag(False,
        "GELU-gated MLP, by the tanh approximation, instead of GELU.",
        excludes="--swiglu or --squared-relu")
    quick_geglu: bool = flag(False,
        "MLP gated by x sigmoid(1.702 x), an approximation of GELU, instead of GELU.",
        excludes="--swiglu or --squared-relu or --geglu")
    activation_func_clamp_value: float | None = flag(None,
        "With --quick-geglu: the gate is at most this number, and the half that the gate "
        "multiplies lies between minus and plus this number, as in GPT-OSS.", CAP,
        unset="no limit", needs="--quick-geglu")
    glu_linear_offset: float = flag(0.0,
        "Add this number to the half that the gate of --quick-geglu multiplies, as in GPT-OSS.",
        Range(-1000, 1000), needs="--quick-geglu")
    embed_layernorm: bool = flag(False, "Normalise the word embeddings.")
    embedding_multiplier: float = flag(1.0, "Factor of the word embeddings.", FACTOR,
        excludes="--scale-embeddings-by-hidden-size")
    scale_embeddings_by_hidden_size: bool = flag(False,
        "Multiply the word embeddings by the root of --hidden-size.")
    mtp_num_layers: int = flag(0,
        "Further tokens that every position predicts (multi-token prediction of DeepSeek-V3). "
        "Each adds a transformer layer to the last stage. 0: only the next token is predicted.",
        Range(0, 1000))
    mtp_loss_scaling_factor: float = flag(0.1,
        "Weight in the loss of the mean loss of the further tokens of --mtp-num-layers.",
        Range(1e-6, 1000),
        idle_without="--mtp-num-layers")
# fmt: on


def model_config(flags: Flags, vocab_size: int) -> ModelConfig:
    """Return the model's configuration, with all widths and numbers of heads derived.

    The width of the MLP, the key/value heads and the width of a head are derived as in Megatron.
    """
    model, layers = flags[ModelFlags], flags[LayerFlags]
    heads, hidden = model.num_attention_heads, model.hidden_size
    gated = model.swiglu or layers.geglu or layers.quick_geglu
    ffn_default = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    ffn = model.ffn_hidden_size or ffn_default
    derived = {"kv_channels": model.kv_channels or hidden // heads, **latent_fields(flags)}
    return copied(
        ModelConfig,
        model,
        ffn_hidden_size=ffn,
        num_query_groups=(model.num_query_groups or 1) if model.group_query_attention else heads,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        vocab_size=vocab_size,
        add_bias_linear=not model.disable_bias_linear,
        tie_embeddings=not model.untie_embeddings_and_output_weights,
        **derived,
        **layer_fields(flags),
        **rope_scaling_fields(flags),
        **(expert_fields(flags, ffn) | balancing_fields(flags)),
    )


def layer_fields(flags: Flags) -> dict[str, Any]:
    """Return the fields of ``ModelConfig`` about the parts of layers, by name."""
    layers = flags[LayerFlags]
    names = {field.name for field in fields(ModelConfig)}
    same = {name: value for name, value in vars(layers).items() if name in names}
    derived = {
        "window_size": parse_window(layers.window_size),
        "window_pattern": window_pattern(flags),
        "no_rope_pattern": no_rope_pattern(flags),
    }
    if layers.query_pre_attn_scalar is not None:
        derived["softmax_scale"] = layers.query_pre_attn_scalar**-0.5
    if layers.scale_embeddings_by_hidden_size:
        derived["embedding_multiplier"] = flags[ModelFlags].hidden_size ** 0.5
    return same | derived


def window_pattern(flags: Flags) -> Pattern:
    """Return the pattern of the layers that have the window; errors as in ``parse_pattern``."""
    words = flags[LayerFlags].window_attn_skip_freq
    return parse_pattern("--window-attn-skip-freq", words, 0, flags[ModelFlags].num_layers)


def no_rope_pattern(flags: Flags) -> Pattern:
    """Return the pattern of the layers without RoPE; errors as in ``parse_pattern``."""
    return parse_pattern(
        "--no-rope-freq", flags[LayerFlags].no_rope_freq, 1, flags[ModelFlags].num_layers
    )


Group = TypeVar("Group", ModelFlags, LayerFlags)


def sound_model(flags: Flags) -> ModelConfig:
    """Return the model that flags ask for, with a vocabulary of 1 entry; rules use the rest.

    Raises:
        ValueError: the flags make no model.
    """
    model, layers = _whole(ModelFlags, flags[ModelFlags]), _whole(LayerFlags, flags[LayerFlags])
    return model_config(flags.replaced(model, layers), vocab_size=1)


def _whole(kind: type[Group], group: Group) -> Group:
    """Return a copy of a group of flags, for a rule.

    If a value in the group is a mistake, the rule ends here, as ``megatron.flags.checks`` tells.
    """
    return kind(**{field.name: getattr(group, field.name) for field in fields(kind)})


def _mlp(flags: Flags) -> Iterator[str]:
    model = flags[ModelFlags]
    layers = flags[LayerFlags]
    gate = "--swiglu" if model.swiglu else "--geglu" if layers.geglu else None
    gate = "--quick-geglu" if layers.quick_geglu else gate
    if gate and model.ffn_hidden_size is None and model.hidden_size < 24:
        yield (
            f"{gate} with --hidden-size {model.hidden_size} leaves an MLP without width, "
            "as its default is a multiple of 64: give --ffn-hidden-size"
        )


def _window(flags: Flags) -> Iterator[str]:
    yield from faults_of(lambda: parse_window(flags[LayerFlags].window_size))


def _window_layers(flags: Flags) -> Iterator[str]:
    yield from faults_of(lambda: window_pattern(flags))


def _unrotated_layers(flags: Flags) -> Iterator[str]:
    yield from faults_of(lambda: no_rope_pattern(flags))


def _predicted_tokens(flags: Flags) -> Iterator[str]:
    depths, length = flags[LayerFlags].mtp_num_layers, flags[ModelFlags].seq_length
    if not depths:
        return
    given = f"--mtp-num-layers {depths}"
    if depths >= length:
        yield (
            f"{given} predicts tokens behind the end of every sample, which has --seq-length "
            f"{length}: lower it"
        )
    for option, value in options_of(CorpusFlags, flags[CorpusFlags]):
        if value and option in ("--reset-attention-mask", "--reset-position-ids"):
            yield (
                f"{given} with {option}: the tokens that follow may be of another document, and "
                "its layers see the whole sample: leave one of them out"
            )
    if flags[ModelFlags].position_embedding_type == "learned_absolute":
        yield (
            f"{given} with --position-embedding-type learned_absolute needs the table of the first "
            "stage on the last one too: use rope, alibi or none"
        )
    if flags[LayerFlags].embed_layernorm:
        yield (
            f"{given} with --embed-layernorm needs the norm of the first stage on the last one "
            "too: leave one of them out"
        )


def _wide_window(flags: Flags) -> Iterator[str]:
    words, length = flags[LayerFlags].window_size, flags[ModelFlags].seq_length
    if words is None or list(_window(flags)) or flags[LayerFlags].rotary_base_local is not None:
        return
    if (parse_window(words) or 0) >= length - 1:
        yield f"--window-size {words} changes nothing: a sample has {length} tokens"


LAYER_RULES: Final[tuple[Rule, ...]] = (
    _mlp,
    _window,
    _window_layers,
    _unrotated_layers,
    _predicted_tokens,
)

LAYER_NOTES: Final[tuple[Rule, ...]] = (_wide_window,)
