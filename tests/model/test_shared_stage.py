"""A stage that tensor-parallel ranks share computes what one rank computes alone."""

import pytest
import torch
from harness.rank_pool import RankPool
from model.shared_stage import (
    GPT,
    LLAMA,
    MICROBATCHES,
    MIDDLE,
    MODELS,
    WHOLE,
    StageRun,
    all_tokens,
    assembled,
    run_on_rank,
    run_stage,
)

from megatron.model.settings import ModelSettings

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Relative and absolute. Outputs are about 1, gradients up to 100."""

MOST = [(2, True), (4, False), (4, True)]
"""Numbers of ranks, and whether each has its own tokens."""


def shared(
    ranks: RankPool, config: ModelSettings, size: int, split_tokens: bool, **settings: object
) -> list[StageRun]:
    """The runs of all ranks, after a look at whether a split backward makes a difference."""
    settings = {"placement": WHOLE, "dtype": torch.float64} | settings
    both = ranks.run(run_on_rank, size, split_tokens=split_tokens, config=config, **settings)
    for runs in both:
        fused, split = runs["fused"], runs["split"]
        for one, other in zip(fused.outputs, split.outputs, strict=True):
            assert torch.equal(one, other)
        for one, other in zip(fused.input_gradients, split.input_gradients, strict=True):
            assert torch.equal(one, other)
        for name, gradient in fused.gradients.items():
            for (_, one), (_, other) in zip(
                gradient.boxes, split.gradients[name].boxes, strict=True
            ):
                assert torch.equal(one, other), name
    return [runs["split"] for runs in both]


def assert_equal_alone(
    runs: list[StageRun], alone: StageRun, split_tokens: bool, tolerance: float
) -> None:
    for number in range(MICROBATCHES):
        for kind in ("outputs", "input_gradients"):
            own = all_tokens([getattr(run, kind)[number] for run in runs], split_tokens)
            expected = getattr(alone, kind)[number]
            torch.testing.assert_close(own, expected, rtol=tolerance, atol=tolerance)
    gradients = assembled(runs)
    assert gradients.keys() == alone.gradients.keys()
    for name, expected in assembled([alone]).items():
        assert torch.allclose(gradients[name], expected, rtol=tolerance, atol=tolerance), name


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("size", "split_tokens"), [(2, False), *MOST])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_share_a_stage_compute_what_one_does(
    name: str, size: int, split_tokens: bool, ranks: RankPool
) -> None:
    """Outputs, input gradients, assembled gradients; and a split backward to the bit."""
    runs = shared(ranks, MODELS[name], size, split_tokens)
    alone = run_stage(MODELS[name], WHOLE, torch.float64)
    assert_equal_alone(runs, alone, split_tokens, TOLERANCE[torch.float64])


@pytest.mark.parametrize(("size", "split_tokens"), MOST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_in_the_types_of_training(
    dtype: torch.dtype, size: int, split_tokens: bool, ranks: RankPool
) -> None:
    """bf16 is as near to float64 as one rank's own bf16."""
    config = LLAMA.replaced(hidden_dropout=0.2)
    runs = shared(ranks, config, size, split_tokens, placement=MIDDLE, dtype=dtype)
    alone = run_stage(config, MIDDLE, dtype)
    if dtype in TOLERANCE:
        assert_equal_alone(runs, alone, split_tokens, TOLERANCE[dtype])
        return
    exact = assembled([run_stage(config, MIDDLE, torch.float64)])
    own, others = assembled([alone]), assembled(runs)
    for name, expected in exact.items():
        allowed = 2 * (own[name].double() - expected).norm()
        assert (others[name].double() - expected).norm() <= allowed, name


@pytest.mark.parametrize(
    ("config", "split_tokens", "missed"),
    [
        (GPT, True, {"layernorm", "linear_proj.bias", "linear_fc2.bias", "position_embeddings"}),
        (LLAMA, True, {"layernorm"}),
        (LLAMA, False, {"q_layernorm", "k_layernorm"}),
        (GPT, False, set()),
    ],
)
def test_a_sum_that_is_left_out_is_seen(
    config: ModelSettings, split_tokens: bool, missed: set[str], ranks: RankPool
) -> None:
    """Without the sum over the tensor axis exactly the partial gradients are wrong."""
    runs = shared(ranks, config, 2, split_tokens)
    alone = assembled([run_stage(config, WHOLE, torch.float64)])
    wrong = {
        name
        for name, gradient in assembled(runs, sums_partial=False).items()
        if not torch.allclose(gradient, alone[name], rtol=1e-6, atol=1e-6)
    }
    assert wrong == {name for name in alone if any(part in name for part in missed)}
    assert wrong == {name for name, own in runs[0].gradients.items() if own.is_partial}


@pytest.mark.parametrize("size", [2, 4])
def test_attention_drops_alike_with_and_without_sequence_parallelism(
    size: int, ranks: RankPool
) -> None:
    """It depends on the number of ranks, on nothing else of the layout."""
    config = GPT.replaced(attention_dropout=0.3)
    whole, split = (shared(ranks, config, size, on) for on in (False, True))
    for number in range(MICROBATCHES):
        torch.testing.assert_close(
            all_tokens([run.outputs[number] for run in split], True), whole[0].outputs[number]
        )
    alone = run_stage(config, WHOLE, torch.float64)
    assert not torch.allclose(whole[0].outputs[0], alone.outputs[0])
