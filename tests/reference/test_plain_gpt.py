"""The plain GPT agrees with models put together from PyTorch's own modules and fused functions.

Shapes: b batch, s sequence, h hidden, g query groups, r query heads per group, a = g*r query
heads, d head width, V vocabulary.
"""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from reference.plain_gpt import (
    Documents,
    GPTOptions,
    Parameters,
    all_logits,
    logits,
    parameter_shapes,
    random_parameters,
)

LLAMA = GPTOptions(
    hidden_size=20,
    num_attention_heads=6,
    num_query_groups=2,
    kv_channels=8,
    position_embedding_type="rope",
    rotary_base=100,
    rotary_percent=0.5,
    normalization="RMSNorm",
    swiglu=True,
    qk_layernorm=True,
    add_bias_linear=False,
    tie_embeddings=False,
)
QWEN = dataclasses.replace(  # with a base at which every kind of frequency is among the pairs
    LLAMA,
    kv_channels=16,
    rotary_base=500_000,
    rotary_interleaved=True,
    use_rope_scaling=True,
    add_qkv_bias=True,
)


def random_tokens(options: GPTOptions, batch: int = 2, sequence: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(options.vocab_size, (batch, sequence), generator=generator)


def encoder_layer(
    parameters: Parameters, layer: str, options: GPTOptions
) -> torch.nn.TransformerEncoderLayer:
    """PyTorch's own pre-norm layer with the parameters of one layer of ours."""
    h, a, d = options.hidden_size, options.num_attention_heads, options.kv_channels
    module = torch.nn.TransformerEncoderLayer(
        h,
        a,
        options.ffn_hidden_size,
        dropout=0.0,
        activation=lambda x: (
            F.relu(x).square() if options.squared_relu else F.gelu(x, approximate="tanh")
        ),
        batch_first=True,
        norm_first=True,
        dtype=torch.float64,
    )

    def per_part(value: torch.Tensor) -> torch.Tensor:  # rows by head -> all q, all k, all v
        parts: torch.Tensor = value.unflatten(0, (a, 3, d))
        return parts.transpose(0, 1).flatten(0, 2)

    ours = {
        "self_attn.in_proj_": "self_attention.linear_qkv",
        "self_attn.out_proj.": "self_attention.linear_proj",
        "linear1.": "mlp.linear_fc1",
        "linear2.": "mlp.linear_fc2",
        "norm1.": "input_layernorm",
        "norm2.": "pre_mlp_layernorm",
    }
    state = {
        theirs + kind: parameters[f"{layer}.{name}.{kind}"]
        for theirs, name in ours.items()
        for kind in ("weight", "bias")
    }
    state |= {name: per_part(value) for name, value in state.items() if "in_proj" in name}
    module.load_state_dict(state)
    return module


@pytest.mark.parametrize("squared_relu", [False, True])
def test_gpt_equals_torch_encoder_layers_under_a_causal_mask(squared_relu: bool) -> None:
    options = GPTOptions(squared_relu=squared_relu)
    parameters = random_parameters(options)
    tokens_bs = random_tokens(options)
    s, h = tokens_bs.shape[1], options.hidden_size

    x_bsh = F.embedding(tokens_bs, parameters["embedding.word_embeddings.weight"])
    x_bsh = x_bsh + parameters["embedding.position_embeddings.weight"][:s]
    mask_ss = torch.nn.Transformer.generate_square_subsequent_mask(s, dtype=torch.float64)
    for index in range(options.num_layers):
        x_bsh = encoder_layer(parameters, f"decoder.layers.{index}", options)(x_bsh, mask_ss)
    weight_h, bias_h = (
        parameters[f"decoder.final_layernorm.{kind}"] for kind in ("weight", "bias")
    )
    x_bsh = F.layer_norm(x_bsh, (h,), weight_h, bias_h, eps=options.norm_epsilon)
    expected_bsv = F.linear(x_bsh, parameters["embedding.word_embeddings.weight"])

    torch.testing.assert_close(logits(parameters, tokens_bs, options), expected_bsv)


def test_further_tokens_are_predicted_from_the_tokens_before_them() -> None:
    options = GPTOptions(position_embedding_type="none", mtp_num_layers=2)
    parameters = random_parameters(options)
    tokens_bs = random_tokens(options)
    s, h = tokens_bs.shape[1], options.hidden_size
    table_vh = parameters["embedding.word_embeddings.weight"]

    def layers(x_bsh: torch.Tensor, *names: str) -> torch.Tensor:
        count = x_bsh.shape[1]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(count, dtype=torch.float64)
        for name in names:
            x_bsh = encoder_layer(parameters, name, options)(x_bsh, mask)
        return x_bsh

    def norm(x_bsh: torch.Tensor, name: str) -> torch.Tensor:
        weight_h, bias_h = (parameters[f"{name}.{kind}"] for kind in ("weight", "bias"))
        return F.layer_norm(x_bsh, (h,), weight_h, bias_h, eps=options.norm_epsilon)

    words_bsh = F.embedding(tokens_bs, table_vh)
    known_bsh = norm(
        layers(words_bsh, *(f"decoder.layers.{i}" for i in range(options.num_layers))),
        "decoder.final_layernorm",
    )
    found = all_logits(parameters, tokens_bs, options)
    torch.testing.assert_close(found[0], known_bsh @ table_vh.T)
    for depth in (1, 2):
        name = f"mtp.layers.{depth - 1}"
        words = norm(words_bsh[:, depth:], f"{name}.enorm")
        known = norm(known_bsh[:, : s - depth], f"{name}.hnorm")
        x_bsh = torch.cat([words, known], -1) @ parameters[f"{name}.eh_proj.weight"].T
        x_bsh = layers(x_bsh, f"{name}.transformer_layer")
        known_bsh = norm(x_bsh, f"{name}.final_layernorm")
        torch.testing.assert_close(found[depth], known_bsh @ table_vh.T)


def complex_rope(x_basd: torch.Tensor, width: int, o: GPTOptions) -> torch.Tensor:
    """RoPE as the product with exp(i t theta) of the pairs, which are complex numbers."""
    frequencies = 1 / o.rotary_base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    if o.use_rope_scaling:
        turns = 8192 * frequencies / (2 * math.pi)
        kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / o.rope_scaling_factor)
    angles = torch.outer(torch.arange(x_basd.shape[2], dtype=torch.float64), frequencies)
    turned, rest = x_basd[..., :width], x_basd[..., width:]
    if not o.rotary_interleaved:  # else they are neighbours already
        turned = turned.unflatten(-1, (2, width // 2)).transpose(-1, -2).flatten(-2)
    pairs = torch.view_as_complex(turned.unflatten(-1, (width // 2, 2)).contiguous())
    joined = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
    if not o.rotary_interleaved:
        joined = joined.transpose(-1, -2)
    return torch.cat((joined.flatten(-2), rest), dim=-1)


def llama_attention(p: Parameters, name: str, x_bsh: torch.Tensor, o: GPTOptions) -> torch.Tensor:
    """Grouped attention with normed and rotated heads, by PyTorch's fused functions."""
    r, g, d = o.num_attention_heads // o.num_query_groups, o.num_query_groups, o.kv_channels
    qkv = F.linear(x_bsh, p[f"{name}.linear_qkv.weight"], p.get(f"{name}.linear_qkv.bias"))
    q, k, v = (
        t.flatten(2, 3).transpose(1, 2)
        for t in qkv.unflatten(-1, (g, r + 2, d)).split([r, 1, 1], 3)
    )
    q = F.rms_norm(q, (d,), p[f"{name}.q_layernorm.weight"], o.norm_epsilon)
    k = F.rms_norm(k, (d,), p[f"{name}.k_layernorm.weight"], o.norm_epsilon)
    q, k = (complex_rope(t, d // 2, o) for t in (q, k))
    context_basd = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return context_basd.transpose(1, 2).flatten(2) @ p[f"{name}.linear_proj.weight"].T


@pytest.mark.parametrize("options", [LLAMA, QWEN], ids=["llama", "qwen"])
def test_llama_options_equal_fused_functions_and_complex_rotations(options: GPTOptions) -> None:
    p, tokens_bs = random_parameters(options), random_tokens(options)

    def rms_norm(x_bsh: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x_bsh, (options.hidden_size,), p[f"{name}.weight"], options.norm_epsilon)

    x_bsh = F.embedding(tokens_bs, p["embedding.word_embeddings.weight"])
    for index in range(options.num_layers):
        layer = f"decoder.layers.{index}"
        normed_bsh = rms_norm(x_bsh, f"{layer}.input_layernorm")
        x_bsh = x_bsh + llama_attention(p, f"{layer}.self_attention", normed_bsh, options)
        normed_bsh = rms_norm(x_bsh, f"{layer}.pre_mlp_layernorm")
        gate_fh, up_fh = p[f"{layer}.mlp.linear_fc1.weight"].split(options.ffn_hidden_size)
        inner = F.silu(normed_bsh @ gate_fh.T) * (normed_bsh @ up_fh.T)
        x_bsh = x_bsh + inner @ p[f"{layer}.mlp.linear_fc2.weight"].T
    expected_bsv = rms_norm(x_bsh, "decoder.final_layernorm") @ p["output_layer.weight"].T

    torch.testing.assert_close(logits(p, tokens_bs, options), expected_bsv)


@pytest.mark.parametrize("options", [GPTOptions(), LLAMA], ids=["gpt", "llama"])
def test_no_token_sees_a_later_one(options: GPTOptions) -> None:
    parameters, tokens_bs = random_parameters(options), random_tokens(options)
    changed_bs = tokens_bs.clone()
    changed_bs[:, 5] = (changed_bs[:, 5] + 1) % options.vocab_size

    before = logits(parameters, tokens_bs, options)
    after = logits(parameters, changed_bs, options)

    torch.testing.assert_close(after[:, :5], before[:, :5], rtol=0, atol=1e-12)
    assert ((after - before).abs().amax(dim=-1)[:, 5:] > 1e-6).all()


def test_soft_cap_bounds_the_logits_and_vanishes_when_it_is_far_away() -> None:
    options = GPTOptions()
    parameters, tokens_bs = random_parameters(options), random_tokens(options)
    free = logits(parameters, tokens_bs, options)

    near = logits(parameters, tokens_bs, dataclasses.replace(options, logit_softcap=0.5))
    far = logits(parameters, tokens_bs, dataclasses.replace(options, logit_softcap=1e6))

    assert free.abs().max() > 1
    assert near.abs().max() < 0.5
    torch.testing.assert_close(0.5 * torch.atanh(near / 0.5), free)
    torch.testing.assert_close(far, free)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("qk_layernorm", [False, True])
@pytest.mark.parametrize("biases", ["none", "qkv", "all"])
@pytest.mark.parametrize("position_embedding_type", ["learned_absolute", "rope"])
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_every_parameter_matters_under_every_option(
    normalization: str,
    qk_layernorm: bool,
    biases: str,
    position_embedding_type: str,
    tie_embeddings: bool,
) -> None:
    options = GPTOptions(
        normalization=normalization,
        qk_layernorm=qk_layernorm,
        add_bias_linear=biases == "all",
        add_qkv_bias=biases == "qkv",
        position_embedding_type=position_embedding_type,
        tie_embeddings=tie_embeddings,
    )
    parameters = random_parameters(options)
    leaves = {name: value.requires_grad_() for name, value in parameters.items()}
    tokens_bs = random_tokens(options)

    logits(leaves, tokens_bs, options).pow(2).sum().backward()

    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    shapes = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
    assert shapes == parameter_shapes(options)
    idle = {name for name, gradient in gradients.items() if gradient.abs().max() < 1e-8}
    # A shift common to all unrotated keys moves all scores of a query alike: softmax ignores it.
    shifts = {name for name in shapes if name.endswith("k_layernorm.bias")}
    assert idle == (shifts if position_embedding_type == "learned_absolute" else set())


@pytest.mark.parametrize("kind", ["learned_absolute", "rope", "alibi"])
def test_documents_of_a_sample_are_samples_of_their_own(kind: str) -> None:
    """Also where a window reaches into the document before, and where a document is one token."""
    options = GPTOptions(position_embedding_type=kind, window_size=2)
    parameters, tokens = random_parameters(options), random_tokens(options, batch=1)
    starts = torch.tensor([[0, 0, 2, 3, 3, 3, 3, 3, 8]])
    documents = Documents(starts, torch.arange(9) - starts)
    found = logits(parameters, tokens, options, documents)
    for begin, end in ((0, 2), (2, 3), (3, 8), (8, 9)):
        alone = logits(parameters, tokens[:, begin:end], options)
        torch.testing.assert_close(found[:, begin:end], alone)
