"""Experts spread over ranks train the same mixture as experts with their layer.

The reference is that of ``test_experts``: every expert for every token, masked, in float64.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from correctness.agreement import errors
from correctness.rank_runs import (
    ListLoader,
    RankRun,
    assemble,
    check_agreement,
    train_on_rank,
)
from correctness.short_runs import Job, Layout
from correctness.test_experts import (
    DEEPSEEK,
    MIXTRAL,
    PARTS,
    QWEN2,
    WHOLE,
    compare,
    moved_by_one,
    trained,
)
from harness.rank_pool import RankPool
from kernels.grouped_stand_ins import installed
from reference import plain_experts, plain_loss, plain_training
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_training import Training
from torch import Tensor

from megatron.layers.experts import router as routers
from megatron.layers.experts.order import Order
from megatron.layers.experts.router import Choice
from megatron.layers.experts.settings import ExpertSettings
from megatron.layers.tensor_cut import OfExperts

MODELS = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK, "qwen2": QWEN2}

CASES = [
    ("mixtral", Layout(1, "none", replicas=2, experts=2)),
    ("qwen2", Layout(1, "none", tensor=2, sequence=True, expert_tensor=1)),
    ("qwen2", Layout(1, "vocab-2", "zb-h1", replicas=2, experts=2)),
    (
        "mixtral",
        Layout(1, "none", context=2, experts=2, dispatcher="alltoall", recomputation=PARTS),
    ),
    (
        "deepseek",
        Layout(
            1, "vocab-1", "zb-h1", replicas=4, experts=2, dispatcher="alltoall", sharded=True,
            overlap=True, bucket_size=500,
        ),
    ),
    ("deepseek", Layout(1, "none", replicas=4, expert_tensor=2, experts=2, dispatcher="alltoall")),
    (
        "qwen2",
        Layout(
            2, "vocab-2", "zb-v", replicas=2, experts=2, dispatcher="alltoall", order="tp-pp-dp",
            sharded=True, recomputation=WHOLE,
        ),
    ),
]  # fmt: skip


def job_of(options: GPTOptions, iterations: int = 3) -> Job:
    return Job(
        options,
        micro_batch_size=2,
        microbatches=8,
        masked_out=(1, 3, 5, 7),
        iterations=iterations,
        warmup=1,
        sequence=8,
    )


Known = Callable[[Job, int], tuple[Parameters, Training]]


@pytest.fixture(scope="module")
def known(ranks: RankPool) -> Known:
    return by_reference(ranks)


def by_reference(ranks: RankPool) -> Known:
    """Of a job and a number of replicas: initial weights, and what the reference makes of them.

    The loss that compares the global batch so far is that of the replicas' microbatches.
    """
    done: dict[tuple[Job, int], tuple[Parameters, Training]] = {}

    def of(job: Job, replicas: int) -> tuple[Parameters, Training]:
        if "global_aux_loss" not in plain_experts.types(job.options):
            replicas = 1
        if (job, replicas) not in done:
            with patch.object(plain_loss, "replicas", replicas):
                done[job, replicas] = of_reference(ranks, job)
        return done[job, replicas]

    return of


def of_reference(ranks: RankPool, job: Job) -> tuple[Parameters, Training]:
    config = job.config(Layout(1, "none"))
    [own] = ranks.run(train_on_rank, 1, config=config, batches=job.batches()[:1])
    start = assemble([own.initial])
    return start, job.reference({name: value.double() for name, value in start.items()})


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_spread_experts_train_the_plain_mixture(
    name: str, layout: Layout, ranks: RankPool, known: Known
) -> None:
    job = job_of(MODELS[name])
    compare(job, trained(ranks, job, layout), *known(job, layout.replicas))


def train_changed(rank: int, world_size: int, *, change: str, **kwargs: Any) -> RankRun:
    """Train as ``train_on_rank`` does, with one thing changed."""
    owner, name, other = CHANGES[change]
    with patch.object(owner, name, other):
        return train_on_rank(rank, world_size, **kwargs)


def last_only(logits_bue: Tensor, options: ExpertSettings, bias_e: Tensor | None = None) -> Choice:
    """All tokens choose the last expert."""
    shape = (*logits_bue.shape[:2], 1)
    experts_buk = torch.full(shape, options.num_experts - 1, device=logits_bue.device)
    return Choice(experts_buk, logits_bue.softmax(-1)[..., -1:])


def plain_last_only(logits_bse: Tensor, options: Any, bias_e: Tensor) -> Tensor:
    weights_bse = torch.exp(logits_bse) / torch.exp(logits_bse).sum(-1, keepdim=True)
    is_last = torch.arange(options.num_experts) == options.num_experts - 1
    return weights_bse.where(is_last, 0)


CHANGES: dict[str, tuple[Any, str, object]] = {
    "all to the last expert": (routers, "choose", last_only),
    "last expert moved by one": (Order, "by_expert", classmethod(moved_by_one)),
    "summed over all replicas": (OfExperts, "axis", None),
}

ALL_TO_ONE = replace(
    QWEN2,
    moe_expert_capacity_factor=None,
    moe_shared_expert_intermediate_size=0,
    moe_shared_expert_gate=False,
)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_all_tokens_may_choose_one_expert(dispatcher: Any, ranks: RankPool) -> None:
    """The other experts get no token: their gradients are 0, and their moments and weights decay.

    One of the two ranks has no token at all.
    """
    job = job_of(ALL_TO_ONE)
    layout = Layout(1, "none", "zb-h1", replicas=2, experts=2, dispatcher=dispatcher)
    with patch.object(plain_experts, "weights", plain_last_only):
        start, wanted = of_reference(ranks, job)
        runs = ranks.run(
            train_changed,
            2,
            config=job.config(layout),
            batches=job.batches(),
            evaluation_batches=job.batches(seed=1),
            evaluate_after=(job.iterations - 1,),
            change="all to the last expert",
        )
        compare(job, runs, start, wanted)


def train_by_package(rank: int, world_size: int, **kwargs: Any) -> RankRun:
    """Train as ``train_on_rank`` does, where a stand-in for Transformer Engine is installed."""
    with installed() as calls:
        run = train_on_rank(rank, world_size, **kwargs)
        assert calls, "the package multiplies"
    return run


def test_experts_that_a_package_multiplies_train_the_plain_mixture(
    ranks: RankPool, known: Known
) -> None:
    job = job_of(QWEN2)
    layout = Layout(
        1, "vocab-2", "zb-h1", replicas=2, experts=2, dispatcher="alltoall", recomputation=PARTS
    )
    config = job.config(layout)
    train = replace(config.train, grouped_package="transformer_engine")
    runs = ranks.run(
        train_by_package,
        2,
        config=replace(config, train=train),
        batches=job.batches(),
        evaluation_batches=job.batches(seed=1),
        evaluate_after=(job.iterations - 1,),
    )
    compare(job, runs, *known(job, layout.replicas))


class Turns:
    """Counts the calls of a function, which begin iterations.

    Args:
        function: of an iteration.
    """

    begun = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        Turns.begun = 0

    def __call__(self, *args: Any) -> Any:
        Turns.begun += 1
        return self._function(*args)


def in_turns(logits_bue: Tensor, options: ExpertSettings, bias_e: Tensor | None = None) -> Choice:
    """All tokens choose the last expert in the first two iterations, and the first one later."""
    choice = last_only(logits_bue, options)
    if Turns.begun <= 2:
        return choice
    first_buk = torch.zeros_like(choice.experts_buk)
    return Choice(first_buk, logits_bue.softmax(-1)[..., :1])


def plain_in_turns(logits_bse: Tensor, options: Any, bias_e: Tensor) -> Tensor:
    if Turns.begun <= 2:
        return plain_last_only(logits_bse, options, bias_e)
    return plain_last_only(logits_bse.flip(-1), options, bias_e).flip(-1)


def train_in_turns(rank: int, world_size: int, **kwargs: Any) -> RankRun:
    """Train as ``train_on_rank`` does; experts have tokens in turns."""
    loaded = Turns(ListLoader.next_batch)
    with (
        patch.object(ListLoader, "next_batch", lambda self: loaded(self)),
        patch.object(routers, "choose", in_turns),
    ):
        return train_on_rank(rank, world_size, **kwargs)


def test_moments_of_an_expert_without_tokens_decay_as_those_of_others(ranks: RankPool) -> None:
    """The last expert has tokens at first; later its gradient is 0, and its momentum moves it on.

    Then the first expert, whose moments were 0, has all tokens.
    """
    job = replace(job_of(ALL_TO_ONE), iterations=5)
    layout = Layout(1, "none", "zb-h1", replicas=2, experts=2, dispatcher="alltoall", sharded=True)
    counted = Turns(plain_loss.losses_and_gradients)
    with (
        patch.object(plain_experts, "weights", plain_in_turns),
        patch.object(plain_training, "losses_and_gradients", counted),
    ):
        start, wanted = of_reference(ranks, job)
    runs = ranks.run(train_in_turns, 2, config=job.config(layout), batches=job.batches())
    check_agreement(runs)
    assert runs[0].losses == pytest.approx(wanted.losses, rel=1e-5)
    final = {key: own.double() for key, own in assemble([own.final for own in runs]).items()}
    assert max(errors(final, wanted.parameters).values()) < 1e-5
    for name, own in final.items():
        if ".experts." in name:
            assert all(
                not torch.equal(part, old.double())
                for part, old in zip(own.chunk(4), start[name].chunk(4), strict=True)
            ), "weights decay also where no token ever was"


def faulty(ranks: RankPool, fault: str) -> list[RankRun]:
    """The first iteration of Mixtral on two ranks with a fault."""
    job = job_of(MIXTRAL)
    config = job.config(Layout(1, "none", replicas=2, experts=2, dispatcher="alltoall"))
    runs: list[RankRun] = ranks.run(
        train_changed, 2, config=config, batches=job.batches()[:1], change=fault
    )
    return runs


def test_a_slot_of_the_wrong_expert_would_be_seen(ranks: RankPool, known: Known) -> None:
    """Else the comparisons above would show nothing."""
    _, wanted = known(job_of(MIXTRAL), 2)
    runs = faulty(ranks, "last expert moved by one")
    gradients = assemble([own.first_gradients for own in runs])
    assert max(errors(gradients, wanted.first_gradients).values()) > 1e-3


def test_a_sum_of_gradients_of_different_experts_would_be_seen(
    ranks: RankPool, known: Known
) -> None:
    _, wanted = known(job_of(MIXTRAL), 2)
    [norm] = faulty(ranks, "summed over all replicas")[0].gradient_norms
    assert norm != pytest.approx(wanted.gradient_norms[0], rel=1e-4)
