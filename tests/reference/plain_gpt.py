"""A GPT written out as the textbooks have it, against which the real one is compared.

One process, the whole vocabulary, torch's autograd, and no line shared with the package under
test. The model is a function of a dict of parameters under Megatron's names, so that the gradient
of any parameter can be compared by its name.

Shapes: b batch, s sequence, h hidden, g query groups, r query heads per group, a = g*r query
heads, d head width, f MLP width, V vocabulary; n = b*s tokens.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from reference import plain_experts, plain_latent, plain_rotation

Parameters = dict[str, torch.Tensor]


class Documents(NamedTuple):
    """The documents of samples.

    Attributes:
        starts_bs: first position of every token's document, of which the token sees no earlier one;
            ``None``: a sample is one document.
        positions_bs: row of the position table for every token; ``None``: its place in the sample.
    """

    starts_bs: torch.Tensor | None = None
    positions_bs: torch.Tensor | None = None


WHOLE = Documents()


@dataclass(frozen=True)
class GPTOptions:
    """What decides the model's mathematics; the names are those of the command line.

    There is no dropout: two implementations cannot agree on its random numbers.

    Attributes:
        num_layers: transformer layers.
        hidden_size: h.
        ffn_hidden_size: f, width of each half with `swiglu`.
        num_attention_heads: a.
        num_query_groups: g, key/value heads.
        kv_channels: d.
        max_position_embeddings: rows of the learned position table.
        vocab_size: V.
        position_embedding_type: ``learned_absolute``, ``rope``, ``alibi`` or ``none``.
        rotary_base: RoPE theta.
        rotary_percent: share of each head that is rotated.
        rotary_interleaved: components 2i and 2i + 1 turn together.
        use_rope_scaling: Llama 3.1 slows the low frequencies down.
        rope_scaling_factor: by how much it slows the lowest down.
        rope_type: ``rope``, ``yarn``, ``dynamic`` or ``longrope``.
        rotary_scaling_factor: by how much YaRN slows the lowest down; of dynamic scaling.
        original_max_position_embeddings: length of samples before any scaling.
        beta_fast: turns in those from which YaRN leaves a pair alone.
        beta_slow: turns up to which it slows a pair down in full.
        mscale: weight of the logarithm of how much longer it makes what turns.
        mscale_all_dim: weight of the one that this is divided by.
        yarn_exact_range: the pairs in between are not rounded outwards.
        rope_short_factors: divisors of the pairs' frequencies with ``longrope``, up to the original
            length.
        rope_long_factors: the divisors in longer samples.
        multi_latent_attention: see ``plain_latent``.
        q_lora_rank: width of the queries' latent; ``None``: they have none.
        kv_lora_rank: width of the latent of keys and values.
        qk_head_dim: channels of a query that do not turn.
        qk_pos_emb_head_dim: channels that turn.
        v_head_dim: channels of a value.
        latent_norm_epsilon: epsilon of the latents' norms, if it is another.
        rotary_seq_len_interpolation_factor: positions are divided by it.
        rotary_base_local: RoPE theta of the layers with a window, which scale nothing.
        no_rope_pattern: by layer, over and over: 1 does not rotate.
        window_size: earlier positions that a query sees, besides its own.
        window_pattern: by layer, over and over: 1 has the window; none given: all have it.
        softmax_scale: of the scores; ``None``: 1/sqrt(d).
        softmax_type: ``learnable``: every head has a further score, of a key without a value;
            ``off-by-one``: it is 0; ``vanilla``: there is none.
        attn_logit_softcapping: c of ``c * tanh(score / c)``; 0 switches it off.
        normalization: ``LayerNorm`` or ``RMSNorm``.
        norm_epsilon: epsilon of every norm.
        apply_layernorm_1p: every norm multiplies by 1 + its weight.
        add_bias_norm: every LayerNorm adds a bias.
        pre_layernorm: a norm of what attention and the MLP read; else they read the stream.
        residual_multiplier: factor of what both add.
        post_self_attn_layernorm: a norm of what attention adds.
        post_mlp_layernorm: a norm of what the MLP adds.
        apply_residual_connection_post_layernorm: both add to the normed input.
        parallel_attn: the MLP reads what attention reads.
        parallel_layernorm: through a norm of its own.
        embed_layernorm: a norm of the embeddings.
        embedding_multiplier: factor of the embeddings.
        logit_multiplier: factor of the logits.
        geglu: ``gelu(gate) * up``.
        quick_geglu: ``gate * sigmoid(1.702 gate) * (up + offset)``.
        activation_func_clamp_value: bound of that gate, and of up on both sides.
        glu_linear_offset: the offset.
        swiglu: ``silu(gate) * up``, the gate being the first half of `linear_fc1`; else GELU in
            its tanh form.
        squared_relu: ``max(x, 0)^2`` instead of GELU.
        exact_gelu: ``x`` times the normal distribution's share below ``x``, instead of GELU.
        relu: ``max(x, 0)`` instead of GELU.
        qk_layernorm: normalise queries and keys per head, before they are rotated.
        qk_layernorm_across_heads: normalise them over the channels of all heads instead.
        qk_layernorm_after_rotation: normalise them after they are rotated.
        add_bias_linear: biases in the four linear layers of a block.
        add_qkv_bias: a bias in ``linear_qkv`` in any case.
        add_proj_bias: a bias in ``linear_proj`` in any case.
        tie_embeddings: the output layer uses the embedding's matrix.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        z_loss_coeff: weight of each token's squared log-sum-exp.
        logit_softcap: c of ``c * tanh(logit / c)``; 0 switches it off.
        mtp_num_layers: depths of multi-token prediction.
        mtp_loss_scaling_factor: weight of the mean of their losses.
        num_experts: E; 0: no layer has experts.
        moe_layer_pattern: by layer, over and over: 1 has experts.
        moe_ffn_hidden_size: width of an expert.
        moe_router_topk: k.
        moe_router_score_function: ``softmax`` or ``sigmoid``.
        moe_router_pre_softmax: the softmax is taken before the best are.
        moe_router_num_groups: groups of experts.
        moe_router_group_topk: groups that a token chooses from.
        moe_router_group_best: experts that make a group good; ``None``: k / those groups.
        moe_router_topk_scaling_factor: of all weights.
        moe_router_load_balancing_type: what balances the experts, or several of it.
        moe_aux_loss_coeff: of that loss, or of each.
        moe_z_loss_coeff: of the squared log-sum-exp of the router.
        moe_router_in_fp32: decides nothing here.
        moe_router_in_fp64: decides nothing here.
        moe_router_enable_expert_bias: a bias joins the scores for the choice.
        moe_router_bias_update_rate: by which an iteration changes it.
        moe_expert_capacity_factor: how many times the mean an expert takes; ``None``: all.
        moe_token_drop_policy: what it takes then, the heaviest choices or the first ones.
        moe_shared_expert_intermediate_size: width of the MLP for all tokens; 0: there is none.
        moe_shared_expert_gate: it has a gate.
    """

    num_layers: int = 2
    hidden_size: int = 16
    ffn_hidden_size: int = 24
    num_attention_heads: int = 4
    num_query_groups: int = 4
    kv_channels: int = 4
    max_position_embeddings: int = 12
    vocab_size: int = 29
    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    rope_type: Literal["rope", "yarn", "dynamic", "longrope"] = "rope"
    rotary_scaling_factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    yarn_exact_range: bool = False
    rope_short_factors: tuple[float, ...] = ()
    rope_long_factors: tuple[float, ...] = ()
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    latent_norm_epsilon: float | None = None
    rotary_seq_len_interpolation_factor: int = 1
    rotary_base_local: float | None = None
    no_rope_pattern: tuple[int, ...] = ()
    window_size: int | None = None
    window_pattern: tuple[int, ...] = ()
    softmax_scale: float | None = None
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    attn_logit_softcapping: float = 0.0
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    apply_layernorm_1p: bool = False
    add_bias_norm: bool = True
    pre_layernorm: bool = True
    residual_multiplier: float = 1.0
    post_self_attn_layernorm: bool = False
    post_mlp_layernorm: bool = False
    apply_residual_connection_post_layernorm: bool = False
    parallel_attn: bool = False
    parallel_layernorm: bool = False
    embed_layernorm: bool = False
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    geglu: bool = False
    quick_geglu: bool = False
    activation_func_clamp_value: float | None = None
    glu_linear_offset: float = 0.0
    swiglu: bool = False
    squared_relu: bool = False
    exact_gelu: bool = False
    relu: bool = False
    qk_layernorm: bool = False
    qk_layernorm_across_heads: bool = False
    qk_layernorm_after_rotation: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    add_proj_bias: bool = False
    tie_embeddings: bool = True
    label_smoothing: float = 0.0
    z_loss_coeff: float = 0.0
    logit_softcap: float = 0.0
    mtp_num_layers: int = 0
    mtp_loss_scaling_factor: float = 0.1
    num_experts: int = 0
    moe_layer_pattern: tuple[int, ...] = (1,)
    moe_ffn_hidden_size: int = 0
    moe_router_topk: int = 2
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_num_groups: int = 1
    moe_router_group_topk: int = 1
    moe_router_group_best: int | None = None
    moe_router_topk_scaling_factor: float = 1.0
    moe_router_load_balancing_type: str | tuple[str, ...] = "aux_loss"
    moe_aux_loss_coeff: float | tuple[float, ...] = 0.0
    moe_z_loss_coeff: float = 0.0
    moe_router_in_fp32: bool = False
    moe_router_in_fp64: bool = False
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_expert_capacity_factor: float | None = None
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False


def parameter_shapes(options: GPTOptions) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the order of the forward.

    Rows of ``linear_qkv`` come by query group: the group's query heads, its key, its value.
    """
    h = options.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (options.vocab_size, h)
    }
    if options.embed_layernorm:
        shapes |= _norm_shapes("embedding.word_embeddings.norm", h, options)
    if options.position_embedding_type == "learned_absolute":
        shapes["embedding.position_embeddings.weight"] = (options.max_position_embeddings, h)
    for index in range(options.num_layers):
        shapes |= _layer_shapes(f"decoder.layers.{index}", index, options)
    shapes |= _norm_shapes("decoder.final_layernorm", h, options)
    for index in range(options.mtp_num_layers):
        depth = f"mtp.layers.{index}"
        shapes |= _norm_shapes(f"{depth}.enorm", h, options)
        shapes |= _norm_shapes(f"{depth}.hnorm", h, options)
        shapes[f"{depth}.eh_proj.weight"] = (h, 2 * h)
        shapes |= _layer_shapes(f"{depth}.transformer_layer", options.num_layers - 1, options)
        shapes |= _norm_shapes(f"{depth}.final_layernorm", h, options)
    if not options.tie_embeddings:
        shapes["output_layer.weight"] = (options.vocab_size, h)
    return shapes


def _layer_shapes(layer: str, index: int, options: GPTOptions) -> dict[str, tuple[int, ...]]:
    h, f = options.hidden_size, options.ffn_hidden_size
    parts: dict[str, tuple[bool, tuple[int, ...]]] = {
        "input_layernorm": (options.pre_layernorm, (h,)),
        **_attention_shapes(options),
        "post_self_attn_layernorm": (options.post_self_attn_layernorm, (h,)),
        "pre_mlp_layernorm": (
            options.pre_layernorm and (options.parallel_layernorm or not options.parallel_attn),
            (h,),
        ),
        **_mlp_shapes("mlp", f, h, not has_experts(index, options), options),
        "mlp.router": (has_experts(index, options), (options.num_experts, h)),
        **_mlp_shapes(
            "mlp.experts",
            options.moe_ffn_hidden_size,
            h,
            has_experts(index, options),
            options,
            options.num_experts,
        ),
        **_mlp_shapes(
            "mlp.shared_experts",
            options.moe_shared_expert_intermediate_size,
            h,
            has_experts(index, options) and options.moe_shared_expert_intermediate_size > 0,
            options,
        ),
        "mlp.shared_gate": (
            has_experts(index, options) and options.moe_shared_expert_gate,
            (1, h),
        ),
        "post_mlp_layernorm": (options.post_mlp_layernorm, (h,)),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    if options.softmax_type == "learnable":
        shapes[f"{layer}.self_attention.softmax_offset"] = (options.num_attention_heads,)
    for name, (is_there, shape) in parts.items():
        if is_there and len(shape) == 1:
            shapes |= _norm_shapes(f"{layer}.{name}", shape[0], options)
        elif is_there:
            shapes[f"{layer}.{name}.weight"] = shape
            if _has_bias(name, options):
                shapes[f"{layer}.{name}.bias"] = shape[:1]
    return shapes


def _attention_shapes(options: GPTOptions) -> dict[str, tuple[bool, tuple[int, ...]]]:
    h, d = options.hidden_size, options.kv_channels
    a, g = options.num_attention_heads, options.num_query_groups
    across = options.qk_layernorm_across_heads
    parts = {
        "linear_qkv": (True, ((a + 2 * g) * d, h)),
        "q_layernorm": (options.qk_layernorm, (a * d if across else d,)),
        "k_layernorm": (options.qk_layernorm, (g * d if across else d,)),
        "linear_proj": (True, (h, a * d)),
    }
    if options.multi_latent_attention:
        parts = plain_latent.shapes(options)
    return {f"self_attention.{name}": part for name, part in parts.items()}


def _has_bias(name: str, options: GPTOptions) -> bool:
    if options.add_qkv_bias and name.endswith("linear_qkv"):
        return True
    if options.add_proj_bias and name.endswith("self_attention.linear_proj"):
        return True
    of_latents = name.endswith(("_q_proj", "_down_proj", "_up_proj"))
    return options.add_bias_linear and not of_latents and name != "mlp.shared_gate"


def _mlp_shapes(
    name: str, f: int, h: int, is_there: bool, options: GPTOptions, copies: int = 1
) -> dict[str, tuple[bool, tuple[int, ...]]]:
    halves = 2 if options.swiglu or options.geglu or options.quick_geglu else 1
    return {
        f"{name}.linear_fc1": (is_there, (copies * halves * f, h)),
        f"{name}.linear_fc2": (is_there, (copies * h, f)),
    }


def has_experts(index: int, options: GPTOptions) -> bool:
    """Whether a layer has experts in the place of an MLP."""
    return options.num_experts > 0 and _has(options.moe_layer_pattern, index, 1)


def _norm_shapes(name: str, width: int, options: GPTOptions) -> dict[str, tuple[int, ...]]:
    has_bias = options.normalization == "LayerNorm" and options.add_bias_norm
    kinds = ("weight", "bias") if has_bias else ("weight",)
    return {f"{name}.{kind}": (width,) for kind in kinds}


def random_parameters(
    options: GPTOptions, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Parameters:
    """Parameters without a special value among them: no zero bias, no norm weight of one.

    Matrices are normal with standard deviation 1/sqrt(columns), which keeps activations near one.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, shape in parameter_shapes(options).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) == 2:
            value = noise / math.sqrt(shape[1])
        else:
            value = 0.2 * noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        parameters[name] = value.to(dtype)
    return parameters


def logits(
    parameters: Parameters,
    tokens_bs: torch.Tensor,
    options: GPTOptions,
    documents: Documents = WHOLE,
) -> torch.Tensor:
    """Capped logits [b, s, V] of the next token, in the dtype of the parameters."""
    return _logits(parameters, _hidden(parameters, tokens_bs, options, documents), options)


def all_logits(
    parameters: Parameters,
    tokens_bs: torch.Tensor,
    options: GPTOptions,
    documents: Documents = WHOLE,
) -> list[torch.Tensor]:
    """Those of the next token, then those of every depth of multi-token prediction.

    Depth k has a row for every position from which a token k further on is known, [b, s - k, V].
    This token may be of the next document, as in Megatron-LM.
    """
    x_bsh = _hidden(parameters, tokens_bs, options, documents)
    found = [_logits(parameters, x_bsh, options)]
    words_bsh = _words(parameters, tokens_bs, options)
    for index in range(options.mtp_num_layers):
        name = f"mtp.layers.{index}"
        words_bsh, x_bsh = words_bsh[:, 1:], x_bsh[:, :-1]
        both = (
            _norm(parameters, f"{name}.enorm", words_bsh, options),
            _norm(parameters, f"{name}.hnorm", x_bsh, options),
        )
        x_bsh = _linear(parameters, f"{name}.eh_proj", torch.cat(both, dim=-1))
        layer, kind = f"{name}.transformer_layer", options.num_layers - 1
        x_bsh = _layer(parameters, layer, kind, x_bsh, options, documents)
        x_bsh = _norm(parameters, f"{name}.final_layernorm", x_bsh, options)
        found.append(_logits(parameters, x_bsh, options))
    return found


def _words(parameters: Parameters, tokens_bs: torch.Tensor, options: GPTOptions) -> torch.Tensor:
    x_bsh = parameters["embedding.word_embeddings.weight"][tokens_bs] * options.embedding_multiplier
    if options.embed_layernorm:
        x_bsh = _norm(parameters, "embedding.word_embeddings.norm", x_bsh, options)
    return x_bsh


def _hidden(
    parameters: Parameters, tokens_bs: torch.Tensor, options: GPTOptions, documents: Documents
) -> torch.Tensor:
    """Output of the final norm."""
    x_bsh = _words(parameters, tokens_bs, options)
    if options.position_embedding_type == "learned_absolute":
        in_order = torch.arange(tokens_bs.shape[1])
        rows = in_order if documents.positions_bs is None else documents.positions_bs
        x_bsh = x_bsh + parameters["embedding.position_embeddings.weight"][rows]
    for index in range(options.num_layers):
        x_bsh = _layer(parameters, f"decoder.layers.{index}", index, x_bsh, options, documents)
    return _norm(parameters, "decoder.final_layernorm", x_bsh, options)


def _logits(parameters: Parameters, x_bsh: torch.Tensor, options: GPTOptions) -> torch.Tensor:
    tied, untied = "embedding.word_embeddings.weight", "output_layer.weight"
    logits_bsv = x_bsh @ parameters[tied if options.tie_embeddings else untied].T
    logits_bsv = options.logit_multiplier * logits_bsv
    cap = options.logit_softcap
    return cap * torch.tanh(logits_bsv / cap) if cap else logits_bsv


def _layer(
    parameters: Parameters,
    layer: str,
    index: int,
    x_bsh: torch.Tensor,
    options: GPTOptions,
    documents: Documents,
) -> torch.Tensor:
    input_bsh, input_normed_bsh = (
        x_bsh,
        _norm(parameters, f"{layer}.input_layernorm", x_bsh, options)
        if options.pre_layernorm
        else x_bsh,
    )
    attention = f"{layer}.self_attention"
    if options.multi_latent_attention:
        assert documents == WHOLE
        epsilon = options.latent_norm_epsilon or options.norm_epsilon
        of_latents = replace(options, norm_epsilon=epsilon)
        attended_bsh = plain_latent.attention(
            parameters,
            attention,
            input_normed_bsh,
            options,
            lambda name, x: _norm(parameters, name, x, of_latents),
        )
    else:
        attended_bsh = _attention(
            parameters, attention, index, input_normed_bsh, options, documents
        )
    if options.post_self_attn_layernorm:
        attended_bsh = _norm(parameters, f"{layer}.post_self_attn_layernorm", attended_bsh, options)
    normed_first = options.apply_residual_connection_post_layernorm
    x_bsh = input_normed_bsh if normed_first else input_bsh
    x_bsh = x_bsh + options.residual_multiplier * attended_bsh
    if not options.pre_layernorm:
        normed_bsh = x_bsh
    elif not options.parallel_attn:
        normed_bsh = _norm(parameters, f"{layer}.pre_mlp_layernorm", x_bsh, options)
    elif options.parallel_layernorm:
        normed_bsh = _norm(parameters, f"{layer}.pre_mlp_layernorm", input_bsh, options)
    else:
        normed_bsh = input_normed_bsh
    if has_experts(index, options):
        mlp_bsh = plain_experts.mixture(parameters, f"{layer}.mlp", normed_bsh, options, _mlp)
    else:
        mlp_bsh = _mlp(parameters, f"{layer}.mlp", normed_bsh, options)
    if options.post_mlp_layernorm:
        mlp_bsh = _norm(parameters, f"{layer}.post_mlp_layernorm", mlp_bsh, options)
    if normed_first and not options.parallel_attn:
        x_bsh = normed_bsh
    return x_bsh + options.residual_multiplier * mlp_bsh


def _linear(parameters: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ parameters[f"{name}.weight"].T
    bias = parameters.get(f"{name}.bias")
    return y if bias is None else y + bias


def _norm(parameters: Parameters, name: str, x: torch.Tensor, options: GPTOptions) -> torch.Tensor:
    if options.normalization == "LayerNorm":
        x = x - x.mean(dim=-1, keepdim=True)
    x = x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + options.norm_epsilon)
    x = x * (parameters[f"{name}.weight"] + (1 if options.apply_layernorm_1p else 0))
    bias = parameters.get(f"{name}.bias")
    return x if bias is None else x + bias


def _mlp(parameters: Parameters, name: str, x: torch.Tensor, options: GPTOptions) -> torch.Tensor:
    inner = _linear(parameters, f"{name}.linear_fc1", x)
    if options.swiglu:
        gate, up = inner.chunk(2, dim=-1)
        inner = gate * torch.sigmoid(gate) * up
    elif options.geglu:
        gate, up = inner.chunk(2, dim=-1)
        inner = F.gelu(gate, approximate="tanh") * up
    elif options.quick_geglu:
        gate, up = inner.chunk(2, dim=-1)
        most = options.activation_func_clamp_value
        if most is not None:
            gate = torch.where(gate > most, most, gate)
            up = torch.where(up > most, most, torch.where(up < -most, -most, up))
        inner = gate / (1 + torch.exp(-1.702 * gate)) * (up + options.glu_linear_offset)
    elif options.exact_gelu:
        inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
    elif options.relu:
        inner = torch.where(inner > 0, inner, 0.0)
    elif options.squared_relu:
        inner = torch.where(inner > 0, inner**2, 0.0)
    else:
        inner = F.gelu(inner, approximate="tanh")
    return _linear(parameters, f"{name}.linear_fc2", inner)


def _attention(
    parameters: Parameters,
    name: str,
    index: int,
    x_bsh: torch.Tensor,
    options: GPTOptions,
    documents: Documents,
) -> torch.Tensor:
    b, s, _ = x_bsh.shape
    g, d = options.num_query_groups, options.kv_channels
    r = options.num_attention_heads // g
    windowed = options.window_size is not None and _has(options.window_pattern, index, 1)
    qkv_bsgrd = _linear(parameters, f"{name}.linear_qkv", x_bsh).view(b, s, g, r + 2, d)
    q_bsgrd, k_bsgd, v_bsgd = qkv_bsgrd[:, :, :, :r], qkv_bsgrd[..., r, :], qkv_bsgrd[..., r + 1, :]
    rotates = options.position_embedding_type == "rope" and not _has(
        options.no_rope_pattern, index, 0
    )
    if rotates and options.qk_layernorm_after_rotation:
        q_bsgrd = _rotate(q_bsgrd, options, windowed)
        k_bsgd = _rotate(k_bsgd, options, windowed)
    if options.qk_layernorm:
        across = options.qk_layernorm_across_heads
        q_in, k_in = (q_bsgrd.flatten(2), k_bsgd.flatten(2)) if across else (q_bsgrd, k_bsgd)
        q_bsgrd = _norm(parameters, f"{name}.q_layernorm", q_in, options).view(b, s, g, r, d)
        k_bsgd = _norm(parameters, f"{name}.k_layernorm", k_in, options).view(b, s, g, d)
    if rotates and not options.qk_layernorm_after_rotation:
        q_bsgrd = _rotate(q_bsgrd, options, windowed)
        k_bsgd = _rotate(k_bsgd, options, windowed)
    scale = options.softmax_scale or 1 / math.sqrt(d)
    scores_bgrst = torch.einsum("bsgrd,btgd->bgrst", q_bsgrd, k_bsgd) * scale
    if options.attn_logit_softcapping:
        cap = options.attn_logit_softcapping
        scores_bgrst = cap * torch.tanh(scores_bgrst / cap)
    behind_st = torch.arange(s)[:, None] - torch.arange(s)
    if options.position_embedding_type == "alibi":
        slopes_gr = _slopes(g * r).view(g, r, 1, 1)
        scores_bgrst = scores_bgrst - (slopes_gr * behind_st).to(scores_bgrst.dtype)
    hidden_st = behind_st < 0
    if options.window_size is not None and windowed:
        hidden_st = hidden_st | (behind_st > options.window_size)
    scores_bgrst = scores_bgrst.masked_fill(hidden_st, -math.inf)
    if documents.starts_bs is not None:
        before_bst = torch.arange(s) < documents.starts_bs[:, :s, None]
        scores_bgrst = scores_bgrst.masked_fill(before_bst[:, None, None], -math.inf)
    if options.softmax_type != "vanilla":
        zeros_a = scores_bgrst.new_zeros(g * r)
        offset_a = parameters.get(f"{name}.softmax_offset", zeros_a)
        column = offset_a.view(g, r, 1, 1).expand(b, g, r, s, 1)
        scores_bgrst = torch.cat((scores_bgrst, column), -1)
    probabilities_bgrst = scores_bgrst.softmax(dim=-1)[..., :s]
    context_bsgrd = torch.einsum("bgrst,btgd->bsgrd", probabilities_bgrst, v_bsgd)
    return _linear(parameters, f"{name}.linear_proj", context_bsgrd.reshape(b, s, g * r * d))


def _has(pattern: tuple[int, ...], index: int, otherwise: int) -> bool:
    return bool(pattern[index % len(pattern)] if pattern else otherwise)


def _slopes(heads: int) -> torch.Tensor:
    """ALiBi's, as BLOOM has them: of other numbers than powers of two the rest lies in between."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float64)


def _rotate(x: torch.Tensor, options: GPTOptions, windowed: bool) -> torch.Tensor:
    """RoPE on x [b, s, ..., d]: component i of the rotated share turns with i + half of it."""
    width = int(options.kv_channels * options.rotary_percent)
    half = width // 2
    frequencies = plain_rotation.frequencies(options, half, x.shape[1], windowed=windowed)
    angles_si = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), frequencies)
    angles = angles_si.view(x.shape[1], *[1] * (x.dim() - 3), half)
    length = plain_rotation.length(options, windowed=windowed)
    cos, sin = (length * angles.cos()).to(x.dtype), (length * angles.sin()).to(x.dtype)
    turned, rest = x[..., :width], x[..., width:]
    if options.rotary_interleaved:
        first, second = turned.unflatten(-1, (half, 2)).unbind(-1)
    else:
        first, second = turned.chunk(2, dim=-1)
    ends = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(ends, dim=-1 if options.rotary_interleaved else -2)
    return torch.cat((joined.flatten(-2), rest), dim=-1)
