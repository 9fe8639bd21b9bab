"""A GPT written out as the textbooks have it, against which the real one is compared.

One process, the whole vocabulary, torch's autograd, and no line shared with the package under
test. The model is a function of a dict of parameters under Megatron's names, so that the gradient
of any parameter can be compared by its name.

Shapes: b batch, s sequence, h hidden, g query groups, r query heads per group, a = g*r query
heads, d head width, f MLP width, V vocabulary; n = b*s tokens.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)

Parameters = dict[str, torch.Tensor]


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
        position_embedding_type: ``learned_absolute`` or ``rope``.
        rotary_base: RoPE theta.
        rotary_percent: share of each head that is rotated.
        rotary_interleaved: components 2i and 2i + 1 turn together.
        use_rope_scaling: Llama 3.1 slows the low frequencies down.
        rope_scaling_factor: by how much it slows the lowest down.
        normalization: ``LayerNorm`` or ``RMSNorm``.
        norm_epsilon: epsilon of every norm.
        swiglu: ``silu(gate) * up``, the gate being the first half of `linear_fc1`; else GELU in
            its tanh form.
        squared_relu: ``max(x, 0)^2`` instead of GELU.
        qk_layernorm: normalise queries and keys per head, before they are rotated.
        add_bias_linear: biases in the four linear layers of a block.
        add_qkv_bias: a bias in ``linear_qkv`` in any case.
        tie_embeddings: the output layer uses the embedding's matrix.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        z_loss_coeff: weight of each token's squared log-sum-exp.
        logit_softcap: c of ``c * tanh(logit / c)``; 0 switches it off.
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
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    swiglu: bool = False
    squared_relu: bool = False
    qk_layernorm: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    tie_embeddings: bool = True
    label_smoothing: float = 0.0
    z_loss_coeff: float = 0.0
    logit_softcap: float = 0.0


def parameter_shapes(options: GPTOptions) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the order of the forward.

    Rows of ``linear_qkv`` come by query group: the group's query heads, its key, its value.
    """
    h, d = options.hidden_size, options.kv_channels
    a, g = options.num_attention_heads, options.num_query_groups
    fc1_rows = options.ffn_hidden_size * (2 if options.swiglu else 1)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (options.vocab_size, h)
    }

    def add_norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"] = (width,)
        if options.normalization == "LayerNorm":
            shapes[f"{name}.bias"] = (width,)

    def add_linear(name: str, rows: int, columns: int) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if options.add_bias_linear or (options.add_qkv_bias and name.endswith("linear_qkv")):
            shapes[f"{name}.bias"] = (rows,)

    shapes["embedding.word_embeddings.weight"] = (options.vocab_size, h)
    if options.position_embedding_type == "learned_absolute":
        shapes["embedding.position_embeddings.weight"] = (options.max_position_embeddings, h)
    for index in range(options.num_layers):
        layer = f"decoder.layers.{index}"
        add_norm(f"{layer}.input_layernorm", h)
        add_linear(f"{layer}.self_attention.linear_qkv", (a + 2 * g) * d, h)
        if options.qk_layernorm:
            add_norm(f"{layer}.self_attention.q_layernorm", d)
            add_norm(f"{layer}.self_attention.k_layernorm", d)
        add_linear(f"{layer}.self_attention.linear_proj", h, a * d)
        add_norm(f"{layer}.pre_mlp_layernorm", h)
        add_linear(f"{layer}.mlp.linear_fc1", fc1_rows, h)
        add_linear(f"{layer}.mlp.linear_fc2", h, options.ffn_hidden_size)
    add_norm("decoder.final_layernorm", h)
    if not options.tie_embeddings:
        shapes["output_layer.weight"] = (options.vocab_size, h)
    return shapes


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


def logits(parameters: Parameters, tokens_bs: torch.Tensor, options: GPTOptions) -> torch.Tensor:
    """Capped logits [b, s, V] in the dtype of the parameters."""
    x_bsh = parameters["embedding.word_embeddings.weight"][tokens_bs]
    if options.position_embedding_type == "learned_absolute":
        x_bsh = x_bsh + parameters["embedding.position_embeddings.weight"][: tokens_bs.shape[1]]
    for index in range(options.num_layers):
        layer = f"decoder.layers.{index}"
        normed_bsh = _norm(parameters, f"{layer}.input_layernorm", x_bsh, options)
        x_bsh = x_bsh + _attention(parameters, f"{layer}.self_attention", normed_bsh, options)
        normed_bsh = _norm(parameters, f"{layer}.pre_mlp_layernorm", x_bsh, options)
        x_bsh = x_bsh + _mlp(parameters, f"{layer}.mlp", normed_bsh, options)
    x_bsh = _norm(parameters, "decoder.final_layernorm", x_bsh, options)
    tied, untied = "embedding.word_embeddings.weight", "output_layer.weight"
    logits_bsv = x_bsh @ parameters[tied if options.tie_embeddings else untied].T
    cap = options.logit_softcap
    return cap * torch.tanh(logits_bsv / cap) if cap else logits_bsv


def _linear(parameters: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ parameters[f"{name}.weight"].T
    bias = parameters.get(f"{name}.bias")
    return y if bias is None else y + bias


def _norm(parameters: Parameters, name: str, x: torch.Tensor, options: GPTOptions) -> torch.Tensor:
    if options.normalization == "LayerNorm":
        x = x - x.mean(dim=-1, keepdim=True)
    x = x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + options.norm_epsilon)
    x = x * parameters[f"{name}.weight"]
    return x + parameters[f"{name}.bias"] if options.normalization == "LayerNorm" else x


def _mlp(parameters: Parameters, name: str, x: torch.Tensor, options: GPTOptions) -> torch.Tensor:
    inner = _linear(parameters, f"{name}.linear_fc1", x)
    if options.swiglu:
        gate, up = inner.chunk(2, dim=-1)
        inner = gate * torch.sigmoid(gate) * up
    elif options.squared_relu:
        inner = torch.where(inner > 0, inner**2, 0.0)
    else:
        inner = F.gelu(inner, approximate="tanh")
    return _linear(parameters, f"{name}.linear_fc2", inner)


def _attention(
    parameters: Parameters, name: str, x_bsh: torch.Tensor, options: GPTOptions
) -> torch.Tensor:
    b, s, _ = x_bsh.shape
    g, d = options.num_query_groups, options.kv_channels
    r = options.num_attention_heads // g
    qkv_bsgrd = _linear(parameters, f"{name}.linear_qkv", x_bsh).view(b, s, g, r + 2, d)
    q_bsgrd, k_bsgd, v_bsgd = qkv_bsgrd[:, :, :, :r], qkv_bsgrd[..., r, :], qkv_bsgrd[..., r + 1, :]
    if options.qk_layernorm:
        q_bsgrd = _norm(parameters, f"{name}.q_layernorm", q_bsgrd, options)
        k_bsgd = _norm(parameters, f"{name}.k_layernorm", k_bsgd, options)
    if options.position_embedding_type == "rope":
        q_bsgrd, k_bsgd = _rotate(q_bsgrd, options), _rotate(k_bsgd, options)
    scores_bgrst = torch.einsum("bsgrd,btgd->bgrst", q_bsgrd, k_bsgd) / math.sqrt(d)
    future_st = torch.ones(s, s, dtype=torch.bool).triu(diagonal=1)
    probabilities_bgrst = scores_bgrst.masked_fill(future_st, -math.inf).softmax(dim=-1)
    context_bsgrd = torch.einsum("bgrst,btgd->bsgrd", probabilities_bgrst, v_bsgd)
    return _linear(parameters, f"{name}.linear_proj", context_bsgrd.reshape(b, s, g * r * d))


def _rotate(x: torch.Tensor, options: GPTOptions) -> torch.Tensor:
    """RoPE on x [b, s, ..., d]: component i of the rotated share turns with i + half of it."""
    width = int(options.kv_channels * options.rotary_percent)
    half = width // 2
    frequencies = _frequencies(half, options)
    angles_si = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), frequencies)
    angles = angles_si.view(x.shape[1], *[1] * (x.dim() - 3), half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    turned, rest = x[..., :width], x[..., width:]
    if options.rotary_interleaved:
        first, second = turned.unflatten(-1, (half, 2)).unbind(-1)
    else:
        first, second = turned.chunk(2, dim=-1)
    ends = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(ends, dim=-1 if options.rotary_interleaved else -2)
    return torch.cat((joined.flatten(-2), rest), dim=-1)


def _frequencies(half: int, options: GPTOptions) -> torch.Tensor:
    """Turns in radians per position of the pairs, scaled by wavelength as Llama 3.1 says."""
    frequencies = []
    for index in range(half):
        frequency = options.rotary_base ** (-index / half)
        wavelength = 2 * math.pi / frequency
        if options.use_rope_scaling and wavelength > 8192 / 4:
            slow = frequency / options.rope_scaling_factor
            share = (8192 / wavelength - 1) / (4 - 1)
            frequency = slow if wavelength > 8192 else (1 - share) * slow + share * frequency
        frequencies.append(frequency)
    return torch.tensor(frequencies, dtype=torch.float64)
