"""What a rank keeps of one microbatch for the backward of its layers, in bytes.

Layers are those of a ``Shape``; where they compute themselves again in the backward, they keep
less until then (``recomputed.py``). Activations are fp16 or bf16.
"""

from megatron.simulator.costs.shape import ACTIVATION_BYTES, Shape


def layer_activation_bytes(shape: Shape) -> float:
    """Return the bytes that a layer needs for its backward, kept or computed again.

    A layer needs the inputs of both norms, of the four linear layers and of the activation
    function, unless ``output_slope``; query, key and value; and the masks of the dropouts
    (arXiv 2205.05198, section 4.1; flash attention saves its 5as/h). Of a plain GPT, 10 of the
    34 bytes per element lie outside of attention and MLP.

    Args:
        shape: the model and one microbatch.
    """
    width = 2 * shape.rank_query_width + shape.rank_key_value_width
    masks = 2 if shape.dropout else 0
    outside = shape.stream_inputs * ACTIVATION_BYTES + masks
    outside += shape.norm_inputs * ACTIVATION_BYTES if shape.wide_stream else 0
    whole = ACTIVATION_BYTES * shape.tokens * width + outside * shape.own_elements
    return whole + _core_bytes(shape) + mlp_bytes(shape) + _narrowed(shape, kept=True)


def layer_repeated_bytes(shape: Shape) -> float:
    """Return the bytes among these that are not kept where parts of layers are computed again.

    Args:
        shape: the model and one microbatch.
    """
    again = shape.recomputed
    norms = shape.norms * ACTIVATION_BYTES * shape.own_elements if again.norms else 0
    core = _core_bytes(shape) if again.core else 0
    parts = norms + core + (mlp_bytes(shape) if again.mlp else 0)
    return parts + _narrowed(shape, kept=False)


def layer_factor_bytes(shape: Shape) -> float:
    """Return the bytes that a layer holds between its B and its W.

    Both factors of four products: inputs, and gradients of outputs.

    Args:
        shape: the model and one microbatch.
    """
    in_attention = 2 * shape.rank_query_width + shape.rank_key_value_width
    width = in_attention + shape.rank_ffn_width + shape.inner_width
    whole = ACTIVATION_BYTES * (shape.tokens * width + 4 * shape.own_elements)
    narrowed = shape.narrow_share * shape.narrow_factors
    norms = ACTIVATION_BYTES * shape.own_elements * shape.recomputed.norms  # stay as they are
    return whole - narrowed * (whole / 2 - norms)


def depth_activation_bytes(shape: Shape) -> float:
    """Return the bytes that a depth of multi-token prediction keeps from F to B.

    Its input, both inputs of the product that joins, its layer's, and the final norm's input;
    the word embeddings in addition where they were changed. If B computes it again, its input.

    Args:
        shape: the model and one microbatch.
    """
    known = ACTIVATION_BYTES * shape.own_elements
    if shape.repeats_depths:
        return known
    layer = layer_activation_bytes(shape) - layer_repeated_bytes(shape)
    joined = shape.narrow_share * shape.narrow_factors * known
    return (3 + shape.changes_words) * known - joined + layer + shape.stream_bytes


def depth_factor_bytes(shape: Shape) -> float:
    """Return the bytes that a depth holds between its B and its W.

    Args:
        shape: the model and one microbatch.
    """
    narrowed = 1 - shape.narrow_share * shape.narrow_factors / 2
    return layer_factor_bytes(shape) + 3 * ACTIVATION_BYTES * shape.own_elements * narrowed


def stage_activation_bytes(shape: Shape, layers: int) -> float:
    """Return the bytes that a stage's layers keep from F to B.

    Of layers that are computed again together, only the input of the first is kept.

    Args:
        shape: the model and one microbatch.
        layers: of the stage.
    """
    whole = shape.recomputed.layers(layers)
    inputs = shape.stream_bytes * shape.recomputed.groups(layers)
    return inputs + (layers - whole) * (layer_activation_bytes(shape) - layer_repeated_bytes(shape))


def stage_recomputed_bytes(shape: Shape, layers: int) -> float:
    """Return the bytes that a stage's R leaves for B beside what F kept.

    Args:
        shape: the model and one microbatch.
        layers: of the stage.
    """
    whole = shape.recomputed.layers(layers)
    inputs = shape.stream_bytes * shape.recomputed.groups(layers)
    return max(0.0, whole * layer_activation_bytes(shape) - inputs)


def stage_repeated_bytes(shape: Shape, layers: int) -> float:
    """Return the most bytes by which a stage's B exceeds what F kept, having computed them.

    Layers that are not computed again come first in the backward, and are gone by then.

    Args:
        shape: the model and one microbatch.
        layers: of the stage.
    """
    whole = shape.recomputed.layers(layers)
    together = min(shape.recomputed.group, whole)
    if not together:
        others = (shape.norms - 1) * shape.recomputed.norms  # one after the other is made again
        at_once = layer_repeated_bytes(shape) - others * ACTIVATION_BYTES * shape.own_elements
        return max(0.0, at_once) if layers else 0.0
    again = (together - (layers - whole)) * layer_activation_bytes(shape)
    return max(0.0, again - shape.stream_bytes)


def depth_repeated_bytes(shape: Shape) -> float:
    """Return the bytes by which a depth exceeds in B what F kept of it, having computed it again.

    Args:
        shape: the model and one microbatch.
    """
    if not (shape.depths and shape.repeats_depths):
        return 0.0
    beside = (2 + shape.changes_words) * ACTIVATION_BYTES * shape.own_elements
    return beside + layer_activation_bytes(shape) + shape.stream_bytes


def _narrowed(shape: Shape, *, kept: bool) -> float:
    """Return the bytes more of what a layer keeps, or repeats, because it multiplies in 8 bits.

    An input that nobody else needs has half the bytes. Attention, squared ReLU and layers that
    are computed again keep theirs as well; then 8 bits are added.
    """
    if not shape.narrow_factors:
        return 0.0
    again, own = shape.recomputed, shape.own_elements
    attended = float(shape.tokens * shape.rank_query_width)
    inner = float(shape.tokens * shape.rank_ffn_width) * (1 if shape.output_slope else -1)
    if not kept:
        repeated = ACTIVATION_BYTES * attended * again.core + (inner + own) * again.mlp
        return shape.narrow_share * repeated
    norms = 0.0 if again.norms else 2 * own * (1 - shape.norms + again.mlp)
    return shape.narrow_share * (norms + attended + inner)


def _core_bytes(shape: Shape) -> float:
    """Return what attention keeps between its projections besides their output and input.

    Where a sequence is shared, those are the keys and values of all ranks in place of its own,
    and the outputs of two chunks apart. The projection's output itself is then needed for
    queries that are taken from it as they are, or for norms. Queries of several groups lie apart in
    it, so they are copied.
    """
    queries, keys_values = shape.rank_query_width, shape.rank_key_value_width
    heads = shape.num_attention_heads // shape.tensor.ranks
    groups = heads * keys_values // (2 * queries)
    own = queries if 1 < groups < heads else 0
    if shape.own_queries:
        own = queries + keys_values // 2
    if shape.context > 1:
        own = queries
        if shape.own_queries:
            own += queries if shape.normed_queries else -keys_values
    stored = 5 * heads * shape.seq_length if shape.kept == "all" else 0
    return float(shape.tokens * (ACTIVATION_BYTES * own + stored) + shape.gathered_bytes)


def mlp_bytes(shape: Shape) -> float:
    """Return the bytes that a layer's MLP keeps besides its input.

    Args:
        shape: the model and one microbatch.
    """
    inner = 3 if shape.gated_mlp else 1 if shape.output_slope else 2
    return float(ACTIVATION_BYTES * shape.tokens * inner * shape.rank_ffn_width)
