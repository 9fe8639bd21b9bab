"""How likely a model finds given tokens, with the vocabulary split over the ranks.

Shapes: b rows, s tokens, n tokens that are scored, v logits of the shard, p ranks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.inference.model import InferenceModel
from megatron.parallel import collectives

_AT_ONCE = 256
"""Tokens whose logits are formed at once."""


@dataclass(frozen=True)
class Scored:
    """A model's probabilities of the tokens at the end of a row.

    Attributes:
        log_probabilities: natural logarithm of each token's probability.
        likeliest: for each token, whether no other token is likelier.
    """

    log_probabilities: list[float]
    likeliest: list[bool]

    @property
    def total(self) -> float:
        """Logarithm of the probability of all tokens together."""
        return math.fsum(self.log_probabilities)


def score(model: InferenceModel, row: Sequence[int], count: int) -> Scored:
    """Return the likelihood of the last ``count`` tokens of a row, given the tokens before them.

    All ranks call this together, with the same arguments.
    """
    assert 0 < count < len(row), f"{count} of {len(row)} tokens, and one before them"
    tokens_s = torch.tensor(row)
    rows = model.start(torch.zeros(1, dtype=torch.int64), len(row))
    x_sh = model.advance(rows, tokens_s[None, :-1])[0, -count:]
    parts = [
        _log_probabilities(model, x_nh, target_n.to(model.device))
        for x_nh, target_n in zip(
            x_sh.split(_AT_ONCE), tokens_s[-count:].split(_AT_ONCE), strict=True
        )
    ]
    log_n, best_n = (torch.cat(part).tolist() for part in zip(*parts, strict=True))
    return Scored(log_n, best_n)


def _log_probabilities(
    model: InferenceModel, x_nh: Tensor, target_n: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the targets' probabilities, and whether each is the likeliest."""
    logits_nv = model.logits(x_nh)
    width = logits_nv.shape[1]
    own_n = target_n - model.first_row
    is_here_n = (own_n >= 0) & (own_n < width)
    none_n = logits_nv.new_full((len(x_nh),), -math.inf)
    if width:
        found_n = logits_nv.gather(1, own_n.clamp(0, width - 1)[:, None])[:, 0]
        largest_n, total_n = logits_nv.amax(1), logits_nv.logsumexp(1)
        found_n = torch.where(is_here_n, found_n, none_n)
    else:
        found_n = largest_n = total_n = none_n
    merged_p3n = collectives.all_gather(torch.stack((found_n, largest_n, total_n)), model.column)
    logit_n, best_n = merged_p3n[:, 0].amax(0), merged_p3n[:, 1].amax(0)
    return logit_n - merged_p3n[:, 2].logsumexp(0), logit_n >= best_n


def windows(tokens: Sequence[int], longest: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Cut a long text into overlapping rows that score each token once, except the first token.

    A row has at most ``longest`` tokens. The last ``stride`` tokens of a row are scored, and the
    tokens before them are their context. The first row scores all its tokens but the first.

    Yields:
        A row, and the number of tokens at its end to score.
    """
    assert 0 < stride < longest, f"{stride} of {longest} tokens"
    done = 1
    while done < len(tokens):
        end = min(longest if done == 1 else done + stride, len(tokens))
        yield list(tokens[max(0, end - longest) : end]), end - done
        done = end


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text.

    Attributes:
        tokens: number of scored tokens.
        log_probability: natural logarithm of the probability of these tokens together.
    """

    tokens: int
    log_probability: float

    @property
    def loss(self) -> float:
        """Mean loss of a token, in nats."""
        return -self.log_probability / self.tokens

    @property
    def value(self) -> float:
        """The perplexity."""
        return math.exp(min(self.loss, 700.0))


def perplexity(
    model: InferenceModel, tokens: Sequence[int], longest: int, stride: int
) -> Perplexity:
    """Return the perplexity of a text under a model. All ranks call this together.

    ``longest`` and ``stride`` are as for ``windows``.

    Raises:
        ValueError: the text has fewer than 2 tokens, so there is nothing to score.
    """
    if len(tokens) < 2:
        raise ValueError(f"a text of {len(tokens)} tokens: give one of at least 2")
    found = [score(model, row, count) for row, count in windows(tokens, longest, stride)]
    return Perplexity(
        sum(len(one.log_probabilities) for one in found), math.fsum(one.total for one in found)
    )
