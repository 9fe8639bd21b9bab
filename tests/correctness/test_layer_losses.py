"""A loss that layers leave themselves joins the gradient and the log in every layout.

A toy part in the MLP's place mixes some matrices by a softmax and leaves a loss of its shares. The
reference writes the part out once more; microbatches add up by their tokens that count. It is plain
PyTorch in float64.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import pytest
import torch
from correctness.agreement import check_guesses, errors
from correctness.rank_runs import (
    CPU,
    Batches,
    RankRun,
    assemble,
    check_agreement,
    check_copies,
    connected,
    train_on_rank,
)
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from model.mixture import Mixture
from reference import plain_experts, plain_gpt, plain_loss
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_training import Training
from torch import Tensor

from megatron.layers.recompute import Recomputation
from megatron.layers.site import Site
from megatron.model import parts
from megatron.run.run_config import RunConfig
from megatron.runtime.batch import to_device
from megatron.training.setup import build_train_state

COEFFICIENT = 0.7
JOB = Job(
    GPTOptions(num_layers=4, vocab_size=37, tie_embeddings=False),
    micro_batch_size=2,
    microbatches=4,
    masked_out=(1,),
    iterations=3,
    warmup=1,
    sequence=12,
)
WHOLE, PARTS = Recomputation(group=1), Recomputation(frozenset({"core_attn", "layernorm"}))
CASES = [
    Layout(1, "none"),
    Layout(2, "none"),
    Layout(2, "vocab-2", "zb-h1"),
    full(Layout(2, "vocab-1", "zb-v")),
    Layout(2, "vocab-2", "interleaved", recomputation=WHOLE),
    full(Layout(2, "none", "zb-h1", recomputation=PARTS)),
    full(Layout(2, "vocab-2", "zb-h1", recomputation=WHOLE, recompute_ahead=1)),
    Layout(1, "vocab-2", "zb-h1", tensor=2),
    Layout(1, "none", tensor=2, sequence=True, recomputation=WHOLE),
    full(Layout(2, "interlaced", tensor=2, sequence=True)),
    Layout(1, "none", context=2),
    full(Layout(2, "vocab-2", replicas=2, sharded=True, overlap=True)),
]


def mixtures(coefficient: float) -> AbstractContextManager[object]:
    """While patched, layers have the toy part in the place of an MLP."""

    def toy(hidden_size: int, width: int, site: Site, **_: object) -> Mixture:
        return Mixture(hidden_size, site, coefficient=coefficient)

    return patch.object(parts, "MLP", toy)


def train_mixtures(
    rank: int,
    world_size: int,
    *,
    config: RunConfig,
    batches: Batches,
    evaluation_batches: Batches = (),
    coefficient: float = COEFFICIENT,
) -> RankRun:
    with mixtures(coefficient):
        return train_on_rank(
            rank,
            world_size,
            config=config,
            batches=batches,
            evaluation_batches=evaluation_batches,
            evaluate_after=(len(batches) - 1,) if evaluation_batches else (),
        )


@contextmanager
def written_out(coefficient: float) -> Iterator[None]:
    """While entered, the plain GPT has the part, and its tokens the loss that the part leaves."""

    def mixture(parameters: Parameters, name: str, x_bsh: Tensor, options: GPTOptions) -> Tensor:
        scores_bse = x_bsh @ parameters[f"{name}.router.weight"].T
        shares_bse = scores_bse.exp() / scores_bse.exp().sum(-1, keepdim=True)
        loss = plain_experts.Left("mixture_loss", (shares_bse**2).sum(-1).mean(), coefficient)
        plain_experts.left.append(loss)
        matrices = parameters[f"{name}.weight"].unbind()
        made_bseo = torch.stack([x_bsh @ matrix.T for matrix in matrices], dim=-2)
        return (shares_bse[..., None] * made_bseo).sum(-2)

    with patch.object(plain_gpt, "_mlp", mixture):
        yield


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> tuple[Parameters, Training]:
    """The initial weights, and what one process makes of the job."""
    config = JOB.config(Layout(1, "none"))
    [own] = ranks.run(train_mixtures, 1, config=config, batches=JOB.batches()[:1])
    start = assemble([own.initial])
    with written_out(COEFFICIENT):
        return start, JOB.reference({name: value.double() for name, value in start.items()})


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_a_layout_trains_the_plain_model(
    layout: Layout, ranks: RankPool, alone: tuple[Parameters, Training]
) -> None:
    start, expected = alone
    runs = ranks.run(
        train_mixtures,
        layout.world_size,
        config=JOB.config(layout),
        batches=JOB.batches(),
        evaluation_batches=JOB.batches(seed=1),
    )
    check_agreement(runs)
    check_copies(runs)
    initial = assemble([own.initial for own in runs])
    assert all(torch.equal(initial[name], value) for name, value in start.items())
    assert runs[0].losses == pytest.approx(expected.losses, rel=1e-5)
    of_layers = [own["mixture_loss"] for own in runs[0].layer_losses]
    assert of_layers == pytest.approx(
        [own["mixture_loss"] for own in expected.layer_losses], rel=1e-5
    )
    assert runs[0].gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-5)
    gradients = assemble([own.first_gradients for own in runs])
    assert gradients.keys() == expected.first_gradients.keys()
    assert max(errors(gradients, expected.first_gradients).values()) < 1e-5
    weights = {name: value.double() for name, value in assemble([r.final for r in runs]).items()}
    with written_out(0.0):
        evaluated, _ = plain_loss.loss_and_gradients(weights, JOB.evaluated, JOB.options)
    assert runs[0].evaluations == pytest.approx([evaluated], rel=1e-6), "without it"


def test_the_loss_of_layers_counts(ranks: RankPool, alone: tuple[Parameters, Training]) -> None:
    """Else the comparison above would show nothing."""
    _, expected = alone
    config = JOB.config(Layout(2, "vocab-2", "zb-h1"))
    without: RankRun = ranks.run(
        train_mixtures, 2, config=config, batches=JOB.batches(), coefficient=0.0
    )[0]
    assert without.losses[0] == pytest.approx(expected.losses[0], rel=1e-5), "printed apart"
    assert without.layer_losses[0] == {}
    assert without.gradient_norms != pytest.approx(expected.gradient_norms, rel=1e-3)


def first_not_finite(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches
) -> tuple[int, int, str] | None:
    """Where infinity appears first, if the layers' losses are infinite."""
    with mixtures(float("inf")):
        state = build_train_state(config, connected(config))
        found = state.pipeline.first_not_finite(to_device(batches[0], CPU))
        state.pipeline.close()
    return found


def test_a_loss_that_is_not_finite_is_found(ranks: RankPool) -> None:
    config = JOB.config(Layout(2, "vocab-2", "zb-h1"))
    found = ranks.run(first_not_finite, 2, config=config, batches=JOB.batches())
    assert found == [(0, 0, "a loss of a layer of stage 0")] * 2


@pytest.mark.parametrize(
    "layout", [Layout(2, "vocab-2", "zb-h1"), full(Layout(2, "none"))], ids=str
)
def test_steps_validated_later_change_no_bit(layout: Layout, ranks: RankPool) -> None:
    """With clipping at work, so that iterations are begun in vain."""

    def train(config: RunConfig) -> list[RankRun]:
        found: list[RankRun] = ranks.run(
            train_mixtures, layout.world_size, config=config, batches=JOB.batches()
        )
        return found

    check_guesses(train, JOB.config(layout))
