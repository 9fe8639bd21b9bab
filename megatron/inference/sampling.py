"""Chooses the next token from logits that are split over ranks by the vocabulary.

A token is drawn by the Gumbel-max trick: the id with the largest ``logit / temperature + noise`` is
a sample of the softmax. Each rank finds the largest sum of its shard, and the ranks exchange only
these numbers. Top-k and top-p drop the logits below a threshold; to find the threshold, the ranks
exchange their largest logits, the candidates. The noise of an id depends on the seed, the step, the
number of the prompt and the id alone. So any number of ranks chooses the same tokens, in batches of
any size.

Shapes: b rows, v logits of the shard, p ranks, k candidates of a rank, c = p k candidates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from megatron.layers.seeds import stable_seed

_FIRST_CANDIDATES: Final = 64
"""Candidates of a rank in the first search for the threshold of top-p."""

Gather: TypeAlias = Callable[[Tensor], Tensor]
"""Returns [p, ...] with a tensor of every rank, in the order of the ranks' shards."""

_BLOCK: Final = 1024
"""Ids whose noise comes from one generator of random numbers."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: number that divides the logits; 0: the token with the largest logit is taken.
        top_k: number of largest logits that a token is drawn from; 0: all logits.
        top_p: of the ``top_k``, a token is drawn from the fewest largest logits whose probabilities
            add up to at least this number; 1: all.
        seed: seed of the noise.

    Raises:
        ValueError: a number is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature {self.temperature}: give 0 (the likeliest) or more")
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k}: give 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p}: give a share above 0 and at most 1 (all)")


def choose_tokens(
    logits_bv: Tensor,
    first_row: int,
    gather: Gather,
    how: Sampling,
    step: int,
    first_prompt: int = 0,
) -> Tensor:
    """Return the next token of every row [b], the same on every rank.

    Args:
        logits_bv: logits of this rank's shard, which may be empty.
        first_row: vocabulary id of the shard's first row.
        gather: gathers over the ranks that share the vocabulary.
        how: rule of the choice.
        step: number of tokens that were chosen before in each row.
        first_prompt: number of the prompt of the first row; the prompts of the rows are in order.
    """
    if how.temperature == 0:
        return _largest(logits_bv, first_row, gather)
    scaled_bv = logits_bv / how.temperature
    threshold_b = _threshold(scaled_bv, gather, how)
    dropped_bv = scaled_bv < threshold_b[:, None]
    prompts = range(first_prompt, first_prompt + len(scaled_bv))
    noise_bv = torch.stack(
        [_gumbel(scaled_bv.shape[1], first_row, (how.seed, step, prompt)) for prompt in prompts]
    ).to(scaled_bv)
    return _largest((scaled_bv + noise_bv).masked_fill(dropped_bv, -math.inf), first_row, gather)


def _largest(values_bv: Tensor, first_row: int, gather: Gather) -> Tensor:
    """Return the id of every row's largest value; among equal values, the lowest id."""
    rows = len(values_bv)
    if values_bv.shape[1]:
        value_b, place_b = values_bv.max(1)
    else:
        value_b, place_b = values_bv.new_full((rows,), -math.inf), values_bv.new_zeros(rows)
    # Ids travel beside the values as float64, which holds every id exactly.
    own_2b = torch.stack((value_b.double(), (place_b + first_row).double()))
    value_pb, id_pb = gather(own_2b).unbind(1)
    return id_pb.gather(0, value_pb.argmax(0, keepdim=True))[0].long()


def _threshold(scaled_bv: Tensor, gather: Gather, how: Sampling) -> Tensor:
    """Return the threshold of every row [b]: logits below it are dropped."""
    if how.top_k:
        kept = min(how.top_k, _widest(scaled_bv, gather))
        candidate_bc = _candidates(scaled_bv, gather, kept)[:, :kept]
        if how.top_p == 1:
            return candidate_bc[:, -1]
        return _nucleus(candidate_bc, candidate_bc.logsumexp(1), how.top_p)[0]
    if how.top_p == 1:
        return scaled_bv.new_full((len(scaled_bv),), -math.inf)
    total_pb = gather(scaled_bv.logsumexp(1))
    count, widest = _FIRST_CANDIDATES, _widest(scaled_bv, gather)
    while True:
        candidate_bc = _candidates(scaled_bv, gather, count)[:, :count]
        threshold_b, is_enough = _nucleus(candidate_bc, total_pb.logsumexp(0), how.top_p)
        if is_enough or count >= widest:
            return threshold_b
        count *= 4


def _widest(scaled_bv: Tensor, gather: Gather) -> int:
    """Return the number of logits of all ranks together."""
    count = torch.tensor([scaled_bv.shape[1]], device=scaled_bv.device)
    return int(gather(count).sum())


def _candidates(scaled_bv: Tensor, gather: Gather, count: int) -> Tensor:
    """Return each row's candidates of all ranks in falling order [b, c].

    Every rank gives its ``count`` largest values, so the first ``count`` are the row's largest.
    """
    own_bk = scaled_bv.new_full((len(scaled_bv), count), -math.inf)
    found = min(count, scaled_bv.shape[1])
    own_bk[:, :found] = scaled_bv.topk(found, 1).values
    every_pbk = gather(own_bk)
    return every_pbk.movedim(0, 1).flatten(1).sort(1, descending=True).values


def _nucleus(candidate_bc: Tensor, total_b: Tensor, top_p: float) -> tuple[Tensor, bool]:
    """Return the last candidate that top-p keeps [b], and whether there are enough candidates.

    Args:
        candidate_bc: candidates in falling order.
        total_b: log-sum-exp of all values that a token may be drawn from.
        top_p: least probability of the kept candidates together.
    """
    share_bc = (candidate_bc - total_b[:, None]).exp()
    before_bc = share_bc.cumsum(1) - share_bc
    last_b = ((before_bc < top_p).sum(1) - 1).clamp_min(0)
    reached = bool((share_bc.sum(1) >= top_p).all())
    return candidate_bc.gather(1, last_b[:, None])[:, 0], reached


def _gumbel(width: int, first_row: int, key: tuple[int, ...]) -> Tensor:
    """Return the noise of a shard's ids for a prompt [v], drawn on the host in blocks of ids."""
    noise_v = torch.empty(width, dtype=torch.float64)
    for block in range(first_row // _BLOCK, -(-(first_row + width) // _BLOCK)):
        generator = torch.Generator().manual_seed(stable_seed("token", *key, block))
        uniform_r = torch.rand(_BLOCK, generator=generator, dtype=torch.float64)
        begin, end = max(block * _BLOCK, first_row), min((block + 1) * _BLOCK, first_row + width)
        drawn_r = uniform_r[begin - block * _BLOCK : end - block * _BLOCK]
        noise_v[begin - first_row : end - first_row] = -torch.log(-torch.log(drawn_r))
    return noise_v
