"""Checks that tensor-parallel ranks can share a model: heads, MLP and sequence cut evenly."""

from collections.abc import Iterator

from megatron.model.settings import ModelSettings


def faults_of_cut(config: ModelSettings, ranks: int, *, sequence_parallel: bool) -> Iterator[str]:
    """Yield a message, with the flag and the way out, for every size that does not cut evenly.

    The width of experts is left out: experts may be spread over ranks in another way.

    Query groups are not copied to several ranks. As in Megatron, their number must be a multiple of
    the number of ranks.

    Args:
        config: the model.
        ranks: tensor-parallel ranks t.
        sequence_parallel: whether each rank has its own part of the sequence.
    """
    grouped = config.attention.num_query_groups < config.attention.num_attention_heads
    heads = "--num-query-groups" if grouped else "--num-attention-heads"
    has_experts = [config.experts.in_layer(layer) for layer in range(config.num_layers)]
    cuts = [(heads, config.attention.num_query_groups)]
    if not all(has_experts):
        cuts.append(("--ffn-hidden-size", config.mlp.ffn_hidden_size))
    if any(has_experts):
        shared = config.experts.moe_shared_expert_intermediate_size
        cuts.append(("--moe-shared-expert-intermediate-size", shared))
    if sequence_parallel:
        cuts.append(("--seq-length", config.seq_length))
    for flag, length in cuts:
        if length % ranks:
            yield (
                f"--tensor-model-parallel-size {ranks} does not divide {flag} {length}: "
                f"they share it evenly, so choose a multiple of {ranks}, or fewer ranks"
            )
