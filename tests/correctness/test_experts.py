"""A mixture of experts trains the same model in every layout.

The reference computes every expert for every token, masked, in float64 (``plain_experts``). With a
score that two experts share in all bits the two could choose differently; random ones never are.
"""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from correctness.agreement import errors
from correctness.rank_runs import (
    Batches,
    RankRun,
    assemble,
    check_agreement,
    check_copies,
    train_on_rank,
)
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference import plain_experts, plain_loss
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_training import Training
from torch import Tensor

from megatron.kernels.face import Kernels
from megatron.layers.experts import balance
from megatron.layers.experts.order import Order
from megatron.layers.experts.slice_balance import imbalance
from megatron.layers.recompute import Recomputation
from megatron.run.run_config import RunConfig
from megatron.runtime.layer_losses import JoinedLosses, Source

MIXTRAL = GPTOptions(
    num_layers=4,
    vocab_size=37,
    tie_embeddings=False,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    num_experts=4,
    moe_ffn_hidden_size=12,
    moe_router_topk=2,
    moe_router_load_balancing_type=("aux_loss", "global_aux_loss"),
    moe_aux_loss_coeff=(0.3, 0.2),
    moe_z_loss_coeff=0.05,
)
DEEPSEEK = replace(
    MIXTRAL,
    num_experts=8,
    moe_layer_pattern=(0, 1, 1, 1),
    moe_router_topk=4,
    moe_router_score_function="sigmoid",
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.5,
    moe_router_load_balancing_type="seq_aux_loss",
    moe_aux_loss_coeff=0.3,
    moe_router_in_fp32=True,
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.01,
    moe_shared_expert_intermediate_size=8,
)
QWEN2 = replace(
    MIXTRAL,
    moe_router_pre_softmax=True,
    moe_router_load_balancing_type="none",
    moe_aux_loss_coeff=0.0,
    moe_router_topk=1,
    moe_expert_capacity_factor=1.0,
    moe_shared_expert_intermediate_size=8,
    moe_shared_expert_gate=True,
)
OLMOE = replace(
    MIXTRAL,
    qk_layernorm=True,
    qk_layernorm_across_heads=True,
    num_query_groups=2,
    moe_router_pre_softmax=True,
    moe_router_in_fp64=True,
)
GPT_OSS = replace(
    MIXTRAL,
    num_query_groups=2,
    swiglu=False,
    quick_geglu=True,
    activation_func_clamp_value=0.5,
    glu_linear_offset=1.0,
    add_bias_linear=True,
    softmax_type="learnable",
    window_size=3,
    window_pattern=(1, 0),
    moe_shared_expert_intermediate_size=8,
)
BASE = replace(
    MIXTRAL,
    moe_router_load_balancing_type="sinkhorn",
    moe_aux_loss_coeff=0.0,
    moe_router_topk=1,
)
MODELS = {
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK,
    "qwen2": QWEN2,
    "olmoe": OLMOE,
    "gpt-oss": GPT_OSS,
    "base": BASE,
}
"""Every way to balance experts and every way to choose them occurs."""

WHOLE, PARTS = Recomputation(group=1), Recomputation(frozenset({"core_attn", "layernorm", "moe"}))
ACTIVATIONS = Recomputation(frozenset({"moe_act"}))
CASES = [
    ("mixtral", Layout(1, "none")),
    ("deepseek", Layout(1, "none")),
    ("qwen2", Layout(1, "none")),
    ("mixtral", Layout(2, "vocab-2")),
    ("deepseek", Layout(2, "vocab-1", "interleaved", recomputation=PARTS)),
    ("qwen2", Layout(2, "none", "zb-v", recomputation=ACTIVATIONS)),
    ("deepseek", Layout(2, "vocab-2", "zb-h1", recomputation=WHOLE)),
    ("mixtral", Layout(2, "vocab-2", "v-half", recomputation=PARTS)),
    ("mixtral", Layout(1, "none", tensor=2)),
    ("deepseek", Layout(1, "vocab-2", "zb-h1", tensor=2, sequence=True)),
    ("qwen2", Layout(1, "none", tensor=2, sequence=True, recomputation=WHOLE)),
    ("mixtral", Layout(1, "none", context=2)),
    ("deepseek", Layout(1, "none", context=2, tensor=2, sequence=True)),
    ("mixtral", Layout(1, "none", replicas=2, sharded=True, overlap=True)),
    ("deepseek", Layout(2, "vocab-1", "zb-h1", replicas=2, sharded=True)),
    ("olmoe", Layout(2, "vocab-2", "zb-v")),
    ("olmoe", Layout(1, "none", tensor=2, sequence=True, recomputation=PARTS)),
    ("gpt-oss", Layout(1, "none", recomputation=PARTS)),
    ("gpt-oss", Layout(1, "vocab-2", "zb-h1", tensor=2, sequence=True)),
    ("gpt-oss", Layout(2, "vocab-1", replicas=2, sharded=True, experts=2)),
    full("gpt-oss", Layout(1, "none", tensor=2, sequence=True, replicas=2, expert_tensor=1)),
    full("gpt-oss", Layout(2, "none", "zb-v", replicas=2, experts=2, dispatcher="alltoall")),
    full("gpt-oss", Layout(1, "none", tensor=2, experts=2, expert_tensor=1, sequence=True)),
    ("qwen2", Layout(1, "none", tensor=2, sequence=True, context=2)),
    ("base", Layout(2, "vocab-2", "zb-h1", replicas=2, recomputation=PARTS)),
    full("base", Layout(1, "none", tensor=2, sequence=True, recomputation=WHOLE)),
    ("mixtral", Layout(2, "vocab-2", "zb-v", slices=3)),
    ("deepseek", Layout(1, "none", slices=2, recomputation=WHOLE)),
    full("deepseek", Layout(2, "vocab-1", "zb-h1", slices=3, replicas=2, sharded=True)),
    full("mixtral", Layout(1, "none", slices=3, context=2, replicas=2, recomputation=PARTS)),
    full("mixtral", Layout(2, "none", "interleaved", slices=6, tensor=2, sequence=True)),
    full(
        "mixtral", Layout(2, "none", slices=4, replicas=2, recomputation=WHOLE, recompute_ahead=1)
    ),
    full("qwen2", Layout(4, "interlaced")),
    full("olmoe", Layout(1, "none", tensor=2, context=2, sharded=True)),
    full("deepseek", Layout(4, "vocab-2", "zb-h2", recomputation=WHOLE, recompute_ahead=1)),
    full("mixtral", Layout(2, "naive", "zb-v", tensor=2, sequence=True, replicas=2, sharded=True)),
]


def job(name: str) -> Job:
    return Job(
        MODELS[name],
        micro_batch_size=2,
        microbatches=4,
        masked_out=(1,),
        iterations=4,
        warmup=1,
        sequence=12,
    )


Known = dict[tuple[str, int], tuple[Parameters, Training]]
"""Of a model and a number of replicas the initial weights, and what the reference makes of them."""


@pytest.fixture(scope="module")
def known() -> Known:
    return {}


def expected(
    ranks: RankPool, known: Known, name: str, replicas: int = 1
) -> tuple[Parameters, Training]:
    """The loss that compares the global batch so far is that of the replicas' microbatches."""
    if "global_aux_loss" not in plain_experts.types(MODELS[name]):
        replicas = 1
    if (name, replicas) not in known:
        config = job(name).config(Layout(1, "none"))
        [own] = ranks.run(train_on_rank, 1, config=config, batches=job(name).batches()[:1])
        start = assemble([own.initial])
        wide = {key: value.double() for key, value in start.items()}
        with patch.object(plain_loss, "replicas", replicas):
            known[name, replicas] = start, job(name).reference(wide)
    return known[name, replicas]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_a_layout_trains_the_plain_mixture(
    name: str, layout: Layout, ranks: RankPool, known: Known, request: pytest.FixtureRequest
) -> None:
    start, wanted = expected(ranks, known, name, layout.replicas)
    pool = ranks
    if layout.world_size > ranks.size:
        pool = request.getfixturevalue("eight_ranks")
    compare(job(name), trained(pool, job(name), layout), start, wanted)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen2", "deepseek"])
def test_routers_count_over_both_levels_of_context_parallelism(
    name: str, eight_ranks: RankPool
) -> None:
    own = replace(job(name), sequence=16, iterations=2)  # later one token is at a capacity's edge
    config = own.config(Layout(1, "none"))
    [whole] = eight_ranks.run(train_on_rank, 1, config=config, batches=own.batches()[:1])
    start = assemble([whole.initial])
    wanted = own.reference({key: value.double() for key, value in start.items()})
    layout = Layout(2, "vocab-2", context=4, exchange="a2a+p2p", neighbours=2)
    compare(own, trained(eight_ranks, own, layout), start, wanted)


def trained(ranks: RankPool, job: Job, layout: Layout) -> list[RankRun]:
    """What every rank makes of a job, with one evaluation."""
    runs: list[RankRun] = ranks.run(
        train_on_rank,
        layout.world_size,
        config=job.config(layout),
        batches=job.batches(),
        evaluation_batches=job.batches(seed=1),
        evaluate_after=(job.iterations - 1,),
    )
    return runs


def compare(job: Job, runs: list[RankRun], start: Parameters, wanted: Training) -> None:
    """Compare all that ranks have made of a job with what the reference makes of it."""
    check_agreement(runs)
    check_copies(runs)
    initial = assemble([own.initial for own in runs])
    assert initial.keys() == start.keys()
    assert all(initial[key].equal(value) for key, value in start.items())
    assert runs[0].losses == pytest.approx(wanted.losses, rel=1e-5)
    for found, losses in zip(runs[0].layer_losses, wanted.layer_losses, strict=True):
        assert found == pytest.approx(losses, rel=1e-5)
    assert runs[0].imbalances == pytest.approx(wanted.imbalances, rel=1e-6)
    assert runs[0].expert_loads == wanted.expert_loads
    assert runs[0].gradient_norms == pytest.approx(wanted.gradient_norms, rel=1e-5)
    gradients = assemble([own.first_gradients for own in runs])
    assert gradients.keys() == wanted.first_gradients.keys()
    assert max(errors(gradients, wanted.first_gradients).values()) < 1e-5
    final = {key: value.double() for key, value in assemble([r.final for r in runs]).items()}
    assert max(errors(final, wanted.parameters).values()) < 1e-5
    biases = {key: value for own in runs for key, value in own.buffers.items()}
    assert {key.removesuffix(".router.expert_bias") for key in biases} == wanted.biases.keys()
    for key, bias_e in wanted.biases.items():
        torch.testing.assert_close(biases[f"{key}.router.expert_bias"].double(), bias_e)
    with (
        patch.object(plain_experts, "is_training", False),
        patch.dict(plain_experts.biases, wanted.biases),
    ):
        evaluated, _ = plain_loss.loss_and_gradients(final, job.evaluated, job.options)
    assert runs[0].evaluations == pytest.approx([evaluated], rel=1e-6)


def halved_balance(times_xe: Tensor, scores_xe: Tensor) -> Tensor:
    return 0.5 * imbalance(times_xe, scores_xe)


def moved_by_one(cls: type[Order], experts_bsk: Tensor, experts: int, kernels: Kernels) -> Order:
    """The last expert begins a slot too late."""
    order = by_expert(experts_bsk, experts, kernels)
    ends = order.ends.clone()
    ends[-2] += 1
    return order._replace(ends=ends)


def unweighted(cls: type[Order], experts_bsk: Tensor, experts: int, kernels: Kernels) -> Order:
    """Slots are joined in the order of tokens, though experts come in a row."""
    order = by_expert(experts_bsk, experts, kernels)
    return order._replace(slot_bsk=order.choice_z.view(order.slot_bsk.shape))


def times_microbatches(self: JoinedLosses, *args: Any) -> tuple[Source, ...]:
    """The losses of layers are summed over microbatches where a mean is due."""
    return scaled(join(self, *args), len(self._batch))


def times_replicas(self: JoinedLosses, *args: Any) -> tuple[Source, ...]:
    """The losses of layers are means over a replica's tokens, and replicas sum their gradients."""
    return scaled(join(self, *args), REPLICATED.replicas)


def scaled(sources: tuple[Source, ...], factor: float) -> tuple[Source, ...]:
    return tuple(replace(own, gradient=factor * own.gradient) for own in sources)


by_expert, join = Order.by_expert, JoinedLosses.join
ALONE, REPLICATED = Layout(1, "none"), Layout(1, "none", replicas=2)
FAULTS: dict[str, tuple[Layout, object, str, object]] = {
    "balance": (ALONE, balance, "imbalance", halved_balance),
    "balance times microbatches": (ALONE, JoinedLosses, "join", times_microbatches),
    "balance times replicas": (REPLICATED, JoinedLosses, "join", times_replicas),
    "last expert": (ALONE, Order, "by_expert", classmethod(moved_by_one)),
    "joined by tokens": (ALONE, Order, "by_expert", classmethod(unweighted)),
}


def train_with_fault(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches, fault: str
) -> RankRun:
    _, owner, name, wrong = FAULTS[fault]
    with patch.object(owner, name, wrong):
        return train_on_rank(rank, world_size, config=config, batches=batches)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, ranks: RankPool, known: Known) -> None:
    """Else the comparison above would show nothing."""
    layout = FAULTS[fault][0]
    _, wanted = expected(ranks, known, "mixtral", layout.replicas)
    config, batches = job("mixtral").config(layout), job("mixtral").batches()[:1]
    runs = ranks.run(
        train_with_fault, layout.world_size, config=config, batches=batches, fault=fault
    )
    gradients = assemble([own.first_gradients for own in runs])
    assert max(errors(gradients, wanted.first_gradients).values()) > 1e-3
