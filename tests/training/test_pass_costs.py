"""The assumed costs add up to the FLOPs of an iteration, however the vocabulary is treated."""

from dataclasses import replace

import pytest

from megatron.model.config import ModelConfig
from megatron.schedules.costs import Costs
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.registry import make_plan
from megatron.training.config import ParallelConfig
from megatron.training.flops import iteration_flops
from megatron.training.pass_costs import pass_costs

MODEL = ModelConfig(
    num_layers=8,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    seq_length=32,
    max_position_embeddings=32,
    vocab_size=1000,
)
PARALLEL = ParallelConfig(
    pipeline_size=4,
    vocab_parallel="none",
    pipeline_schedule="1f1b",
    padded_vocab_size=1024,
    device="cpu",
    backend="gloo",
    timeout_minutes=1,
)


WHOLE: tuple[PassKind, ...] = ("F", "B")
KINDS: dict[str, tuple[PassKind, ...]] = {
    "none": WHOLE, "vocab-1": (*WHOLE, "S", "T"), "vocab-2": (*WHOLE, "S", "T")
}  # fmt: skip


def cost(costs: Costs, treatment: str, ranks: int, rank: int, kind: PassKind) -> float:
    return costs.of_pass(make_plan("1f1b", treatment, ranks, 1), rank, Pass(kind, 0))


@pytest.mark.parametrize("treatment", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_microbatch_costs_its_share_of_the_iteration(treatment: str, ranks: int) -> None:
    parallel = replace(PARALLEL, vocab_parallel=treatment, pipeline_size=ranks)
    costs = pass_costs(MODEL, parallel, micro_batch_size=3)
    total = sum(
        cost(costs, treatment, ranks, rank, kind)
        for rank in range(ranks)
        for kind in KINDS[treatment]
    )
    assert total == pytest.approx(iteration_flops(MODEL, global_batch_size=3))


def test_only_none_makes_the_last_rank_slower() -> None:
    for treatment, kinds in KINDS.items():
        costs = pass_costs(MODEL, replace(PARALLEL, vocab_parallel=treatment), 1)
        slower = [
            cost(costs, treatment, 4, 3, kind) > cost(costs, treatment, 4, 0, kind)
            for kind in kinds
        ]
        assert all(slower) if treatment == "none" else not any(slower)


def test_s_forms_one_product_of_three_with_two_barriers_and_two_with_one() -> None:
    found = {
        (treatment, kind): cost(
            pass_costs(MODEL, replace(PARALLEL, vocab_parallel=treatment), 1), treatment, 4, 0, kind
        )
        for treatment in ("vocab-1", "vocab-2")
        for kind in ("S", "T")
    }
    one_product = found["vocab-1", "S"]
    assert found["vocab-2", "T"] == one_product == found["vocab-1", "T"] / 2
