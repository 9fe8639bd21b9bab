"""Who owns what of a stage that ranks share: every element once, whatever the number of ranks."""

from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model.shared_stage import GPT, LLAMA, QWEN, WHOLE
from parallel.tensor_axis import without_groups

from megatron.layers.site import Site
from megatron.model.cut_faults import faults_of_cut
from megatron.model.ownership import OwnedParameter
from megatron.model.settings import ModelSettings
from megatron.model.stage import RankModel
from megatron.parallel.box import Box, check_tiling


@st.composite
def configs(draw: st.DrawFn) -> tuple[ModelSettings, int, bool]:
    """A model that some ranks can share, their number, and whether they split the tokens."""
    size = draw(st.integers(1, 6))
    groups = size * draw(st.integers(1, 2))
    config = draw(st.sampled_from([GPT, LLAMA, QWEN])).replaced(
        num_query_groups=groups,
        num_attention_heads=groups * draw(st.integers(1, 3)),
        kv_channels=draw(st.sampled_from([2, 6])),
        ffn_hidden_size=size * draw(st.integers(1, 5)),
        hidden_size=draw(st.integers(1, 9)),
        seq_length=size,
        max_position_embeddings=size,
    )
    assert not list(faults_of_cut(config, size, sequence_parallel=True))
    return config, size, draw(st.booleans())


def owned_by_rank(
    config: ModelSettings, rank: int, size: int, split_tokens: bool, device: str = "cpu"
) -> list[OwnedParameter]:
    tensor = without_groups(rank, size, split_tokens=split_tokens)
    site = Site(torch.device(device), torch.float32, tensor=tensor)
    model = RankModel(config, WHOLE, site)
    if device == "cpu":
        model.initialise(seed=3)
    owned = list(model.owned_parameters())
    assert {id(own.parameter) for own in owned} == {id(p) for p in model.parameters()}
    return owned


@given(configs())
def test_boxes_tile_every_tensor_and_start_from_the_same_numbers(
    drawn: tuple[ModelSettings, int, bool],
) -> None:
    config, size, split_tokens = drawn
    alone = {own.name: own for own in owned_by_rank(config, 0, 1, False)}
    boxes: dict[str, list[Box]] = defaultdict(list)
    for rank in range(size):
        for own in owned_by_rank(config, rank, size, split_tokens):
            whole = alone[own.name]
            assert own.global_shape == whole.global_shape
            for box, part in own.parts(own.parameter):
                assert torch.equal(part, whole.parameter[box.slices]), own.name
            if not own.is_copy:
                boxes[own.name] += [piece.box for piece in own.pieces]
    assert boxes.keys() == alone.keys()
    for name, own in alone.items():
        check_tiling(own.global_shape, boxes[name])


def test_gate_and_up_projection_are_cut_apart() -> None:
    """Rank 1 of 2 has the second half of each; one cut through both would give it all of up."""
    fc1 = next(
        own for own in owned_by_rank(LLAMA, 1, 2, False) if own.name.endswith("linear_fc1.weight")
    )
    f = LLAMA.mlp.ffn_hidden_size
    assert fc1.global_shape == (2 * f, LLAMA.hidden_size)
    assert [piece.box.start[0] for piece in fc1.pieces] == [f // 2, f + f // 2]
    assert [piece.box.shape[0] for piece in fc1.pieces] == [f // 2] * 2


def names(config: ModelSettings, split_tokens: bool, what: str) -> set[str]:
    """The last parts of the names of the parameters that are partial, or copies, on rank 1 of 2."""
    owned = owned_by_rank(config, 1, 2, split_tokens, "meta")
    return {".".join(own.name.split(".")[-2:]) for own in owned if getattr(own, what)}


NORMS = {"input_layernorm", "pre_mlp_layernorm", "final_layernorm"}
GPT_WHOLE = {f"{norm}.{kind}" for norm in NORMS for kind in ("weight", "bias")} | {
    "linear_proj.bias",
    "linear_fc2.bias",
    "position_embeddings.weight",
}
QK_NORMS = {"q_layernorm.weight", "k_layernorm.weight"}
LLAMA_WHOLE = {f"{norm}.weight" for norm in NORMS} | QK_NORMS


@pytest.mark.parametrize(
    ("config", "split_tokens", "partial", "copies"),
    [
        (GPT, False, set(), GPT_WHOLE),
        (GPT, True, GPT_WHOLE, GPT_WHOLE),
        (LLAMA, False, QK_NORMS, LLAMA_WHOLE),
        (LLAMA, True, LLAMA_WHOLE, LLAMA_WHOLE),
    ],
)
def test_what_every_rank_holds_and_what_it_must_sum(
    config: ModelSettings, split_tokens: bool, partial: set[str], copies: set[str]
) -> None:
    assert names(config, split_tokens, "is_partial") == partial
    assert names(config, split_tokens, "is_copy") == copies


def test_the_first_rank_counts_what_all_hold() -> None:
    assert not any(own.is_copy for own in owned_by_rank(GPT, 0, 2, True, "meta"))


def test_a_rank_alone_has_everything_whole() -> None:
    for config in (GPT, LLAMA, QWEN):
        for own in owned_by_rank(config, 0, 1, False, "meta"):
            assert not own.is_copy
            assert not own.is_partial
            assert own.global_shape == tuple(own.parameter.shape)
