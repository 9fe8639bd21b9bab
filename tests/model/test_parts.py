"""What layers are made of follows from the configuration and from their place in the model."""

import pytest
import torch
from correctness.model_kinds import LIKE
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions, parameter_shapes

from megatron.layers.site import Site
from megatron.model.build_layer import build_layer
from megatron.model.parallel_layer import ParallelLayer
from megatron.model.parts import kind_of, rotation_of, scores_of
from megatron.model.placement import place
from megatron.model.settings import ModelSettings
from megatron.model.stage import RankModel

CPU = torch.device("cpu")


def model(name: str) -> ModelSettings:
    options = GPTOptions(num_layers=4, **LIKE[name])
    return Job(options).config(Layout(1, "none")).model


def test_every_second_layer_of_gemma_2_has_a_window() -> None:
    gemma = model("gemma 2")
    scores = [scores_of(gemma, layer) for layer in range(4)]
    assert [own.window for own in scores] == [2, None, 2, None]
    assert {(own.softcap, own.scale) for own in scores} == {(1.5, 0.5)}
    assert kind_of(gemma, 0) == kind_of(gemma, 2) != kind_of(gemma, 1)


def test_local_layers_of_gemma_3_rotate_by_a_base_of_their_own() -> None:
    gemma = model("gemma 3")
    rotations = [rotation_of(gemma, layer) for layer in range(4)]
    told = [(own.base, own.interpolation) for own in rotations if own is not None]
    assert told == [(100, 1), (100, 1), (1000, 2), (100, 1)]
    wide = gemma.replaced(window_size=gemma.seq_length)
    assert scores_of(wide, 0).window is None  # it hides nothing
    assert rotation_of(wide, 0) == rotations[0]


def test_layers_that_rotate_alike_share_a_table() -> None:
    for name, tables in (("gemma 3", 2), ("smollm 3", 1), ("bloom", 0), ("mistral", 1)):
        config = model(name)
        placement = place(
            config, [(0, 0)], 0, layers=[4], padded_vocab_size=32, vocabulary_shard=None
        )
        ropes = RankModel(config, placement, Site(CPU, torch.float32)).ropes
        assert list(ropes) == [0, 1, 2, 3]
        assert len({id(own) for own in ropes.values() if own is not None}) == tables


def test_a_window_that_hides_nothing_leaves_attention_to_the_fast_kernels() -> None:
    config = model("mistral").replaced(window_size=9)
    assert config.seq_length == 10
    assert scores_of(config, 0).are_products
    assert not scores_of(config.replaced(window_size=8), 0).are_products


@pytest.mark.parametrize("name", LIKE)
def test_layers_have_the_parameters_of_the_plain_model(name: str) -> None:
    config = model(name)
    layer = build_layer(config, 0, Site(CPU, torch.float32))
    assert isinstance(layer, ParallelLayer) == config.block.parallel_attn
    prefix = "decoder.layers.0."
    expected = {
        name.removeprefix(prefix): shape
        for name, shape in parameter_shapes(GPTOptions(num_layers=4, **LIKE[name])).items()
        if name.startswith(prefix)
    }
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == expected
