"""The maximal update parametrisation, said by other settings of the model."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from megatron.model.init import initialise
from megatron.model.maximal_update import in_usual_terms
from megatron.model.ownership import OwnedParameter
from megatron.model.settings import ModelSettings

PLAIN = ModelSettings.of(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=16,
    vocab_size=100,
    init_method_std=0.04,
    tie_embeddings=False,
)
"""Heads are 16 wide."""


def made(**values: Any) -> ModelSettings:
    return in_usual_terms(PLAIN.replaced(use_mup=True, **values))


def test_nothing_changes_without_mup() -> None:
    assert in_usual_terms(PLAIN.replaced(mup_base_hidden_size=16)) == PLAIN


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ({}, 1 / 16),
        ({"mup_base_head_dim": 4.0}, 2 / 16),
        ({"mup_attn_scale_power": 0.5}, 1 / 4),
        ({"mup_base_head_dim": 16.0, "mup_attn_scale_power": 1.0}, 1 / 4),
    ],
)
def test_scores_are_divided_by_a_power_of_the_heads_width(
    values: dict[str, float], scale: float
) -> None:
    assert made(**values).attention.softmax_scale == pytest.approx(scale)


def test_a_given_scale_of_scores_stays() -> None:
    assert made(softmax_scale=0.3).attention.softmax_scale == 0.3


def test_matrices_inside_the_model_begin_smaller() -> None:
    model = made(mup_base_hidden_size=16)
    assert model.init_method_std == pytest.approx(0.04 / 2)
    assert (model.embedding_init_method_std, model.output_layer_init_method_std) == (0.04, 0.04)
    model = made(mup_base_hidden_size=16, embedding_init_method_std=0.5)
    assert (model.embedding_init_method_std, model.output_layer_init_method_std) == (0.5, 0.5)


@pytest.mark.parametrize(("given", "factor"), [(1.0, 1 / 4), (0.5, 0.5)])
def test_logits_have_a_factor(given: float, factor: float) -> None:
    model = made(logit_multiplier=0.1, mup_base_hidden_size=16, mup_output_mult=given)
    assert model.vocabulary.logit_multiplier == pytest.approx(0.1 * factor)


def test_embeddings_have_a_factor() -> None:
    assert made(mup_embedding_mult=3.0).vocabulary.embedding_multiplier == 3.0
    assert made(mup_base_hidden_size=16).vocabulary.embedding_multiplier == 1.0


def test_the_usual_terms_stay_as_they_are() -> None:
    model = made(mup_base_hidden_size=16)
    assert not model.widths.use_mup
    assert in_usual_terms(model) == model


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embedding.word_embeddings.weight", 0.3),
        ("embedding.position_embeddings.weight", 0.3),
        ("output_layer.weight", 0.2),
        ("decoder.layers.0.mlp.linear_fc1.weight", 0.04),
        ("decoder.layers.0.mlp.linear_fc2.weight", 0.04 / math.sqrt(4)),
    ],
)
def test_vocabulary_layers_may_have_deviations_of_their_own(name: str, std: float) -> None:
    model = PLAIN.replaced(embedding_init_method_std=0.3, output_layer_init_method_std=0.2)
    weight = nn.Parameter(torch.empty(400, 64))
    initialise(OwnedParameter.whole(name, weight), model, seed=1)
    assert float(weight.detach().std()) == pytest.approx(std, rel=0.03)
