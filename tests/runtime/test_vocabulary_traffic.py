"""Every collective of the vocabulary moves as many bytes as the two levels promise, and no more.

a is one activation of a microbatch, [n, h]. C0 and CIB broadcast a/t in every column, then gather
over the rows. CIF and the input gradient are reduced and scattered over the rows, then a/t in every
column. Without sequence parallelism the stage that receives a sum gathers it once more. Statistics
are gathered in the rows, then in the columns.

With D further tokens the output layer has 1 + D times as many rows. CIF and CIB move in addition
to a, for the stage that predicts these tokens, the tokens of each of its ranks and D - 1 more. The
messages behind this stage have 1 + D times the rows too.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from correctness.rank_runs import CPU, connected
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.parallel import collectives, p2p
from megatron.parallel.groups import Groups
from megatron.parallel.tensor import SplitTokens
from megatron.run.run_config import RunConfig
from megatron.runtime.batch import to_device
from megatron.training.setup import build_train_state

M = 3
JOB = Job(GPTOptions(num_layers=4, vocab_size=37), 2, microbatches=M, sequence=12)
N, H, WIDTH = 24, JOB.options.hidden_size, 4
A, STATISTICS = N * H * WIDTH, 4 * N * WIDTH
"""Bytes of an activation in fp32, and of a shard's statistics."""

Traffic = Counter[tuple[str, str]]
"""Bytes handed to a collective, by its name and the axis."""


@contextmanager
def counted(groups: Groups) -> Iterator[Traffic]:
    """Count the bytes that this rank hands to others between stages and for the vocabulary."""
    found: Traffic = Counter()
    axes = {
        id(groups.row): "row",
        id(groups.column): "column",
        id(groups.transfers): "transfers",
    }

    def count(patch: pytest.MonkeyPatch, module: Any, name: str, place: int) -> None:
        real = getattr(module, name)

        def wrapped(*arguments: Any) -> Any:
            axis = arguments[place]
            if id(axis) in axes and axis.size > 1:
                found[name, axes[id(axis)]] += arguments[0].nbytes
            return real(*arguments)

        patch.setattr(module, name, wrapped)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("broadcast", "reduce", "all_reduce"):
            count(patch, collectives, name, 2)
        for name in ("all_gather", "reduce_scatter", "gather_parts"):
            count(patch, collectives, name, 1)
        count_sends(patch, found, axes)
        real = SplitTokens.gather_parts

        def gather_parts(self: SplitTokens, x_buh: torch.Tensor) -> torch.Tensor:
            found["gather_parts", "tensor"] += self.size * x_buh.nbytes
            return real(self, x_buh)

        patch.setattr(SplitTokens, "gather_parts", gather_parts)
        yield found


def count_sends(patch: pytest.MonkeyPatch, found: Traffic, axes: dict[int, str]) -> None:
    """Count transfers between stages; collectives on CPUs are made of others."""
    real = p2p.send

    def send(tensor: torch.Tensor, destination: int, axis: Any, tag: int = 0) -> p2p.Transfer:
        if axes.get(id(axis)) == "transfers":
            found["send", "XG"[tag]] += tensor.nbytes
        return real(tensor, destination, axis, tag)

    patch.setattr(p2p, "send", send)


def job_of(depths: int) -> Job:
    options = replace(JOB.options, position_embedding_type="rope", mtp_num_layers=depths)
    return replace(JOB, options=options)


def traffic_on_rank(rank: int, world_size: int, *, config: RunConfig) -> Traffic:
    state = build_train_state(config, connected(config))
    [batch] = JOB.batches()[:1]
    with counted(state.groups) as found:
        state.pipeline.train(to_device(batch, CPU), 0)
    state.pipeline.close()
    return found


def expected(layout: Layout, pipeline_rank: int, depths: int, further: int) -> Traffic:
    """What a rank hands over in a microbatch, by the formulae above.

    ``further`` is the rank that predicts further tokens.
    """
    t, p, sharded = layout.tensor, layout.ranks, layout.vocabulary != "none"
    first, last, predicts = pipeline_rank == 0, pipeline_rank == p - 1, pipeline_rank == further
    parts = t if layout.sequence else 1
    output, statistics = (1 + depths) * A, (1 + depths) * STATISTICS
    ahead = A + (depths - 1) * parts * A // JOB.sequence if depths else 0
    found: Traffic = Counter()
    found["send", "X"] += 0 if last else (output if pipeline_rank >= further else A) // parts
    found["send", "G"] += 0 if first else (output if pipeline_rank > further else A) // parts
    if layout.sequence:  # where the vocabulary layers begin, their ranks gather what they made
        found["gather_parts", "tensor"] += A * first + output * last + ahead * predicts
    if not sharded:
        return found
    for at_root, size in ((last, output), (first, A), (predicts, ahead)):  # C0, CIB
        found["broadcast", "column"] += size // t if p > 1 else 0
        found["gather_parts", "row"] += 0 if at_root or t == 1 else size
    for at_root, size in ((first, A), (predicts, ahead), (last, output)):  # CIF, input's gradient
        found["reduce_scatter", "row"] += size if t > 1 else 0
        found["reduce", "column"] += size // t if p > 1 else 0
        found["gather_parts", "row"] += size if at_root and t > 1 and not layout.sequence else 0
    name = "all_reduce" if layout.vocabulary == "naive" else "all_gather"
    found[name, "row"] += statistics if t > 1 else 0
    found[name, "column"] += statistics if p > 1 else 0
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("layout", "depths"),
    [
        full(Layout(2, "vocab-2", tensor=2), 0),
        (Layout(2, "vocab-2", tensor=2, sequence=True), 0),
        full(Layout(2, "vocab-1", tensor=2), 0),
        (Layout(2, "vocab-1", tensor=2, sequence=True), 0),
        (Layout(2, "naive", tensor=2, sequence=True), 0),
        full(Layout(2, "none", tensor=2), 0),
        (Layout(2, "none", tensor=2, sequence=True), 0),
        full(Layout(1, "vocab-2", tensor=4), 0),
        (Layout(1, "vocab-2", tensor=4, sequence=True), 0),
        full(Layout(4, "vocab-2"), 0),
        (Layout(4, "vocab-2"), 1),
        (Layout(2, "vocab-2", tensor=2, sequence=True), 3),
        full(Layout(2, "naive", tensor=2), 2),
        (Layout(2, "none", tensor=2, sequence=True), 2),
        (Layout(3, "vocab-2", stages="Et*3|tmm|L"), 2),
        (Layout(4, "none", stages="Et*3|t|m|L"), 1),
        full(Layout(2, "vocab-1", tensor=2, sequence=True, stages="Et*4mm|L"), 2),
        (Layout(2, "vocab-2", tensor=2, stages="Et*4mm|L"), 2),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_formulae(layout: Layout, depths: int, ranks: RankPool) -> None:
    config = (job_of(depths) if depths else JOB).config(layout)
    named = config.parallel.layers.further_stage
    further = layout.ranks - 1 if named is None else named
    by_rank = ranks.run(traffic_on_rank, layout.world_size, config=config)
    for rank, found in enumerate(by_rank):
        pipeline_rank = config.parallel.grid.coordinates(rank).pipeline
        wanted = {
            key: M * count
            for key, count in expected(layout, pipeline_rank, depths, further).items()
            if count
        }
        assert {key: count for key, count in found.items() if count} == wanted
