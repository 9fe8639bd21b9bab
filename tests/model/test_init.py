"""Initial values: the same in every layout, and of the promised spread."""

import math
from dataclasses import replace

import pytest
import torch
from cuda_path import needs_gpus
from torch import nn

from megatron.layers.seeds import stable_seed
from megatron.layers.site import Site
from megatron.model import init
from megatron.model.init import BLOCK_ROWS, init_layer, initialise
from megatron.model.ownership import OwnedParameter
from megatron.model.settings import ModelSettings
from megatron.model.transformer_layer import TransformerLayer
from megatron.parallel.box import Box, Piece, shard

CPU = torch.device("cpu")
DEVICES = ["cpu", "as a GPU", pytest.param("cuda", marks=needs_gpus)]
CONFIG = ModelSettings.of(
    num_layers=8,
    hidden_size=128,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=32,
    seq_length=16,
    max_position_embeddings=16,
    vocab_size=1000,
    qk_layernorm=True,
    init_method_std=0.05,
)


def vocabulary_rows(
    first_row: int, rows: int, real_rows: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    weight = nn.Parameter(torch.full((rows, 8), math.nan, dtype=dtype))
    real = Box((min(first_row, real_rows), 0), (max(0, min(rows, real_rows - first_row)), 8))
    owned = OwnedParameter("output_layer.weight", weight, (real_rows, 8), (Piece(real, (0, 0)),))
    initialise(owned, replace(CONFIG, init_method_std=0.02), seed=5)
    return weight.detach()


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7])
def test_shards_of_a_vocabulary_are_rows_of_the_whole(shards: int) -> None:
    real_rows = 3 * BLOCK_ROWS + 17
    padded = math.ceil(real_rows / (84 * 20)) * 84 * 20  # divisible by every number of shards
    whole = vocabulary_rows(0, padded, real_rows)
    rows = padded // shards
    parts = [vocabulary_rows(i * rows, rows, real_rows) for i in range(shards)]
    assert torch.equal(torch.cat(parts), whole)
    assert not whole[real_rows:].any()
    assert whole[:real_rows].all()


def test_the_amount_of_padding_changes_no_real_row() -> None:
    assert torch.equal(vocabulary_rows(0, 1500, 1100)[:1100], vocabulary_rows(0, 1100, 1100))


@pytest.mark.parametrize("first_row", [1100, 1110, 2048, 5000])
def test_a_shard_of_padding_only_is_zero(first_row: int) -> None:
    assert not vocabulary_rows(first_row, 200, 1100).any()


def test_bf16_values_are_the_fp32_ones_rounded() -> None:
    wide = vocabulary_rows(100, 2000, 4000)
    assert torch.equal(vocabulary_rows(100, 2000, 4000, torch.bfloat16), wide.bfloat16())


def test_blocks_differ_and_spread_as_asked() -> None:
    weight = vocabulary_rows(0, 4 * BLOCK_ROWS, 10**6)
    assert len({tuple(block[0].tolist()) for block in weight.split(BLOCK_ROWS)}) == 4
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(weight.mean().item()) < 5e-4


def test_a_parameter_depends_on_its_name_and_the_seed_only() -> None:
    def draw(name: str, seed: int) -> torch.Tensor:
        parameter = nn.Parameter(torch.empty(32, 32))
        torch.rand(3)  # the default generator plays no part
        initialise(OwnedParameter.whole(name, parameter), CONFIG, seed)
        return parameter.detach()

    assert torch.equal(draw("a", 1), draw("a", 1))
    assert not torch.equal(draw("a", 1), draw("b", 1))
    assert not torch.equal(draw("a", 1), draw("a", 2))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The CPU, as it draws and as a GPU does, in blocks; and a GPU if there is one."""
    if request.param == "as a GPU":
        monkeypatch.setattr(init, "DRAWING", ("cpu",))
        return CPU
    return torch.device(request.param)


@pytest.mark.parametrize("fused", [1, 2])
@pytest.mark.parametrize("dimension", [0, 1])
def test_a_shard_of_any_tensor_has_the_numbers_of_the_whole(
    dimension: int, fused: int, device: torch.device
) -> None:
    shape, name = (2 * BLOCK_ROWS + 20, 24), "decoder.layers.1.mlp.linear_fc1.weight"
    whole = nn.Parameter(torch.empty(shape, device=device))
    initialise(OwnedParameter.whole(name, whole), CONFIG, seed=5)
    for index in range(2):
        parts = [part.chunk(2, dimension)[index] for part in whole.chunk(fused, dimension)]
        expected = torch.cat(parts, dimension)
        parameter = nn.Parameter(torch.empty_like(expected))
        pieces = shard(shape, dimension, index, 2, fused)
        initialise(OwnedParameter(name, parameter, shape, pieces), CONFIG, seed=5)
        assert torch.equal(parameter, expected)


def drawn(rows: int, *seeds: str | int) -> torch.Tensor:
    """What one generator draws on the CPU."""
    generator = torch.Generator().manual_seed(stable_seed(5, *seeds))
    return torch.empty(rows, 8).normal_(0.0, 0.05, generator=generator)


def drawn_in_blocks(name: str, rows: int) -> torch.Tensor:
    blocks = range(math.ceil(rows / BLOCK_ROWS))
    return torch.cat([drawn(BLOCK_ROWS, name, block) for block in blocks])[:rows]


@pytest.mark.parametrize("name", ["a", "output_layer.weight"])
@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("as_a_gpu", [False, True])
def test_which_generator_draws_which_number(
    name: str, on_cpu: bool, as_a_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU draws matrices of layers whole, and all in one go; a GPU draws blocks of them."""
    if as_a_gpu:
        monkeypatch.setattr(init, "DRAWING", ("cpu",))
    rows = BLOCK_ROWS + 300
    parameter = nn.Parameter(torch.empty(rows, 8))
    initialise(OwnedParameter.whole(name, parameter), CONFIG, seed=5, on_cpu=on_cpu)
    is_whole = name == "a" and (on_cpu or not as_a_gpu)
    assert torch.equal(parameter, drawn(rows, name) if is_whole else drawn_in_blocks(name, rows))


@needs_gpus
def test_a_gpu_has_the_numbers_of_the_cpu_if_asked_to() -> None:
    for on_cpu in (False, True):
        parameter = nn.Parameter(torch.empty(300, 8, device="cuda"))
        initialise(OwnedParameter.whole("a", parameter), CONFIG, seed=5, on_cpu=on_cpu)
        assert torch.equal(parameter.detach().cpu(), drawn(300, "a")) == on_cpu


def initialised(layer_number: int, dtype: torch.dtype = torch.float32) -> TransformerLayer:
    layer = TransformerLayer(CONFIG, layer_number, Site(CPU, dtype))
    init_layer(layer, layer_number, CONFIG, seed=3)
    return layer


def test_a_layer_has_megatrons_spreads() -> None:
    residual = 0.05 / math.sqrt(2 * 8)
    for name, parameter in initialised(2).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "layernorm" in name:
            assert (parameter == 1).all(), name
        else:
            writes_residual = "linear_proj" in name or "linear_fc2" in name
            expected = residual if writes_residual else 0.05
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name


def test_layers_differ_and_bf16_starts_from_the_same_numbers() -> None:
    layer, same, narrow, other = (
        dict(initialised(number, dtype).named_parameters())
        for number, dtype in [(2, torch.float32)] * 2 + [(2, torch.bfloat16), (3, torch.float32)]
    )
    for name, parameter in layer.items():
        assert torch.equal(parameter, same[name])
        assert torch.equal(parameter.bfloat16(), narrow[name])
        if parameter.dim() == 2:
            assert not torch.equal(parameter, other[name])
    assert not torch.equal(
        layer["self_attention.linear_proj.weight"].flatten()[:64],
        layer["mlp.linear_fc2.weight"].flatten()[:64],
    )
