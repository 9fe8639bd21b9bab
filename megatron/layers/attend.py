"""Attention of a rank's queries, whichever way the rank has its sequence.

A rank may have whole samples, its part of every sample (context parallelism), one slice of a
microbatch at a time, or its part of that slice. Every kind of attention layer calls ``attend`` and
does not ask which holds.

Shapes: b batch, u tokens that the pass has on this rank, a query heads, g key/value heads, d
channels of a head.
"""

from torch import Tensor

from megatron.kernels.attention_options import AttentionOptions
from megatron.layers.attention_call import AttentionCall, Heads
from megatron.layers.context_attention import context_attention
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.site import Site


def attend(
    site: Site,
    forward_pass: ForwardPass,
    heads: Heads,
    options: AttentionOptions,
) -> tuple[Tensor, ...]:
    """Return causal attention of this rank's queries.

    Args:
        site: the kernels, and the ranks that share sequences.
        forward_pass: the slice of the microbatch, if it is cut.
        heads: queries, keys and values of the tokens that the pass has on this rank.
        options: of all query heads and of whole samples; see ``Kernels.causal_attention``.

    Returns:
        The attention in parts of consecutive tokens, [b, u, a, d] each, in order. The kernels may
        keep every part for the backward; so to keep all parts as one tensor would keep them twice.
    """
    call = AttentionCall(site.kernels, options, forward_pass.sliced, forward_pass.layer)
    if site.context.size > 1:
        return context_attention(site.context, heads, call)
    return (call.of_all_tokens(heads),)
