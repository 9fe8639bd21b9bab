"""The shape of a model, from which the simulator counts FLOPs and bytes."""

from dataclasses import replace

from megatron.config.run_config import ParallelConfig, RunConfig
from megatron.layers.recompute import NO_RECOMPUTATION, Recomputation
from megatron.model.config import ModelConfig
from megatron.simulator.costs.machines import ONE_MACHINE, Machines
from megatron.simulator.costs.recomputed import Recomputed
from megatron.simulator.costs.replicas import Link
from megatron.simulator.costs.shape import Shape, TensorSplit


def shape_of(
    model: ModelConfig,
    micro_batch_size: int,
    recomputation: Recomputation = NO_RECOMPUTATION,
) -> Shape:
    """Return the shape from which the simulator counts FLOPs and bytes.

    Args:
        model: the whole model.
        micro_batch_size: samples of a microbatch.
        recomputation: what the backward of its layers computes again.
    """
    parts = recomputation.parts
    return Shape(
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        seq_length=model.seq_length,
        vocab_size=model.vocab_size,
        micro_batch_size=micro_batch_size,
        ffn_hidden_size=model.ffn_hidden_size,
        query_width=model.num_attention_heads * model.kv_channels,
        key_value_width=2 * model.num_query_groups * model.kv_channels,
        gated_mlp=model.gated_mlp,
        output_slope=model.activation == "squared_relu",
        vector_parameters=_vector_parameters(model),
        cut_vector_parameters=_cut_vector_parameters(model),
        own_queries=model.qk_layernorm or model.position_embedding_type == "rope",
        normed_queries=model.qk_layernorm,
        dropout=model.hidden_dropout > 0,
        stream_inputs=_stream_inputs(model),
        norms=_norms_before(model),
        norm_inputs=1 if model.parallel_attn else 2,
        norm_after_mlp=model.post_mlp_layernorm,
        windows=_windows(model),
        depths=model.mtp_num_layers,
        depth_vector_parameters=3 * _norm_parameters(model),
        changes_words=model.embedding_multiplier != 1 or model.hidden_dropout > 0,
        recomputed=Recomputed(
            core="core_attn" in parts,
            norms="layernorm" in parts,
            mlp="mlp" in parts,
            group=recomputation.group,
            most=recomputation.most,
        ),
    )


def shape_of_run(config: RunConfig) -> Shape:
    """Return the shape of a run's model and microbatches, as one of its ranks has them."""
    train, parallel = config.train, config.parallel
    own = train.eight_bits
    return replace(
        shape_of(config.model, train.micro_batch_size, train.recomputation),
        tensor=TensorSplit(parallel.tensor_size, parallel.sequence_parallel),
        vocab_recompute=train.vocab_recompute,
        wide_stream=train.wide_stream,
        context=parallel.context_size,
        narrow=None
        if own is None
        else range(own.wide_first, config.model.num_layers - own.wide_last),
        narrow_factors=own is None or not own.wide_weight_gradients,
    )


def machines_of(parallel: ParallelConfig, network: Link | None) -> Machines:
    """Return the machines of a run.

    Args:
        parallel: its layout, and how many ranks a machine has.
        network: what connects the machines, in any unit of time; ``None``: not known.
    """
    if network is None:
        return ONE_MACHINE
    found = parallel.placement
    return Machines(network, found.crossing, found.tensor, found.context)


def _windows(model: ModelConfig) -> tuple[int | None, ...]:
    """How many earlier positions every layer sees; empty if all layers see all."""
    windows = tuple(model.window_of(layer) for layer in range(model.num_layers))
    return windows if any(window is not None for window in windows) else ()


def _stream_inputs(model: ModelConfig) -> int:
    """Activations as wide as the residual stream that a layer keeps.

    Inputs of norms, of attention and of the MLP are different ones if the two follow each other.
    Side by side, their norms read the same, and with one norm they read the same too.
    """
    around = 4
    if model.parallel_attn:
        around = 3 if model.parallel_layernorm else 2
    return around + _norms_behind(model)


def _norms_before(model: ModelConfig) -> int:
    """Norms that attention and the MLP read."""
    return 1 if model.parallel_attn and not model.parallel_layernorm else 2


def _norms_behind(model: ModelConfig) -> int:
    """Norms of what a layer's branches add to the residual stream."""
    return model.post_self_attn_layernorm + model.post_mlp_layernorm


def _vector_parameters(model: ModelConfig) -> int:
    """Parameters of a layer's norms, and of the biases that follow its sums."""
    h, d = model.hidden_size, model.kv_channels
    heads = 2 * _norm_parameters(model, d) if model.qk_layernorm else 0
    norms = (_norms_before(model) + _norms_behind(model)) * _norm_parameters(model)
    return norms + heads + (2 * h if model.add_bias_linear else 0)


def _norm_parameters(model: ModelConfig, width: int | None = None) -> int:
    """Parameters of a norm, by default of one over the residual stream."""
    return (width or model.hidden_size) * (2 if model.normalization == "LayerNorm" else 1)


def _cut_vector_parameters(model: ModelConfig) -> int:
    """Parameters of the biases of heads, and of the MLP within."""
    biases = 0
    if model.add_bias_linear or model.add_qkv_bias:
        biases += (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels
    if model.add_bias_linear:
        biases += model.ffn_hidden_size * (2 if model.gated_mlp else 1)
    return biases
