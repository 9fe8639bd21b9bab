"""Multi-latent attention trains the same model in every layout.

The reference computes one head after the other in float64, and turns complex numbers
(``plain_latent``).
"""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from correctness.agreement import errors
from correctness.model_kinds import LIKE
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
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_training import Training
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.layers import latent_attention
from megatron.layers.latent_attention import LatentAttention
from megatron.layers.recompute import Recomputation
from megatron.layers.rope import RotaryEmbedding
from megatron.layers.site import Site
from megatron.model.build_layer import build_layer
from megatron.model.settings import ModelSettings
from megatron.parallel.tensor import TensorParallel
from megatron.run.run_config import RunConfig

LITE = GPTOptions(num_layers=4, vocab_size=37, **LIKE["deepseek v2 lite"])
V3 = GPTOptions(num_layers=4, vocab_size=37, **LIKE["deepseek v3"])
WINDOWS = replace(
    GPTOptions(num_layers=4, vocab_size=37, **LIKE["latents without norms"]),
    add_bias_linear=True,
    tie_embeddings=True,
)
MODELS = {"lite": LITE, "v3": V3, "without norms": WINDOWS}

UP = Recomputation(frozenset({"mla_up_proj"}))
BOTH = Recomputation(frozenset({"mla_up_proj", "core_attn", "layernorm"}))
CORE = Recomputation(frozenset({"core_attn"}))
WHOLE = Recomputation(group=1)
CASES = [
    ("lite", Layout(1, "none", recomputation=UP)),
    ("v3", Layout(2, "vocab-2", "zb-h1", recomputation=UP)),
    ("lite", Layout(1, "none", tensor=2)),
    ("v3", Layout(1, "vocab-1", tensor=2, sequence=True, recomputation=UP)),
    ("lite", Layout(1, "none", tensor=2, sequence=True, context=2, recomputation=BOTH)),
    ("without norms", Layout(2, "vocab-1", "zb-v", replicas=2, sharded=True, overlap=True)),
    full("v3", Layout(2, "vocab-2", "v-half", recomputation=WHOLE)),
    full("v3", Layout(4, "vocab-1", "zb-h2", recomputation=WHOLE, recompute_ahead=1)),
    full("lite", Layout(2, "naive", "interleaved", context=2, recomputation=CORE)),
    full("without norms", Layout(2, "interlaced", tensor=4, recomputation=BOTH)),
    full("v3", Layout(2, "vocab-2", "zb-v", tensor=2, sequence=True, replicas=2, sharded=True)),
    full("lite", Layout(2, "none", tensor=2, sequence=True, context=2, recomputation=UP)),
]


def job(name: str) -> Job:
    return Job(MODELS[name], micro_batch_size=2, microbatches=4, iterations=3, sequence=12)


@pytest.fixture(scope="module")
def known() -> dict[str, tuple[Parameters, Training]]:
    """Of every model the initial weights, and what the reference makes of them."""
    return {}


def expected(
    ranks: RankPool, known: dict[str, tuple[Parameters, Training]], name: str
) -> tuple[Parameters, Training]:
    if name not in known:
        config = job(name).config(Layout(1, "none"))
        [own] = ranks.run(train_on_rank, 1, config=config, batches=job(name).batches()[:1])
        start = assemble([own.initial])
        wide = {key: value.double() for key, value in start.items()}
        known[name] = start, job(name).reference(wide)
    return known[name]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_a_layout_trains_the_plain_attention(
    name: str,
    layout: Layout,
    request: pytest.FixtureRequest,
    ranks: RankPool,
    known: dict[str, tuple[Parameters, Training]],
) -> None:
    start, wanted = expected(ranks, known, name)
    if layout.world_size > 4:
        ranks = request.getfixturevalue("eight_ranks")
    runs: list[RankRun] = ranks.run(
        train_on_rank,
        layout.world_size,
        config=job(name).config(layout),
        batches=job(name).batches(),
    )
    check_agreement(runs)
    check_copies(runs)
    initial = assemble([own.initial for own in runs])
    assert initial.keys() == start.keys()
    assert all(initial[key].equal(value) for key, value in start.items())
    assert runs[0].losses == pytest.approx(wanted.losses, rel=1e-5)
    assert runs[0].gradient_norms == pytest.approx(wanted.gradient_norms, rel=1e-5)
    gradients = assemble([own.first_gradients for own in runs])
    assert gradients.keys() == wanted.first_gradients.keys()
    assert max(errors(gradients, wanted.first_gradients).values()) < 1e-5
    final = {key: value.double() for key, value in assemble([r.final for r in runs]).items()}
    assert max(errors(final, wanted.parameters).values()) < 1e-4


class NotSummed(torch.autograd.Function):
    """The backward forgets the heads of other ranks."""

    @staticmethod
    def forward(ctx: Any, x_buh: Tensor, tensor: TensorParallel) -> Tensor:
        ctx.tensor = tensor
        return tensor.gather(x_buh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.tensor.own_tokens(grads[0]), None


def halves(rope: RotaryEmbedding, x_bsad: Tensor) -> Tensor:
    """Channel i turns with channel r / 2 + i."""
    return rope._kernels.rotate(
        x_bsad,
        rope._cos_s1r[: x_bsad.shape[1]],
        rope._sin_s1r[: x_bsad.shape[1]],
        interleaved=False,
    )


FAULTS: dict[str, tuple[Layout, object, str, object]] = {
    "shared keys": (
        Layout(1, "none", tensor=2, sequence=True),
        latent_attention,
        "gathered",
        NotSummed.apply,
    ),
    "halves": (Layout(1, "none"), RotaryEmbedding, "__call__", halves),
    "scale": (Layout(1, "none"), ModelSettings, "score_scale", None),
}


def train_with_fault(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches, fault: str
) -> RankRun:
    _, owner, name, wrong = FAULTS[fault]
    with patch.object(owner, name, wrong):
        return train_on_rank(rank, world_size, config=config, batches=batches)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(
    fault: str, ranks: RankPool, known: dict[str, tuple[Parameters, Training]]
) -> None:
    """Else the comparison above would show nothing."""
    _, wanted = expected(ranks, known, "lite")
    layout = FAULTS[fault][0]
    config, batches = job("lite").config(layout), job("lite").batches()[:1]
    runs = ranks.run(
        train_with_fault, layout.world_size, config=config, batches=batches, fault=fault
    )
    gradients = assemble([own.first_gradients for own in runs])
    assert max(errors(gradients, wanted.first_gradients).values()) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_recomputation_changes_no_bit(name: str) -> None:
    config = job(name).config(Layout(1, "none")).model
    found = []
    for parts in (Recomputation(), UP, CORE, BOTH):
        layer = build_layer(
            config, 0, Site(torch.device("cpu"), torch.float32, recomputation=parts)
        )
        torch.manual_seed(1)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        x = torch.randn(2, 12, config.hidden_size, requires_grad=True)
        y = layer(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("parts", [Recomputation(), UP], ids=str)
def test_heads_that_are_made_again_are_not_kept(parts: Recomputation) -> None:
    """They are made once more for the backward, in which attention alone reads them."""
    config = job("v3").config(Layout(1, "none")).model
    site = Site(torch.device("cpu"), torch.float32, recomputation=parts)
    attention = build_layer(config, 0, site).self_attention
    assert isinstance(attention, LatentAttention)
    made: list[StorageWeakRef] = []
    make = attention.heads

    def watched(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        heads = make(*arguments)
        made.extend(StorageWeakRef(one.untyped_storage()) for one in heads)
        return heads

    with patch.object(attention, "heads", watched):
        y = attention(torch.randn(2, 12, config.hidden_size, requires_grad=True))
        assert [one.expired() for one in made] == [parts == UP] * 3
        y.sum().backward()
    assert len(made) == (6 if parts == UP else 3)
    assert all(one.expired() for one in made)
