"""Training with every optimizer agrees with the plain GPT, in fp32, under several layouts."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from correctness.rank_runs import RankRun, assemble, train_on_rank
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_optimizers import PlainMuon, PlainSGD
from reference.plain_training import AdamWOptions, Optimizer, Training, train

from megatron.optimizer.settings import MuonSettings, OptimizerSettings, SharedMatrices
from megatron.run.run_config import RunConfig

JOB = Job(
    GPTOptions(
        num_layers=4,
        vocab_size=37,
        tie_embeddings=False,
        swiglu=True,
        num_query_groups=2,
    ),
    adamw=AdamWOptions(adam_eps=1e-6, clip_grad=0.5, weight_decay=0.1),
    microbatches=4,
    lr=3e-2,
)
ONE = Layout(1, "none")


@dataclass(frozen=True)
class Case:
    """An optimizer in two tongues.

    Attributes:
        configured: its configuration, from that of AdamW.
        plain: the same for the plain GPT.
    """

    configured: Callable[[OptimizerSettings], OptimizerSettings]
    plain: Callable[[], Optimizer]


def muon_of(
    nesterov: bool,
    adam_eps: float = JOB.adamw.adam_eps,
    tp_mode: SharedMatrices = "duplicated",
) -> Case:
    settings = MuonSettings(
        muon_momentum=0.9,
        muon_nesterov=nesterov,
        muon_fp32_matmul_prec="highest",
        muon_tp_mode=tp_mode,
    )
    width = JOB.options.hidden_size // JOB.options.num_attention_heads
    heads = JOB.options.num_attention_heads // 2
    return Case(
        lambda config: replace(config, optimizer="muon", muon=settings),
        lambda: PlainMuon(
            (heads * width, width, width), 0.9, nesterov, 0.1, (0.9, 0.999, adam_eps)
        ),
    )


CASES = {
    "sgd": Case(
        lambda config: replace(config, optimizer="sgd", sgd_momentum=0.8),
        lambda: PlainSGD(0.8, 0.1),
    ),
    "muon": muon_of(nesterov=False),
    "nesterov": muon_of(nesterov=True),
    "slices": muon_of(nesterov=True, tp_mode="distributed"),
}
RUNS = [
    full("sgd", Layout(2, "vocab-2", "zb-h1"), False),
    ("sgd", Layout(2, "vocab-2", "zb-h1"), True),
    full("sgd", Layout(1, "none", replicas=2, sharded=True), False),
    ("muon", ONE, False),
    full("muon", Layout(2, "vocab-2", "zb-h1"), False),
    full("muon", Layout(2, "vocab-2"), True),
    full("nesterov", Layout(2, "none", "interleaved"), False),
    full("muon", Layout(1, "vocab-2", replicas=2), False),
    ("muon", Layout(1, "none", replicas=4, overlap=True, bucket_size=3000, sharded=True), False),
    ("nesterov", Layout(2, "vocab-2", "zb-h1", replicas=2, sharded=True), True),
    full("muon", Layout(1, "none", tensor=2), False),
    full("nesterov", Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True), False),
    full("muon", Layout(2, "vocab-2", tensor=2), True),
    ("slices", Layout(1, "none", tensor=2), False),
    full("slices", Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True), True),
    full("slices", Layout(1, "vocab-2", tensor=2, replicas=2, sharded=True), False),
]


MIXTURE = replace(
    JOB,
    options=replace(
        JOB.options,
        num_layers=2,
        add_bias_linear=False,
        num_experts=4,
        moe_ffn_hidden_size=12,
        moe_router_topk=2,
    ),
)
MIXTURE_RUNS = [
    ("muon", Layout(1, "none", replicas=2, experts=2)),
    full("muon", Layout(1, "none", tensor=2, sequence=True)),
    full("muon", Layout(1, "vocab-2", replicas=4, experts=2, dispatcher="alltoall", sharded=True)),
    full("muon", Layout(2, "vocab-2", "zb-h1", replicas=2, sharded=True)),
    full("slices", Layout(1, "none", tensor=2, sequence=True)),
]


def configured(case: Case, layout: Layout, job: Job = JOB) -> RunConfig:
    config = job.config(layout)
    return replace(config, optimizer=case.configured(config.optimizer))


@pytest.fixture(scope="module")
def start(ranks: RankPool) -> Parameters:
    """The initial weights, which depend on nothing."""
    [alone] = ranks.run(train_on_rank, 1, config=JOB.config(ONE), batches=JOB.batches()[:1])
    return assemble([alone.initial])


def reference(case: Case, start: Parameters) -> Training:
    return train(
        {name: value.double() for name, value in start.items()},
        JOB.batches(),
        JOB.learning_rates(),
        JOB.options,
        JOB.adamw,
        case.plain(),
    )


@pytest.mark.parametrize(("name", "layout", "post_validation"), RUNS, ids=str)
def test_losses_norms_and_weights(
    name: str, layout: Layout, post_validation: bool, start: Parameters, ranks: RankPool
) -> None:
    config = configured(CASES[name], layout)
    config = replace(config, optimizer=replace(config.optimizer, post_validation=post_validation))
    by_rank: list[RankRun] = ranks.run(
        train_on_rank, layout.world_size, config=config, batches=JOB.batches()
    )
    expected = reference(CASES[name], start)
    assert by_rank[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert by_rank[0].gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-4)
    assert max(expected.gradient_norms) > JOB.adamw.clip_grad, "nothing was clipped"
    final = assemble([own.final for own in by_rank])
    for key, value in expected.parameters.items():
        moved = (value - start[key].double()).norm()
        error = (final[key].double() - value).norm()
        assert error < 2e-3 * moved, (key, float(error), float(moved))


@pytest.mark.parametrize(("name", "layout"), MIXTURE_RUNS, ids=str)
def test_muon_moves_every_expert_by_itself(name: str, layout: Layout, ranks: RankPool) -> None:
    case, batches = CASES[name], MIXTURE.batches()
    by_rank: list[RankRun] = ranks.run(
        train_on_rank,
        layout.world_size,
        config=configured(case, layout, MIXTURE),
        batches=batches,
    )
    start = assemble([own.initial for own in by_rank])
    muon = case.plain()
    assert isinstance(muon, PlainMuon)
    expected = train(
        {name: value.double() for name, value in start.items()},
        batches,
        MIXTURE.learning_rates(),
        MIXTURE.options,
        MIXTURE.adamw,
        replace(muon, experts=4),
    )
    assert by_rank[0].losses == pytest.approx(expected.losses, rel=1e-5)
    final = assemble([own.final for own in by_rank])
    for key, value in expected.parameters.items():
        moved = (value - start[key].double()).norm()
        error = (final[key].double() - value).norm()
        assert error < 2e-3 * moved, (key, float(error), float(moved))


def test_vocabulary_and_decay_have_schedules_of_their_own(ranks: RankPool) -> None:
    """Under vocab-2 every rank holds rows of both vocabulary layers; under none the first one."""
    losses, final = [], []
    for layout in (ONE, Layout(2, "vocab-2")):
        config = JOB.config(layout)
        optimizer = replace(
            config.optimizer,
            decoupled_lr=1e-3,
            weight_decay_incr_style="cosine",
            start_weight_decay=0.0,
            end_weight_decay=0.5,
            weight_decay_samples=config.train.whole_batches_samples,
        )
        by_rank: list[RankRun] = ranks.run(
            train_on_rank,
            layout.ranks,
            config=replace(config, optimizer=optimizer),
            batches=JOB.batches(),
        )
        losses.append(by_rank[0].losses)
        final.append(assemble([own.final for own in by_rank]))
    plain: list[RankRun] = ranks.run(
        train_on_rank, 1, config=JOB.config(ONE), batches=JOB.batches()
    )
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] != pytest.approx(plain[0].losses[-1], rel=1e-3)
    for name, value in final[0].items():
        torch.testing.assert_close(final[1][name], value, rtol=0, atol=2e-3, msg=name)
