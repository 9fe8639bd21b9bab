"""Experts that are made of an MLP compute what the MLP computes."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import plain_experts
from reference.plain_gpt import GPTOptions, Parameters, logits, parameter_shapes, random_parameters

from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.saved_model import read_model
from megatron.checkpoint.upcycle import Upcycling, sum_of_weights
from megatron.model.settings import ModelSettings
from megatron.parallel.box import Box, Piece, whole

DENSE = GPTOptions(
    position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False
)
MIXTURE: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
HALVES = MIXTURE | {"num_experts": 8, "moe_ffn_hidden_size": 12}
CASES: dict[str, tuple[GPTOptions, dict[str, Any]]] = {
    "copies": (DENSE, MIXTURE),
    "halves": (DENSE, HALVES),
    "GELU": (replace(DENSE, swiglu=False), HALVES),
    "scaled": (DENSE, HALVES | {"moe_router_topk_scaling_factor": 2.5}),
    "sigmoids": (DENSE, MIXTURE | {"moe_router_score_function": "sigmoid"}),
    "biases": (
        replace(DENSE, swiglu=False, quick_geglu=True, glu_linear_offset=1.0, add_bias_linear=True),
        HALVES | {"moe_router_topk_scaling_factor": 2.5},
    ),
    "one layer": (DENSE, MIXTURE | {"moe_layer_pattern": (0, 1)}),
}


@pytest.fixture(autouse=True)
def _another_model() -> None:
    """The reference keeps what routers leave, and the models of this file have other experts."""
    for table in (plain_experts.loads, plain_experts.so_far, plain_experts.left):
        table.clear()


def config(options: GPTOptions) -> ModelSettings:
    return read_model(asdict(options) | {"seq_length": 8})


def mixture_of(dense: Parameters, upcycling: Upcycling, options: GPTOptions) -> Parameters:
    """All parameters of the mixture on one rank; routers are drawn beforehand."""
    made = random_parameters(options, seed=1)
    tensors = {name: BoxedTensor(t, tuple(t.shape), whole(t.shape)) for name, t in made.items()}
    read = upcycling.dense_tensors(tensors)
    assert read.keys() == dense.keys()
    for name, tensor in read.items():
        tensor.as_subclass(torch.Tensor).copy_(dense[name])
    upcycling.fill(tensors, read)
    return made


@pytest.mark.parametrize("case", CASES)
def test_the_mixture_computes_what_the_dense_model_computes(case: str) -> None:
    options, experts = CASES[case]
    mixture = replace(options, **experts)
    parts = options.ffn_hidden_size // mixture.moe_ffn_hidden_size
    dense, upcycling = random_parameters(options), Upcycling(config(mixture), parts, seed=5)
    assert upcycling.fault(asdict(options)) is None
    made = mixture_of(dense, upcycling, mixture)
    assert {name: tuple(t.shape) for name, t in made.items()} == parameter_shapes(mixture)
    tokens_bs = torch.randint(options.vocab_size, (3, 8))
    ours, theirs = logits(made, tokens_bs, mixture), logits(dense, tokens_bs, options)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_softmax_over_all_experts_counts_as_without_preferences() -> None:
    """Of a router of zeros the mixture is the dense model; of another one it is near it."""
    mixture = replace(DENSE, **HALVES, moe_router_pre_softmax=True)
    assert sum_of_weights(config(mixture)) == 2 / 8
    dense = random_parameters(DENSE)
    made = mixture_of(dense, Upcycling(config(mixture), 2, seed=5), mixture)
    tokens_bs = torch.randint(DENSE.vocab_size, (3, 8))
    tilt = {"router.weight": 1e-7}
    for name, tensor in made.items():
        tensor *= next((by for end, by in tilt.items() if name.endswith(end)), 1.0)
    ours, theirs = logits(made, tokens_bs, mixture), logits(dense, tokens_bs, DENSE)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@given(data=st.data(), first=st.booleans(), parts=st.sampled_from([1, 2, 4]))
def test_any_box_of_a_rank_is_its_box_of_the_whole(
    data: st.DataObject, first: bool, parts: int
) -> None:
    model = config(replace(DENSE, num_experts=8, moe_ffn_hidden_size=24 // parts))
    f, h = model.experts.moe_ffn_hidden_size, model.hidden_size
    shape, dense = ((16 * f, h), (48, h)) if first else ((8 * h, f), (h, 24))
    name = f"weight.decoder.layers.0.mlp.experts.linear_fc{2 - first}.weight"
    values = torch.randn(dense)

    def filled(tensor: BoxedTensor) -> None:
        upcycling = Upcycling(model, parts, seed=5)
        read = upcycling.dense_tensors({name: tensor})
        [own] = read.values()
        own.as_subclass(torch.Tensor).copy_(values)
        upcycling.fill({name: tensor}, read)

    everything = torch.zeros(shape)
    filled(BoxedTensor(everything, shape, whole(shape)))
    start = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    size = tuple(data.draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True))
    own, at = torch.zeros(size[0] + 1, size[1]), (1, 0)
    filled(BoxedTensor(own, shape, [Piece(Box(start, size), at)]))
    assert torch.equal(own[1:], everything[Box(start, size).slices])
    assert not own[0].any()


def test_widths_that_do_not_fit_are_told() -> None:
    upcycling = Upcycling(config(replace(DENSE, **HALVES)), 1, seed=5)
    assert upcycling.fault({"ffn_hidden_size": 24}) == (
        "--moe-use-upcycling makes experts of an MLP of width 24, which is not "
        "--moe-upcycling-granularity 1 times --moe-ffn-hidden-size 12: give another of the two"
    )
