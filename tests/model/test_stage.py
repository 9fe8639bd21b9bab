"""The ranks' parts make the whole model: nothing missing, nothing twice but a tied copy."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from correctness.short_runs import LAYOUTS, Job, Layout
from reference.plain_gpt import GPTOptions, parameter_shapes

from megatron.layers.dropout import DropoutSeeds
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.site import Site
from megatron.model.placement import place
from megatron.model.stage import RankModel
from megatron.parallel.box import Box, check_tiling

CPU = torch.device("cpu")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_embeddings": False},
    "llama": {
        "tie_embeddings": False,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "num_query_groups": 2,
        "qk_layernorm": True,
        "add_bias_linear": False,
    },
    "qwen": {
        "position_embedding_type": "rope",
        "rotary_interleaved": True,
        "use_rope_scaling": True,
        "squared_relu": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
    },
}


def models(layout: Layout, options: GPTOptions) -> list[RankModel]:
    """What every rank owns."""
    config = Job(options).config(layout)
    stages = [(rank, 0) for rank in range(layout.ranks)]
    return [
        RankModel(
            config.model,
            place(
                config.model,
                stages,
                rank,
                layers=[options.num_layers // layout.ranks] * layout.ranks,
                padded_vocab_size=config.parallel.padded_vocab_size,
                vocabulary_shard=None if layout.vocabulary == "none" else (rank, layout.ranks),
            ),
            Site(CPU, torch.float32),
        )
        for rank in range(layout.ranks)
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_are_those_of_the_plain_model(name: str, layout: Layout) -> None:
    """Names and global shapes; every element is on one rank, besides tied copies and padding."""
    options = GPTOptions(num_layers=4, vocab_size=29, **OPTIONS[name])
    shapes = parameter_shapes(options)
    boxes: dict[str, list[Box]] = {global_name: [] for global_name in shapes}
    for model in models(layout, options):
        own = list(model.owned_parameters())
        assert {id(o.parameter) for o in own} == {id(p) for p in model.parameters()}
        assert len(own) == len({id(o.parameter) for o in own})
        for owned in own:
            assert owned.global_shape == shapes[owned.name]
            if not owned.is_copy:
                boxes[owned.name] += [piece.box for piece in owned.pieces]
    for global_name, shape in shapes.items():
        check_tiling(shape, boxes[global_name])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_tied_matrices_are_one_tensor_where_both_layers_are(layout: Layout, tied: bool) -> None:
    options = GPTOptions(num_layers=4, vocab_size=29, tie_embeddings=tied)
    ranks = models(layout, options)
    for rank, model in enumerate(ranks):
        if model.input_layer is not None and model.output_layer is not None:
            assert (model.input_layer.weight is model.output_layer.weight) == tied
        copy = tied and layout.vocabulary == "none" and rank == layout.ranks - 1 > 0
        assert (model.embedding_copy is not None) == copy


FURTHER = GPTOptions(num_layers=4, vocab_size=29, position_embedding_type="rope", mtp_num_layers=2)
FOLDED = [(0, 0), (1, 0), (1, 1), (0, 1)]
"""Two chunks a rank, the first and the last stage on rank 0."""


def test_stages_may_lie_anywhere_and_differ() -> None:
    config = Job(GPTOptions(num_layers=8)).config(Layout(2, "none")).model
    first, second = (
        place(
            config,
            FOLDED,
            rank,
            layers=(3, 0, 4, 1),
            padded_vocab_size=32,
            vocabulary_shard=None,
        )
        for rank in (0, 1)
    )
    assert first.chunks == (range(0, 3), range(7, 8))
    assert second.chunks == (range(3, 3), range(3, 7))
    assert (first.first_chunk, first.last_chunk) == (0, 1)
    assert (second.first_chunk, second.last_chunk) == (None, None)
    assert first.input_shard == first.output_shard
    assert second.input_shard is second.output_shard is None


@pytest.mark.parametrize("tied", [True, False])
def test_both_ends_on_one_rank_share_a_tied_matrix(tied: bool) -> None:
    options = GPTOptions(num_layers=4, vocab_size=29, tie_embeddings=tied)
    first, second = chunked(options, FOLDED, (1, 1, 1, 1))
    assert first.input_layer is not None
    assert first.output_layer is not None
    assert (first.input_layer.weight is first.output_layer.weight) == tied
    assert first.embedding_copy is None
    assert second.input_layer is None
    assert second.output_layer is None
    names = [own.name for model in (first, second) for own in model.owned_parameters()]
    assert sorted(names) == sorted(parameter_shapes(options))


@pytest.mark.parametrize("ahead_stage", [1, 2, 3, None])
def test_the_final_norm_is_with_the_layers_of_further_tokens(ahead_stage: int | None) -> None:
    options = replace(FURTHER, tie_embeddings=False)
    ranks = chunked(options, FOLDED, (2, 2, 0, 0), ahead_stage=ahead_stage)
    rank, chunk = FOLDED[3 if ahead_stage is None else ahead_stage]
    for index, model in enumerate(ranks):
        there = index == rank
        assert model.placement.norm_chunk == (chunk if there else None)
        assert [model.final_norm is not None, model.mtp is not None] == [there, there]
        assert (model.ahead_layer is not None) == there
        assert (model.embedding_copy is not None) == (there and index == 1)
    names = [o.name for model in ranks for o in model.owned_parameters() if not o.is_copy]
    assert sorted(names) == sorted(parameter_shapes(options))


@pytest.mark.parametrize("tied", [True, False])
def test_layers_of_further_tokens_share_the_matrix_of_their_rank(tied: bool) -> None:
    options, stages = replace(FURTHER, tie_embeddings=tied), [(0, 0), (1, 0), (2, 0), (1, 1)]
    ranks = chunked(options, stages, (2, 1, 1, 0), ahead_stage=1)  # the loss is on rank 1 too
    _, both, neither = ranks
    assert both.ahead_layer is not None
    assert both.output_layer is not None
    assert (both.ahead_layer.weight is both.output_layer.weight) == tied
    assert sum(owned.is_copy for owned in both.owned_parameters()) == 1
    assert neither.ahead_layer is None
    assert neither.embedding_copy is None


@pytest.mark.parametrize(
    ("stages", "layers"),
    [
        ([(0, 0)], (4,)),
        ([(0, 0), (1, 0), (0, 1), (1, 1)], (1, 1, 1, 1)),
        (FOLDED, (2, 0, 1, 1)),
        (FOLDED, (0, 3, 1, 0)),
    ],
)
def test_dropout_and_weights_do_not_depend_on_the_placement(
    stages: list[tuple[int, int]], layers: tuple[int, ...]
) -> None:
    """All stages one after the other make the same numbers, whatever chunks they are."""
    options = GPTOptions(num_layers=4, vocab_size=29)
    outputs = []
    for order, share in (([(0, 0), (1, 0)], (2, 2)), (stages, layers)):
        ranks = chunked(options, order, share, dropout=0.3)
        x_bsh = torch.randn(2, 5, options.hidden_size, generator=torch.Generator().manual_seed(1))
        for rank, chunk in order:
            x_bsh = ranks[rank](chunk, x_bsh, ForwardPass(DropoutSeeds(7, 3, 2)))
        outputs.append(x_bsh)
    assert torch.equal(*outputs)
    assert outputs[0].isfinite().all()


def chunked(
    options: GPTOptions,
    stages: list[tuple[int, int]],
    layers: tuple[int, ...],
    dropout: float = 0.0,
    ahead_stage: int | None = None,
) -> list[RankModel]:
    """The parts of a model with the vocabulary whole, with their weights, ready to train."""
    model = Job(options).config(Layout(1, "none")).model
    config = model.replaced(hidden_dropout=dropout, attention_dropout=dropout)
    ranks = []
    for rank in range(1 + max(owner for owner, _ in stages)):
        placement = place(
            config,
            stages,
            rank,
            layers=layers,
            padded_vocab_size=32,
            vocabulary_shard=None,
            ahead_stage=ahead_stage,
        )
        ranks.append(RankModel(config, placement, Site(CPU, torch.float32)))
        ranks[-1].initialise(seed=11)
    return ranks
