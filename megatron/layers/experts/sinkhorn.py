"""Balanced choices by Sinkhorn's algorithm, as in Megatron (S-BASE, arXiv 2202.01169).

Exponentials of logits are scaled by a factor for every token and a factor for every expert, until
every token and every expert has the same sum. Tokens then choose by the scaled scores.

Shapes: n tokens, e experts.
"""

from collections.abc import Callable
from typing import Final

from torch import Tensor

TOLERANCE: Final = 1e-4
"""Scaling ends when the factors of experts change by less in the mean."""

MOST_ROUNDS: Final = 100
"""Scaling ends after so many rounds, because factors of hardly liked experts may never settle."""

ASSUMED_ROUNDS: Final = 8
"""Rounds where work is counted, without values. With 4,096 tokens and 8 to 128 experts, random
logits needed 4 to 6 rounds if their standard deviation was 1.3, and 9 to 16 if it was 3."""

_LEAST: Final = 1e-8


def balanced(logits_ne: Tensor, tokens: int, over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """Return scaled scores; the host waits for every round.

    Args:
        logits_ne: of this rank's tokens, fp32 or wider.
        tokens: number of tokens on all ranks that ``over_ranks`` adds up.
        over_ranks: returns the sum of a tensor over the ranks with other tokens of the microbatch.
    """
    experts = logits_ne.shape[1]
    # Only ratios within a row matter, and the largest exponential must not be infinite.
    scores_ne = (logits_ne - logits_ne.amax(1, keepdim=True)).exp()
    of_experts_e = scores_ne.new_ones(experts)
    of_tokens_n = scores_ne.new_zeros(len(scores_ne))
    for _ in range(ASSUMED_ROUNDS if scores_ne.is_meta else MOST_ROUNDS):
        of_tokens_n = 1 / (tokens * ((of_experts_e * scores_ne).sum(1) + _LEAST))
        sums_e = over_ranks((of_tokens_n[:, None] * scores_ne).sum(0))
        earlier_e, of_experts_e = of_experts_e, 1 / (experts * (sums_e + _LEAST))
        if not (earlier_e - of_experts_e).abs().mean() > TOLERANCE:  # NaN ends the rounds too
            break
    return of_experts_e * scores_ne * of_tokens_n[:, None]
