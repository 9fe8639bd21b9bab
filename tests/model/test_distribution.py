"""Every distribution holds all layers, and what it promises about single stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.model.distribution import (
    LayerDistribution,
    check_no_rank_is_empty,
    distribute,
)

COUNTS = st.integers(1, 64)
STAGES = st.integers(1, 12)


@given(COUNTS, STAGES)
def test_even_means_as_many_on_every_stage(layers: int, stages: int) -> None:
    even = LayerDistribution()
    if layers % stages:
        with pytest.raises(ValueError, match=r"--num-layers .* --layer-distribution remainder"):
            distribute(even, layers, stages)
    else:
        assert distribute(even, layers, stages) == (layers // stages,) * stages


@given(COUNTS, STAGES)
def test_a_remainder_goes_to_the_first_stages(layers: int, stages: int) -> None:
    found = distribute(LayerDistribution("remainder"), layers, stages)
    assert sum(found) == layers
    assert list(found) == sorted(found, reverse=True)
    assert found[0] - found[-1] <= 1


@given(st.integers(0, 8), st.integers(0, 8), st.integers(1, 6), st.integers(2, 9))
def test_decided_ends_leave_the_rest_even(first: int, last: int, each: int, stages: int) -> None:
    layers = first + each * (stages - 2) + last
    decided = LayerDistribution(first=first, last=last)
    assert distribute(decided, layers, stages) == (first, *(each,) * (stages - 2), last)
    with pytest.raises(ValueError, match=f"first-pipeline-num-layers {first}, .*last.* {last} "):
        distribute(decided, layers + 1 if stages != 3 else first + last - 1, stages)


def test_one_decided_end() -> None:
    assert distribute(LayerDistribution(last=1), 10, 4) == (3, 3, 3, 1)
    assert distribute(LayerDistribution(first=4), 10, 3) == (4, 3, 3)


@given(st.integers(2, 6), STAGES, st.booleans(), st.booleans())
def test_vocabulary_layers_that_count_take_a_layers_place(
    each: int, stages: int, embedding: bool, loss: bool
) -> None:
    counting = LayerDistribution(embedding_counts=embedding, loss_counts=loss)
    layers = each * stages - embedding - loss
    found = distribute(counting, layers, stages)
    as_layers = list(found)
    as_layers[0] += embedding
    as_layers[-1] += loss
    assert as_layers == [each] * stages


def test_an_explicit_list_is_taken_as_it_is() -> None:
    assert distribute(LayerDistribution("explicit", counts=(3, 0, 2)), 5, 3) == (3, 0, 2)


@pytest.mark.parametrize(
    ("distribution", "layers", "stages", "words"),
    [
        (LayerDistribution("explicit", counts=(3, 2)), 6, 2, "3,2 adds up to 5 --num-layers 6"),
        (LayerDistribution("explicit", counts=(3, 3)), 6, 3, "3,3 names 2 stages has 3"),
        (LayerDistribution(), 7, 4, "7 not divisible by the 4 stages 4 or 8"),
        (LayerDistribution(), 3, 4, "3 not divisible by the 4 stages use 4"),
        (LayerDistribution(first=9), 8, 4, "8 --decoder-first-pipeline-num-layers 9 change"),
        (LayerDistribution(first=1, last=2), 2, 1, "2 --decoder-first-pipeline-num-layers 1"),
        (LayerDistribution(loss_counts=True), 8, 4, "8 --account-for-loss-in-pipeline-split"),
    ],
)
def test_refusals_name_flags_and_a_way_out(
    distribution: LayerDistribution, layers: int, stages: int, words: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked below
        distribute(distribution, layers, stages)
    message, position = str(caught.value), 0
    for word in words.split():
        position = message.find(word, position)
        assert position >= 0, f"no {word!r} in its place in: {message}"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=8))
def test_every_rank_inside_the_pipeline_has_a_layer(
    ranks_and_layers: list[tuple[int, int]],
) -> None:
    """The first and the last stage have the vocabulary layers."""
    ranks, layers = [rank for rank, _ in ranks_and_layers], [n for _, n in ranks_and_layers]
    stages = [(rank, ranks[:stage].count(rank)) for stage, rank in enumerate(ranks)]
    inside = set(ranks) - {ranks[0], ranks[-1]}
    empty = [r for r in sorted(inside) if not any(n for q, n in ranks_and_layers if q == r)]
    listed = LayerDistribution("explicit", counts=tuple(layers))
    if not empty:
        check_no_rank_is_empty(listed, stages, layers)
        return
    named = f"--layer-distribution {','.join(map(str, layers))} leaves rank "
    with pytest.raises(ValueError, match=named + ", ".join(map(str, empty)) + " without"):
        check_no_rank_is_empty(listed, stages, layers)


def test_a_rank_that_predicts_further_tokens_needs_no_other_layer() -> None:
    listed, stages = LayerDistribution("explicit", counts=(2, 0, 0)), [(0, 0), (1, 0), (2, 0)]
    check_no_rank_is_empty(listed, stages, (2, 0, 0), 1)
    with pytest.raises(ValueError, match="leaves rank 1 without a layer"):
        check_no_rank_is_empty(listed, stages, (2, 0, 0), 2)
