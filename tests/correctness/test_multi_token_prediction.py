"""Multi-token prediction trains what plain PyTorch trains, in every layout.

Losses of the next token and of every depth, gradient norms and gradients are those of a GPT in
float64 that cuts its sequences where no further token is known.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from checkpoint.test_layouts import load_on_rank, save_on_rank
from correctness.agreement import check_guesses, errors, joined
from correctness.rank_runs import RankRun, assemble, check_copies, train_on_rank
from correctness.short_runs import EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA, Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_loss import loss_and_gradients
from reference.plain_training import Training

from megatron.layers.recompute import Recomputation
from megatron.run.precision import PrecisionSettings
from megatron.run.run_config import RunConfig

QUICK_ITERATIONS = 3
LLAMA = replace(
    EIGHT_LAYER_LLAMA, num_layers=4, z_loss_coeff=0.01, mtp_num_layers=1, embedding_multiplier=3.0
)
GPT = replace(
    EIGHT_LAYER_GPT,
    num_layers=4,
    position_embedding_type="alibi",
    label_smoothing=0.1,
    mtp_num_layers=2,
    mtp_loss_scaling_factor=0.3,
)
UNTIED = replace(GPT, tie_embeddings=False)
UNTIED_ONE = replace(UNTIED, mtp_num_layers=1)
TIED = replace(LLAMA, tie_embeddings=True)


def job_of(options: GPTOptions, samples: int, iterations: int = QUICK_ITERATIONS) -> Job:
    """Four microbatches, of which the loss of one does not count."""
    return Job(
        options,
        samples,
        microbatches=4,
        masked_out=(1,),
        iterations=iterations,
        warmup=1,
        sequence=12,
    )


ALL = Recomputation(group=1)
PARTS = Recomputation(frozenset({"core_attn", "layernorm", "mlp"}))

QUICK = [
    (Layout(1, "vocab-2", recomputation=ALL), UNTIED, 2),
    (Layout(2, "vocab-1", "zb-v", vocab_recompute=True), TIED, 1),
    (Layout(2, "interlaced", replicas=2, overlap=True, sharded=True, bucket_size=3000), GPT, 1),
    (Layout(1, "none", tensor=2, sequence=True, context=2), GPT, 2),
    (Layout(2, "vocab-2", slices=3), GPT, 2),
]

EARLIER = [
    (Layout(3, "vocab-2", stages="Ett|ttm|L"), UNTIED_ONE, 2),
    (Layout(2, "vocab-2", "zb-v", tensor=2, sequence=True, stages="Ett|t|tmm|L"), GPT, 1),
    (Layout(3, "none", stages="Ett|ttmm|L"), GPT, 2),
    (Layout(2, "vocab-1", "interleaved", stages="Ett|tt|m|L"), LLAMA, 1),
]
"""Further tokens on a stage before the last one, alone or behind layers."""

MORE_EARLIER = [
    (Layout(4, "vocab-2", stages="Ett|tt|mm|L"), GPT, 1),
    (Layout(4, "none", stages="Ett|tt|m|L"), TIED, 1),
    (Layout(4, "none", "zb-h1", stages="Ettt|t|m|L"), LLAMA, 1),
    (Layout(2, "none", "v-half", tensor=2, sequence=True, stages="Ett|t|tmm|L"), GPT, 1),
    (Layout(2, "none", "interleaved", stages="Ett|tt|mm|L"), UNTIED, 1),
    (Layout(2, "none", "interleaved", stages="Ett|tt|m|L"), TIED, 1),
    (Layout(2, "interlaced", "interleaved", tensor=2, stages="Ett|ttm||L"), LLAMA, 1),
    (Layout(4, "naive", stages="Ett|tt|m|L"), TIED, 1),
    (Layout(3, "vocab-1", slices=3, stages="Ett|ttmm|L"), GPT, 1),
    (Layout(2, "none", "interleaved", slices=3, context=2, stages="Ett|t|tmm|L"), UNTIED, 1),
    (
        Layout(2, "vocab-2", "zb-v", replicas=2, sharded=True, stages="Ett|tt|m|L"),
        TIED,
        1,
    ),
    (Layout(2, "none", "interleaved", replicas=2, sharded=True, stages="Et|tt|tm|L"), TIED, 1),
    (Layout(3, "vocab-2", recomputation=ALL, stages="Ett|ttmm|L"), GPT, 1),
    (Layout(3, "vocab-2", recomputation=ALL, recompute_ahead=1, stages="Ett|ttm|L"), TIED, 1),
    (Layout(2, "vocab-2", "interleaved", offloaded=1, stages="Ett|tt|mm|L"), GPT, 1),
    (Layout(2, "vocab-1", "interleaved", stages="Ettttm|||L"), TIED, 1),
]

MORE = [
    (Layout(2, "vocab-2", tensor=2, sequence=True), GPT, 1),
    (Layout(1, "none", context=3, exchange="p2p", sharded=True), TIED, 1),
]

COVER = [
    (Layout(2, "none", "zb-h1"), UNTIED, 1),
    (Layout(2, "none", tensor=2, recomputation=PARTS), GPT, 1),
    (Layout(4, "vocab-2"), LLAMA, 2),
    (Layout(1, "none"), GPT, 1),
    (Layout(1, "none", "zb-h1", tensor=2, sequence=True), LLAMA, 2),
    (Layout(2, "none"), GPT, 2),
    (Layout(2, "redis", "zb-v", replicas=2), TIED, 1),
    (Layout(2, "none", "v-half", tensor=2, sequence=True), UNTIED, 2),
    (Layout(4, "none", "interleaved"), UNTIED, 1),
    (Layout(2, "naive", "interleaved", tensor=2), LLAMA, 1),
    (Layout(2, "naive", "v-half", replicas=2), GPT, 2),
    (Layout(4, "naive"), TIED, 1),
    (Layout(1, "vocab-1", replicas=2, sharded=True), GPT, 2),
    (Layout(4, "vocab-1", "zb-v", recomputation=ALL), UNTIED, 1),
    (Layout(2, "vocab-1", tensor=2), TIED, 2),
    (Layout(2, "vocab-2", "zb-h1"), GPT, 2),
    (Layout(2, "vocab-2", "v-half", tensor=2, sequence=True, recomputation=PARTS), LLAMA, 1),
    (Layout(2, "vocab-2", "interleaved", replicas=2, overlap=True, bucket_size=3000), UNTIED, 1),
    (Layout(4, "interlaced", "v-half"), LLAMA, 2),
    (Layout(2, "interlaced", tensor=2, sequence=True), GPT, 1),
    (Layout(2, "vocab-2", "zb-v", context=2, exchange="p2p"), UNTIED, 1),
    (Layout(2, "vocab-1", context=2, exchange="a2a", recomputation=ALL), UNTIED, 2),
    (Layout(2, "none", "zb-v", slices=2, tensor=2, sequence=True), UNTIED, 2),
    (Layout(2, "vocab-1", "zb-h1", slices=3, context=2, recomputation=ALL), TIED, 1),
    (Layout(2, "interlaced", "interleaved", slices=4, replicas=2, sharded=True), LLAMA, 1),
]
"""Every treatment on 1 to 4 pipeline ranks, with t or d of 2, every kind of schedule and model."""


@dataclass(frozen=True)
class Expected:
    """What one process makes of a job.

    Attributes:
        start: the framework's initial weights.
        training: in plain PyTorch and float64 from there on.
    """

    start: Parameters
    training: Training


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> Callable[[Job], Expected]:
    done: dict[Job, Expected] = {}

    def of(job: Job) -> Expected:
        if job not in done:
            config = job.config(Layout(1, "none"))
            [own] = ranks.run(train_on_rank, 1, config=config, batches=job.batches()[:1])
            start = assemble([own.initial])
            training = job.reference({name: value.double() for name, value in start.items()})
            done[job] = Expected(start, training)
        return done[job]

    return of


def check(by_rank: list[RankRun], expected: Expected, job: Job) -> None:
    """Compare what the ranks of a run brought home with the reference."""
    wanted = expected.training
    start = assemble([own.initial for own in by_rank])
    assert start.keys() == expected.start.keys()
    assert all(torch.equal(start[name], value) for name, value in expected.start.items())
    check_copies(by_rank)
    for own in by_rank:
        assert own.losses == by_rank[0].losses
        assert own.depth_losses == by_rank[0].depth_losses
        assert own.left_in_store == 0
    first = by_rank[0]
    assert first.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert len(first.depth_losses) == len(wanted.depth_losses) == job.iterations
    for found, losses in zip(first.depth_losses, wanted.depth_losses, strict=True):
        assert found == pytest.approx(losses, rel=1e-5)
    assert first.gradient_norms == pytest.approx(wanted.gradient_norms, rel=1e-5)
    gradients = assemble([own.first_gradients for own in by_rank])
    assert gradients.keys() == wanted.first_gradients.keys()
    assert max(errors(gradients, wanted.first_gradients).values()) < 1e-5
    final = assemble([own.final for own in by_rank])
    [whole] = errors({"": joined(final)}, {"": joined(wanted.parameters)}).values()
    assert whole < 1e-5
    weights = {name: value.double() for name, value in final.items()}
    evaluated, _ = loss_and_gradients(weights, job.evaluated, job.options)
    assert first.evaluations == pytest.approx([evaluated], rel=1e-6)


def name_of(value: object) -> str:
    return str(value) if isinstance(value, Layout) else ""


@pytest.mark.parametrize(
    ("layout", "options", "samples", "iterations"),
    [
        *((*case, QUICK_ITERATIONS) for case in QUICK),
        *((*case, QUICK_ITERATIONS) for case in EARLIER),
        *(full(*case, QUICK_ITERATIONS) for case in [*MORE, *MORE_EARLIER]),
        *(pytest.param(*case, 10, marks=pytest.mark.full) for case in COVER),
    ],
    ids=name_of,
)
def test_a_layout_trains_the_plain_model(
    layout: Layout,
    options: GPTOptions,
    samples: int,
    iterations: int,
    ranks: RankPool,
    alone: Callable[[Job], Expected],
) -> None:
    job = job_of(options, samples, iterations)
    by_rank = ranks.run(
        train_on_rank,
        layout.world_size,
        config=job.config(layout),
        batches=job.batches(),
        evaluation_batches=job.batches(seed=1),
        evaluate_after=(iterations - 1,),
    )
    check(by_rank, alone(job), job)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, "vocab-2", "zb-h1"),
        Layout(3, "vocab-2", stages="Ett|ttm|L"),
        pytest.param(Layout(2, "none"), marks=pytest.mark.full),
        pytest.param(Layout(4, "none", stages="Ett|tt|m|L"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_steps_validated_later_change_no_bit(layout: Layout, ranks: RankPool) -> None:
    """With clipping at work, so that iterations are begun in vain."""
    job = replace(job_of(TIED, 1), dropout=0.1)

    def train(config: RunConfig) -> list[RankRun]:
        found: list[RankRun] = ranks.run(
            train_on_rank, layout.world_size, config=config, batches=job.batches()
        )
        return found

    check_guesses(train, job.config(layout))


@pytest.mark.parametrize("vocabulary", ["vocab-2", "none"])
def test_another_stage_of_further_tokens_changes_no_bit(vocabulary: str, ranks: RankPool) -> None:
    """The same operations in another place, in bf16 between layers whose stream is in fp32."""
    job = replace(job_of(UNTIED, 1, iterations=1), dropout=0.1)
    wide = PrecisionSettings(bf16=True, fp32_residual_connection=True)
    found = []
    for stages in ("Ett|t|t|mmL", "Ett|t|tmm|L", "Ett|tt|mm|L"):
        config = job.config(Layout(4, vocabulary, stages=stages), torch.bfloat16)
        config = replace(config, train=replace(config.train, precision=wide))
        by_rank = ranks.run(train_on_rank, 4, config=config, batches=job.batches())
        gradients = assemble([own.first_gradients for own in by_rank])
        found.append((by_rank[0].losses, by_rank[0].depth_losses, gradients))
    losses, depth_losses, gradients = found[0]
    assert all(any(gradient.ravel()) for gradient in gradients.values())
    for other in found[1:]:
        assert other[:2] == (losses, depth_losses)
        assert other[2].keys() == gradients.keys()
        assert all(torch.equal(gradient, gradients[name]) for name, gradient in other[2].items())


LAST_STAGE = Layout(2, "none", tensor=2, sequence=True)
EARLIER_STAGE = Layout(3, "vocab-2", stages="Ett|ttmm|L")
OWN_STAGE = Layout(4, "none", stages="Ett|tt|mm|L")


@pytest.mark.parametrize(
    ("saver", "loaders"),
    [
        (LAST_STAGE, (Layout(1, "none"), Layout(4, "vocab-2"), OWN_STAGE)),
        (OWN_STAGE, (EARLIER_STAGE, LAST_STAGE)),
        full(EARLIER_STAGE, (OWN_STAGE, LAST_STAGE)),
    ],
    ids=str,
)
def test_every_layout_loads_what_another_has_saved(
    saver: Layout, loaders: tuple[Layout, ...], ranks: RankPool, tmp_path: Path
) -> None:
    job = job_of(UNTIED, 1)
    saved = assemble(
        ranks.run(save_on_rank, saver.world_size, config=job.config(saver), root=tmp_path)
    )
    assert "exp_avg.mtp.layers.1.transformer_layer.mlp.linear_fc1.weight" in saved
    for loader in loaders:
        config = job.config(loader)
        config = replace(config, train=replace(config.train, seed=2))
        loaded = ranks.run(load_on_rank, loader.world_size, config=config, root=tmp_path)
        found = assemble([held for held, _, _ in loaded])
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], value) for name, value in saved.items())
