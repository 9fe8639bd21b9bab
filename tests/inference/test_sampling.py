"""Tokens are drawn from the distribution that was asked for, however the vocabulary is split."""

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from megatron.inference.sampling import Sampling, choose_tokens
from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis

if TYPE_CHECKING:
    from harness.rank_pool import RankPool

ROWS = 4000
"""Equal rows, each of which draws a token of its own."""


def of_one_rank(own: torch.Tensor) -> torch.Tensor:
    """Gather over one rank, which has the whole vocabulary."""
    return own[None]


def logits(width: int, seed: int = 0) -> torch.Tensor:
    """One row of logits."""
    return 2 * torch.randn(width, generator=torch.Generator().manual_seed(seed))


def wanted(logits_v: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Probabilities [V], written down from the definitions of top-k and top-p."""
    share_v = (logits_v.double() / how.temperature).softmax(0)
    order = share_v.argsort(descending=True)
    kept = order[: how.top_k or len(order)]
    cut_v = torch.zeros_like(share_v)
    cut_v[kept] = share_v[kept] / share_v[kept].sum()
    before = cut_v[order].cumsum(0) - cut_v[order]
    cut_v[order[before >= how.top_p]] = 0
    return cut_v / cut_v.sum()


CASES = {
    "all": Sampling(1.0),
    "cool": Sampling(0.6),
    "top-k": Sampling(1.2, top_k=5),
    "top-p": Sampling(1.0, top_p=0.8),
    "both": Sampling(1.5, top_k=9, top_p=0.6),
    "the first alone": Sampling(1.0, top_p=1e-6),
    "more than there are": Sampling(1.0, top_k=10**6),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [40, 3000])
def test_frequencies_are_the_probabilities(case: str, width: int) -> None:
    how, logits_v = CASES[case], logits(width)
    chosen_b = choose_tokens(logits_v.expand(ROWS, -1), 0, of_one_rank, how, step=3)
    probability_v = wanted(logits_v, how)
    found_v = torch.bincount(chosen_b, minlength=width) / ROWS
    assert (found_v[probability_v == 0] == 0).all()
    error = (probability_v * (1 - probability_v) / ROWS).sqrt()
    assert ((found_v - probability_v).abs() <= 5 * error + 2 / ROWS).all()


def test_greedy_takes_the_first_of_equal_ones() -> None:
    logits_bv = torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, -1.0]])
    assert choose_tokens(logits_bv, 0, of_one_rank, Sampling(), 0).tolist() == [1, 0]


def test_seed_and_step_change_what_is_drawn() -> None:
    logits_bv = logits(50).expand(64, -1)
    drawn = {
        tuple(choose_tokens(logits_bv, 0, of_one_rank, Sampling(1.0, seed=seed), step).tolist())
        for seed in (1, 2)
        for step in (0, 1)
    }
    assert len(drawn) == 4


def test_the_noise_of_a_row_is_that_of_its_prompt() -> None:
    logits_bv, how = logits(3000).expand(9, -1), Sampling(1.0)
    together = choose_tokens(logits_bv, 0, of_one_rank, how, 2, 5).tolist()
    apart = [
        choose_tokens(logits_bv[:1], 0, of_one_rank, how, 2, 5 + row).tolist() for row in range(9)
    ]
    assert [[token] for token in together] == apart
    assert len(set(together)) > 5


def chosen_on_rank(rank: int, world_size: int, *, width: int, how: Sampling) -> list[int]:
    """What one of several ranks chooses; the last one's shard may be short, or empty."""
    import torch.distributed as dist

    axis = ConnectedAxis("pipeline", rank, tuple(range(world_size)), dist.group.WORLD)
    gather = partial(collectives.all_gather, axis=axis)
    each = -(-width // world_size)
    own_v = logits(width)[rank * each : (rank + 1) * each]
    return choose_tokens(own_v.expand(200, -1), min(rank * each, width), gather, how, 1).tolist()


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_ranks_chooses_alike(case: str, ranks: "RankPool") -> None:
    how = CASES[case]
    for width, sizes in ((2500, (2, 3)), (5, (4,))):
        alone = choose_tokens(logits(width).expand(200, -1), 0, of_one_rank, how, 1).tolist()
        for size in sizes:
            for found in ranks.run(chosen_on_rank, size, width=width, how=how):
                assert found == alone
