"""How attention without sinks becomes attention with them: from its output and its log-sum-exp.

A sink is one more key of every query, with a score of its own and without a value. So it multiplies
the output of a query by the share of the other keys,

    f = sigmoid(log-sum-exp of the scores - sink)

The backward of flash attention forms the probabilities again, from the log-sum-exp that it is
given, and reads the output. With the log-sum-exp of all keys, the sink among them, and the output
after its factor f, these are the probabilities and the output of attention with sinks. So a
backward that knows no sinks returns exact gradients of queries, keys and values.

Shapes: ``...`` any leading dimensions; a query heads, s queries, d channels of a head.
"""

import torch
from torch import Tensor


def with_sinks(out_asd: Tensor, log_as: Tensor, sinks_a: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of attention with sinks.

    Args:
        out_asd: output [..., a, s, d] without sinks.
        log_as: logarithms of the sums of exponentials of the scores [..., a, s], a statistic.
        sinks_a: the sinks' scores, in any type.
    """
    all_as = torch.logaddexp(log_as, sinks_a.to(log_as.dtype).unsqueeze(-1))
    share_as1 = (log_as - all_as).exp_().unsqueeze(-1)
    return (out_asd * share_as1).to(out_asd.dtype), all_as


def sinks_gradient(grad_asd: Tensor, out_asd: Tensor, log_as: Tensor, sinks_a: Tensor) -> Tensor:
    """Return the gradient of the sinks, in their type.

    Args:
        grad_asd: gradient of the output.
        out_asd: output of attention with sinks, as ``with_sinks`` returns it.
        log_as: the log-sum-exp that ``with_sinks`` returns.
        sinks_a: as for ``with_sinks``.
    """
    sunk_as = (sinks_a.to(log_as.dtype).unsqueeze(-1) - log_as).exp_()
    lost_as = sunk_as * (grad_asd.to(sunk_as.dtype) * out_asd).sum(-1)
    lost_a: Tensor = lost_as.movedim(-2, 0).flatten(1).sum(1)
    return -lost_a.to(sinks_a.dtype)
