"""The FLOPs of a model, which define MFU, and the FLOPs of the layers on a part of a sample."""

from collections import Counter
from functools import lru_cache

from megatron.model.settings import ModelSettings


def iteration_flops(config: ModelSettings, samples: int) -> int:
    """Return the FLOPs of a replica's iteration, without recomputation (arXiv 2411.05288).

    Only matrix products count, and the backward counts twice the forward. For a GPT with an MLP of
    width ffn and B samples, the FLOPs are

        3 (2 BshV + L (8 Bsh^2 + 4 Bs^2 h + 4 Bsh ffn)).

    Attention counts in full, as if it were not causal; Megatron-LM counts half of it. Positions
    that a window hides do not count; in line with full attention, the window is counted in both
    directions. V is the real vocabulary, because padding is no useful work. Every further predicted
    token adds a layer like the last, a product [n, 2h] x [2h, h] and the output layer. A mixture of
    experts counts with its router and the experts that a token passes, and multi-latent attention
    with the true widths of its latents, keys and values.

    Args:
        config: the model.
        samples: number of samples of the iteration.
    """
    h, tokens, depths = (
        config.hidden_size,
        samples * config.seq_length,
        config.further.mtp_num_layers,
    )
    layers = [*range(config.num_layers), *[config.num_layers - 1] * depths]
    inner = sum(_inner_width(config, layer) for layer in layers)
    products = 2 * tokens * (len(layers) * _attention_weights(config) + h * inner)
    scores = sum(_positions_seen(config, layer) for layer in layers)
    attention = 2 * samples * _score_width(config) * scores
    output = 2 * tokens * h * config.vocab_size
    joining = 4 * tokens * h * h
    return 3 * (products + attention + depths * joining + (1 + depths) * output)


def layers_flops(config: ModelSettings, tokens: int) -> int:
    """Return the FLOPs of all layers' forward on the first ``tokens`` tokens of a sample.

    Scores of later positions are not among them, as in kernels for causal attention.
    """
    products, windows = _of_layers(config)
    scores = sum(layers * _causal_scores(tokens, window) for window, layers in windows)
    return products * tokens + 2 * _score_width(config) * scores


@lru_cache(64)
def _of_layers(config: ModelSettings) -> tuple[int, tuple[tuple[int | None, int], ...]]:
    """Return the FLOPs of a token in all layers but for scores, and the layers of each window."""
    h, layers = config.hidden_size, range(config.num_layers)
    inner = sum(_inner_width(config, layer) for layer in layers)
    products = 2 * (len(layers) * _attention_weights(config) + h * inner)
    return products, tuple(Counter(map(config.window_of, layers)).items())


def _causal_scores(tokens: int, window: int | None) -> int:
    """Return the number of (query, key) pairs of the first tokens without later keys."""
    beginning = tokens if window is None else min(tokens, window + 1)
    rest = tokens - beginning  # queries that see as many keys as the last of the beginning
    return beginning * (beginning + 1) // 2 + rest * beginning


def _attention_weights(config: ModelSettings) -> int:
    """Return the number of weights by which attention multiplies a token."""
    h, a = config.hidden_size, config.attention.num_attention_heads
    if not config.latent.multi_latent_attention:
        return h * (2 * a + 2 * config.attention.num_query_groups) * config.attention.kv_channels
    keys, values, rank = (
        config.attention.kv_channels,
        config.latent.v_head_dim,
        config.latent.q_lora_rank,
    )
    queries = h * a * keys if rank is None else rank * (h + a * keys)
    down = h * (config.latent.kv_lora_rank + config.latent.qk_pos_emb_head_dim)
    up = config.latent.kv_lora_rank * a * (config.latent.qk_head_dim + values)
    return queries + down + up + a * values * h


def _score_width(config: ModelSettings) -> int:
    """Return the channels of keys and values of all heads that a query is multiplied by."""
    values = (
        config.latent.v_head_dim
        if config.latent.multi_latent_attention
        else config.attention.kv_channels
    )
    return config.attention.num_attention_heads * (config.attention.kv_channels + values)


def _inner_width(config: ModelSettings, layer: int) -> int:
    """Return w such that the MLP's products cost 2 h w FLOPs for a token, router included."""
    matrices = 3 if config.mlp.is_gated else 2
    if not config.experts.in_layer(layer):
        return matrices * config.mlp.ffn_hidden_size
    shared = config.experts.moe_shared_expert_intermediate_size
    passed = config.experts.moe_router_topk * config.experts.moe_ffn_hidden_size + shared
    return matrices * passed + config.experts.num_experts + config.experts.moe_shared_expert_gate


def _positions_seen(config: ModelSettings, layer: int) -> int:
    """Return the number of (query, position) pairs in a sample, later positions included."""
    s, window = config.seq_length, config.window_of(layer)
    hidden = 0 if window is None or window >= s - 1 else (s - window) * (s - window - 1)
    return s * s - hidden
