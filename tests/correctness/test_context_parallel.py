"""Ranks that share every sequence, beside all other axes, train what one process trains."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from correctness.agreement import check, trained
from correctness.rank_runs import RankRun, train_on_rank
from correctness.short_runs import EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA, Job, Layout
from correctness.test_tensor_parallel import RECOMPUTED, job_of, name_of
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from reference.plain_training import Training

from megatron.data.microbatch import Microbatch
from megatron.layers import gathered_attention
from megatron.parallel.context import ContextExchange, ContextParallel
from megatron.runtime.batch import token_counts

ITERATIONS = 4
SEQUENCE = 16
GPT = replace(EIGHT_LAYER_GPT, num_layers=4, max_position_embeddings=SEQUENCE)
LLAMA = replace(EIGHT_LAYER_LLAMA, num_layers=4, num_query_groups=2, qk_layernorm=True)
WINDOWS = replace(
    LLAMA,
    position_embedding_type="alibi",
    window_size=5,
    window_pattern=(1, 0),
    attn_logit_softcapping=2.0,
    softmax_type="learnable",
)
SINKS = replace(LLAMA, softmax_type="learnable")

QUICK = [
    (Layout(2, "vocab-2", context=2, sharded=True, overlap=True), WINDOWS, 1),
    (Layout(2, "vocab-1", "zb-h1", context=2, exchange="a2a"), WINDOWS, 1),
    (
        Layout(2, "none", "zb-v", context=2, exchange="p2p", recomputation=RECOMPUTED["selective"]),
        WINDOWS,
        1,
    ),
]
MORE = [
    (Layout(1, "none", context=4), LLAMA, 1),
    (Layout(1, "none", context=4, exchange="p2p"), SINKS, 1),
    (Layout(1, "none", context=4, exchange="p2p"), WINDOWS, 2),
    (Layout(1, "none", context=4, exchange="a2a+p2p", neighbours=2), WINDOWS, 1),
    (Layout(1, "none", tensor=2, sequence=True, context=2, exchange="p2p"), WINDOWS, 1),
    (Layout(1, "none", context=4, exchange="a2a"), GPT, 1),
    (Layout(1, "vocab-2", tensor=2, sequence=True, context=2), LLAMA, 2),
]

COVER = """
1 1 2 2 -  none       1f1b        gpt   none               all_gather
2 1 2 1 s  none       1f1b        llama selective          p2p
1 2 2 1 -  vocab-1    zb-h1       gpt   none               a2a
1 2 2 2 z  vocab-2    v-half      llama none               a2a
2 2 2 1 s  vocab-2    zb-h1       llama full               p2p
2 2 2 1 -  interlaced 1f1b        gpt   none               a2a
1 2 2 2 z  interlaced interleaved llama selective          all_gather
2 1 2 2 sz none       zb-h1       gpt   none               p2p
1 2 4 1 z  vocab-2    interleaved gpt   selective          a2a
2 1 4 1 s  vocab-1    1f1b        llama none               p2p
1 1 4 2 z  none       1f1b        gpt   full               p2p
2 2 2 1 sz vocab-1    v-half      gpt   full               all_gather
1 2 2 1 -  none       v-half      llama none               p2p
2 2 2 1 s  none       interleaved gpt   none               a2a
1 2 2 2 r  vocab-2    1f1b        llama full               all_gather
"""
"""Ranks t p c d; s for sequence parallelism, z for the sharded optimizer, r for recomputation ahead
of the backward; treatment, schedule, the model, what is recomputed, and how attention sees
all tokens."""


def job(options: GPTOptions, samples: int, iterations: int) -> Job:
    """Eight microbatches, of which every second has none that counts."""
    return replace(job_of(options, samples, iterations), sequence=SEQUENCE)


def covering() -> Iterator[tuple[Layout, GPTOptions, int]]:
    """The rows of ``COVER``; every second has microbatches of two samples."""
    for number, line in enumerate(COVER.strip().splitlines()):
        t, p, c, d, options, vocabulary, schedule, model, recomputed, exchange = line.split()
        layout = Layout(
            int(p),
            vocabulary,
            schedule,
            replicas=int(d),
            sharded="z" in options,
            overlap="z" in options,
            tensor=int(t),
            sequence="s" in options,
            bucket_size=3000,
            recomputation=RECOMPUTED[recomputed],
            recompute_ahead=1 if "r" in options else None,
            context=int(c),
            exchange=cast(ContextExchange, exchange),
        )
        yield layout, LLAMA if model == "llama" else GPT, 1 + number % 2


@pytest.mark.parametrize(
    ("layout", "options", "samples", "pool"),
    [
        *((*case, "ranks") for case in QUICK),
        *(full(*case, "ranks") for case in MORE),
        *(full(*case, "eight_ranks") for case in covering()),
    ],
    ids=name_of,
)
def test_layouts_train_what_one_process_trains(
    layout: Layout,
    options: GPTOptions,
    samples: int,
    pool: str,
    request: pytest.FixtureRequest,
    alone: Callable[[Job], Training],
) -> None:
    own = job(options, samples, ITERATIONS)
    expected = alone(own)
    check(trained(request.getfixturevalue(pool), own, layout), expected)


@pytest.mark.parametrize("microbatches", [3, full(8)])
def test_evaluations_and_hidden_dropout_are_those_of_one_rank(
    microbatches: int, ranks: RankPool
) -> None:
    """Attention drops by the place of a rank, so here it drops nothing."""
    own = replace(job(GPT, 1, 2), microbatches=microbatches, dropout=0.3)
    losses = []
    for layout in (Layout(1, "none"), Layout(1, "none", tensor=2, sequence=True, context=2)):
        config = own.config(layout)
        by_rank: list[RankRun] = ranks.run(
            train_on_rank,
            layout.world_size,
            config=replace(config, model=config.model.replaced(attention_dropout=0.0)),
            batches=own.batches(),
            evaluation_batches=own.batches(seed=1),
            evaluate_after=(1,),
        )
        losses.append((*by_rank[0].losses, *by_rank[0].evaluations))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


FAULTS = [
    "gradients of keys and values stay apart",
    full("positions from 0 on"),
    full("chunks in the order of the ranks"),
    full("tokens counted on one rank"),
]


def with_fault(rank: int, world_size: int, *, fault: str, **arguments: Any) -> RankRun:
    """Train with something broken on purpose."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "gradients of keys and values stay apart":
            patch.setattr(ContextParallel, "reduce", lambda self, all_: _own(self, all_))
        elif fault == "positions from 0 on":
            part = Microbatch.part
            patch.setattr(
                Microbatch,
                "part",
                lambda self, *what: replace(part(self, *what), positions=None),
            )
        elif fault == "chunks in the order of the ranks":
            patch.setattr(
                gathered_attention, "chunks_of", lambda rank, size: (2 * rank, 2 * rank + 1)
            )
        elif fault == "tokens counted on one rank":
            patch.setattr(
                "megatron.training.step.token_counts",
                lambda batch: token_counts(batch) if rank == 0 else (0.0, 0.0),
            )
        return train_on_rank(rank, world_size, **arguments)


def _own(context: ContextParallel, all_2bsgd: torch.Tensor) -> torch.Tensor:
    return torch.stack([context.own_tokens(one) for one in all_2bsgd])


@pytest.mark.parametrize("fault", FAULTS)
def test_injected_faults_are_found(
    fault: str, ranks: RankPool, alone: Callable[[Job], Training]
) -> None:
    layout, own = Layout(1, "none", context=2), job(GPT, 2, ITERATIONS)
    expected = alone(own)
    by_rank = ranks.run(
        with_fault, 2, config=own.config(layout), batches=own.batches(), fault=fault
    )
    with pytest.raises(AssertionError):
        check(by_rank, expected)
