"""Tensor and sequence parallelism beside all other axes train what one process trains."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from correctness.agreement import check, check_guesses, trained
from correctness.model_kinds import LIKE
from correctness.rank_runs import RankRun, check_agreement, train_on_rank
from correctness.short_runs import EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA, Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from reference.plain_training import Training

from megatron.layers.recompute import NO_RECOMPUTATION, Recomputation
from megatron.parallel import collectives
from megatron.run.run_config import RunConfig
from megatron.runtime import replication
from megatron.runtime.batch import DeviceMicrobatch

GPT = replace(EIGHT_LAYER_GPT, num_layers=4, label_smoothing=0.1)
ITERATIONS = 4
UNTIED = replace(GPT, tie_embeddings=False)
LLAMA = replace(EIGHT_LAYER_LLAMA, num_layers=4, z_loss_coeff=0.01)


def job_of(options: GPTOptions, samples: int = 1, iterations: int = ITERATIONS) -> Job:
    """Eight microbatches, of which every second replica has none that counts."""
    return Job(
        options,
        samples,
        microbatches=8,
        masked_out=(1, 3, 5, 7),
        iterations=iterations,
        warmup=2,
        sequence=12,
    )


QUICK = [
    (Layout(1, "none", tensor=2, replicas=2, sequence=True, sharded=True, overlap=True), LLAMA, 1),
]

MORE = [
    (Layout(2, "vocab-2", tensor=2), GPT, 1),
    (Layout(2, "naive", tensor=2, sequence=True), UNTIED, 2),
    (Layout(1, "none", tensor=2, sequence=True), GPT, 2),
    (Layout(2, "vocab-1", "interleaved", tensor=2, sequence=True), LLAMA, 2),
    (Layout(2, "none", "zb-v", tensor=2, sequence=True), GPT, 1),
    (Layout(1, "vocab-2", tensor=4, sequence=True), GPT, 1),
    (Layout(1, "none", tensor=2), GPT, 1),
    (Layout(1, "vocab-2", tensor=2, sequence=True), LLAMA, 2),
    (Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True), GPT, 2),
    (Layout(2, "interlaced", tensor=2), LLAMA, 2),
    (Layout(2, "none", tensor=2, sequence=True), GPT, 2),
    (Layout(2, "redis", tensor=2), UNTIED, 1),
    (Layout(1, "none", tensor=4), GPT, 1),
]

COVER = """
2 2 1 s  none       zb-h1    untied llama full
1 2 2 z  vocab-2    v-half   tied   gpt   none
4 1 1 -  interlaced 1f1b     tied   llama selective
4 1 2 sz vocab-1    1f1b     untied gpt   full
1 4 2 z  interlaced zb-h1    untied llama selective
2 4 1 -  vocab-1    zb-h1    tied   gpt   none
2 4 1 s  vocab-2    v-half   untied gpt   selective
2 1 2 sz none       1f1b     tied   gpt   none
1 4 2 -  none       v-half   tied   llama full
4 2 1 s  interlaced v-half   untied llama none
1 1 1 -  vocab-2    1f1b     untied llama full
1 2 2 -  vocab-1    1f1b     untied gpt   selective
2 4 1 -  interlaced 1f1b     untied gpt   full
4 2 1 -  vocab-2    zb-h1    tied   gpt   none
4 1 1 s  none       1f1b     tied   gpt   selective
1 2 1 -  vocab-1    v-half   tied   gpt   full
2 2 2 sz vocab-2    zb-v     untied llama none
"""
"""Ranks t p d, s for sequence parallelism and z for the sharded optimizer, treatment, schedule,
whether embeddings are tied, the model, and what is recomputed."""

RECOMPUTED = {
    "none": NO_RECOMPUTATION,
    "selective": Recomputation(frozenset({"core_attn"})),
    "full": Recomputation(group=1),
}


def covering() -> Iterator[tuple[Layout, GPTOptions, int]]:
    """The rows of ``COVER``; every second has microbatches of two samples."""
    for number, line in enumerate(COVER.strip().splitlines()):
        t, p, d, options, vocabulary, schedule, tied, model, recomputed = line.split()
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
        )
        deep = EIGHT_LAYER_LLAMA if model == "llama" else EIGHT_LAYER_GPT
        yield layout, replace(deep, tie_embeddings=tied == "tied"), 1 + number % 2


def name_of(value: object) -> str:
    return str(value) if isinstance(value, Layout) else ""


@pytest.mark.parametrize(
    ("layout", "options", "samples", "pool"),
    [
        *((*case, "ranks") for case in QUICK),
        *(pytest.param(*case, "ranks", marks=pytest.mark.full) for case in MORE),
        *(pytest.param(*case, "eight_ranks", marks=pytest.mark.full) for case in covering()),
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
    job = job_of(options, samples)
    expected = alone(job)
    check(trained(request.getfixturevalue(pool), job, layout), expected)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(name, marks=[] if name == "gemma 2" else pytest.mark.full) for name in LIKE],
)
def test_kinds_of_layers_are_shared(
    kind: str, ranks: RankPool, alone: Callable[[Job], Training]
) -> None:
    layout = Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True)
    job = job_of(GPTOptions(num_layers=4, vocab_size=37, **LIKE[kind]), iterations=2)
    by_rank = ranks.run(
        train_on_rank, layout.world_size, config=job.config(layout), batches=job.batches()
    )
    check_agreement(by_rank)
    check(by_rank, alone(job))


@pytest.mark.parametrize(
    "layout",
    [
        full(Layout(2, "none", tensor=2, sequence=True)),
        full(Layout(2, "vocab-2", "zb-v", tensor=2)),
    ],
    ids=name_of,
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=str
)
def test_steps_validated_later_change_no_bit(
    layout: Layout, dtype: torch.dtype, ranks: RankPool
) -> None:
    """With clipping at work, so that some guesses are wrong, on all ranks alike."""
    job = job_of(GPT)

    def train(config: RunConfig) -> list[RankRun]:
        found: list[RankRun] = ranks.run(
            train_on_rank, layout.world_size, config=config, batches=job.batches()
        )
        return found

    check_guesses(train, job.config(layout, dtype))


FAULTS = [
    "parts are not added up",
    full("targets in the order of samples"),
    full("rows are not added up"),
]


def with_fault(rank: int, world_size: int, *, fault: str, **arguments: Any) -> RankRun:
    """Train with something broken on purpose."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "parts are not added up":
            patch.setattr(replication, "summands", lambda owned, model, plan: ())
        elif fault == "targets in the order of samples":
            patch.setattr(DeviceMicrobatch, "part_by_part", lambda self, parts: self)
        elif fault == "rows are not added up":
            patch.setattr(collectives, "reduce_scatter", lambda tensor, axis, sizes=None: None)
        return train_on_rank(rank, world_size, **arguments)


@pytest.mark.parametrize("p", [1, full(2)])
@pytest.mark.parametrize("fault", FAULTS)
def test_injected_faults_are_found(
    fault: str, p: int, ranks: RankPool, alone: Callable[[Job], Training]
) -> None:
    layout = Layout(p, "vocab-2", tensor=2, sequence=True)
    job = job_of(GPT, 2)
    expected = alone(job)
    by_rank = ranks.run(
        with_fault, 2 * p, config=job.config(layout), batches=job.batches(), fault=fault
    )
    with pytest.raises(AssertionError):
        check(by_rank, expected)
