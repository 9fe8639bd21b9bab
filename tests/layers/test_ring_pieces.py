"""The pieces of a ring's steps show every query each key that it sees, once, and no other key."""

from itertools import product

import pytest
import torch
from kernels.formulas import first_positions
from torch import Tensor

from megatron.kernels.documents import Documents
from megatron.kernels.scores import PLAIN, Scores
from megatron.layers import ring_pieces
from megatron.layers.ring_pieces import RingSight
from megatron.parallel.context import own_positions

S = 64
STARTS = [([0], [0]), ([0, 1, 7, 20, 41], [0, 29, 57]), ([0, 16, 32, 48], [0, 16, 48])]


def visible(documents: Documents | None, scores: Scores) -> Tensor:
    """Whether a query sees a key, by definition, [b, s, s]."""
    positions = torch.arange(S)
    behind = positions[:, None] - positions
    seen = (behind >= 0) & (behind <= (S if scores.window is None else scores.window))
    if documents is None:
        return seen.expand(2, S, S)
    return seen & (positions >= documents.first_bs[:, :, None])


def shown(sight: RingSight) -> Tensor:
    """How often a rank's queries are shown each key of the sequence, [b, u, s]."""
    count = torch.zeros(2, sight.tokens, S, dtype=torch.int64)
    queries = own_positions(S, sight.rank, sight.size)
    for step in sight.steps:
        keys = own_positions(S, (sight.rank - step) % sight.size, sight.size)
        for piece in sight.pieces(step):
            own, others = queries[piece.queries], keys[piece.keys]
            seen = torch.ones(2, len(own), len(others), dtype=torch.bool)
            if piece.is_causal:
                seen = seen.tril()
            if piece.view is not None:
                assert piece.view.first_query == int(own[0])
                assert piece.view.first_key == int(others[0])
                behind = own[:, None] - others
                window = piece.view.scores.window
                seen &= (behind >= 0) & (behind <= (S if window is None else window))
                if piece.view.first_bs is not None:
                    seen &= others >= piece.view.first_bs[:, :, None]
                assert seen.any()
                assert piece.view.scores.softcap or not seen.all(), "it would need no mask"
            count[:, torch.arange(sight.tokens)[piece.queries, None], others] += seen
    return count


@pytest.mark.parametrize("starts", [None, *STARTS], ids=str)
@pytest.mark.parametrize(
    "scores", [PLAIN, Scores(window=5), Scores(window=20), Scores(softcap=2.0)], ids=str
)
def test_every_query_is_shown_what_it_sees_once(
    scores: Scores,
    starts: tuple[list[int], list[int]] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring_pieces, "BLOCK", 4)
    monkeypatch.setattr(ring_pieces, "SCORED_BLOCK", 8)
    documents = None
    if starts is not None:
        documents = Documents.of(first_positions(starts, S), lambda t: t)
    expected = visible(documents, scores)
    for size in (2, 4):
        sights = [RingSight(rank, size, S // size, scores, documents) for rank in range(size)]
        assert len({sight.steps for sight in sights}) == 1
        for sight in sights:
            own = own_positions(S, sight.rank, size)
            assert torch.equal(shown(sight), expected[:, own].long())


@pytest.mark.parametrize(("window", "documents"), list(product([5, None], [True, False])))
def test_a_step_is_skipped_if_and_only_if_no_rank_sees_a_key_in_it(
    window: int | None, documents: bool
) -> None:
    apart = Documents.of(first_positions(STARTS[2], S), lambda t: t) if documents else None
    scores, size = Scores(window=window), 4
    seen = visible(apart, scores).any(0)
    places = [own_positions(S, rank, size) for rank in range(size)]
    needed = {
        (rank - other) % size
        for rank, other in product(range(size), repeat=2)
        if seen[places[rank]][:, places[other]].any()
    }
    assert RingSight(0, size, S // size, scores, apart).steps == tuple(sorted(needed))
