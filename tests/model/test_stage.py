"""The ranks' parts make the whole model: nothing missing, nothing twice but a tied copy."""

from collections import Counter

import pytest
import torch
from correctness.job import LAYOUTS, Job, Layout
from reference.plain_gpt import GPTOptions, parameter_shapes

from megatron.model.stage import RankModel, place

CPU = torch.device("cpu")
WORD_EMBEDDINGS, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"
OPTIONS = {
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
                padded_vocab_size=config.parallel.padded_vocab_size,
                split_vocabulary=layout.vocabulary != "none",
            ),
            torch.float32,
            CPU,
        )
        for rank in range(layout.ranks)
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_are_those_of_the_plain_model(name: str, layout: Layout) -> None:
    """Names and shapes; the matrices of the vocabulary in shards that add up to the padded V."""
    options = GPTOptions(num_layers=4, vocab_size=29, **OPTIONS[name])
    padded = Job(options).config(layout).parallel.padded_vocab_size
    found: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    for model in models(layout, options):
        own = list(model.global_parameters())
        assert {id(p) for _, p in own} == {id(p) for p in model.parameters()}
        assert len(own) == len({id(p) for _, p in own})
        for global_name, parameter in own:
            if model.holds_tied_copy and global_name == WORD_EMBEDDINGS:
                continue
            found[global_name] += 1
            rows[global_name] += len(parameter)
            assert parameter.shape[1:] == parameter_shapes(options)[global_name][1:]
    shapes = parameter_shapes(options)
    sharded = layout.ranks if layout.vocabulary != "none" else 1
    assert found == {n: sharded if n in (WORD_EMBEDDINGS, OUTPUT_LAYER) else 1 for n in shapes}
    for global_name, shape in shapes.items():
        vocabulary = global_name in (WORD_EMBEDDINGS, OUTPUT_LAYER)
        assert rows[global_name] == (padded if vocabulary else shape[0])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_tied_matrices_are_one_tensor_where_both_layers_are(layout: Layout, tied: bool) -> None:
    options = GPTOptions(num_layers=4, vocab_size=29, tie_embeddings=tied)
    ranks = models(layout, options)
    for rank, model in enumerate(ranks):
        if model.input_layer is not None and model.output_layer is not None:
            assert (model.input_layer.weight is model.output_layer.weight) == tied
        copy = tied and layout.vocabulary == "none" and rank == layout.ranks - 1 > 0
        assert model.holds_tied_copy == copy


def test_stages_may_lie_anywhere() -> None:
    """Two chunks a rank, folded so that the first and the last stage are on rank 0."""
    config = Job(GPTOptions(num_layers=8)).config(Layout(2, "none")).model
    stages = [(0, 0), (1, 0), (1, 1), (0, 1)]
    first, second = (
        place(config, stages, rank, padded_vocab_size=32, split_vocabulary=False) for rank in (0, 1)
    )
    assert first.chunks == (range(0, 2), range(6, 8))
    assert second.chunks == (range(2, 4), range(4, 6))
    assert (first.first_chunk, first.last_chunk) == (0, 1)
    assert (second.first_chunk, second.last_chunk) == (None, None)
    assert first.input_shard == first.output_shard
    assert second.input_shard is second.output_shard is None
