"""A warm-up uses everything and leaves no trace: training goes on to the same bits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from correctness.rank_runs import connected
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.data.microbatch import Microbatch
from megatron.data.settings import DocumentSettings
from megatron.layers.forward_pass import ForwardPass
from megatron.optimizer.lr_schedule import Rates
from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis
from megatron.run.run_config import RunConfig
from megatron.runtime.batch import to_device
from megatron.schedules.check import check
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import plan_of_one
from megatron.training.post_validated_step import make_train_step
from megatron.training.setup import build_train_state
from megatron.training.step import Iteration
from megatron.training.warm_up import warm_up

JOB = Job(GPTOptions(num_layers=4), microbatches=4, iterations=2, dropout=0.1)
CPU = torch.device("cpu")


class Trained(NamedTuple):
    losses: list[float | None]
    parameters: list[torch.Tensor]
    moved: int


def train_on_rank(
    rank: int, world_size: int, *, config: RunConfig, batches: list[list[Microbatch]], warm: bool
) -> Trained:
    state = build_train_state(config, connected(config))
    before = [own.parameter.detach().clone() for own in state.parameters]
    if warm:
        warm_up(config, state)
        for own, old in zip(state.parameters, before, strict=True):
            assert torch.equal(own.parameter, old)
        for bucket in state.buckets:
            assert not bucket.gradients.any()
    step = make_train_step(config.optimizer, state)
    losses = []
    for number, whole in enumerate(batches):
        share = whole[state.groups.data.rank :: state.groups.data.size]
        batch = to_device(share, CPU, replicas=state.groups.data.size)
        finished = step.train(Iteration(number, batch, lambda _: Rates(1e-3, 1e-3, 0.01), 0), None)
        losses.append(None if finished is None else finished.loss)
    last = step.settle()
    losses.append(None if last is None else last.loss)
    state.pipeline.close()
    moved = sum(
        not torch.equal(own.parameter, old)
        for own, old in zip(state.parameters, before, strict=True)
    )
    return Trained(losses, [own.parameter.detach().clone() for own in state.parameters], moved)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, "vocab-2", "zb-v"),
        Layout(2, "none", "zb-h1", replicas=2, overlap=True, sharded=True, bucket_size=3000),
        Layout(1, "none", "gpipe", slices=2, offloaded=1),
        full(Layout(2, "vocab-1", tensor=2, sequence=True)),
    ],
    ids=str,
)
def test_training_goes_on_to_the_same_bits(layout: Layout, ranks: RankPool) -> None:
    config, batches = JOB.config(layout, torch.float32), JOB.batches()
    cold, warm = (
        ranks.run(train_on_rank, layout.world_size, config=config, batches=batches, warm=warm)
        for warm in (False, True)
    )
    for one, other in zip(cold, warm, strict=True):
        assert one.losses == other.losses
        assert any(loss is not None for loss in one.losses)
        assert one.moved == other.moved > 0
        for a, b in zip(one.parameters, other.parameters, strict=True):
            assert torch.equal(a, b)


def gathered_on_rank(rank: int, world_size: int, *, config: RunConfig) -> tuple[int, int]:
    state = build_train_state(config, connected(config))
    gathered = []
    with pytest.MonkeyPatch.context() as patch:
        gather = collectives.gather_parts

        def counting(values: torch.Tensor, axis: ConnectedAxis, sizes: Sequence[int]) -> None:
            gathered.append(0)
            gather(values, axis, sizes)

        patch.setattr(collectives, "gather_parts", counting)
        warm_up(config, state)
    state.pipeline.close()
    return len(gathered), len(state.buckets)


def test_the_weights_of_every_bucket_are_gathered(ranks: RankPool) -> None:
    layout = Layout(1, "none", replicas=2, overlap=True, sharded=True, bucket_size=3000)
    config = JOB.config(layout, torch.float32)
    for gathered, buckets in ranks.run(gathered_on_rank, 2, config=config):
        assert gathered == buckets > 1


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("anew", [False, True])
def test_attention_is_told_of_documents_as_in_the_run(
    apart: bool, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = JOB.config(Layout(1, "none"), torch.float32)
    data = replace(config.data, resets=DocumentSettings(apart, anew))
    state = build_train_state(replace(config, data=data), connected(config))
    model, seen = state.pipeline.model, []
    forward = model.forward

    def spy(chunk: int, x_bsh: torch.Tensor, forward_pass: ForwardPass) -> torch.Tensor:
        seen.append((forward_pass.documents, forward_pass.positions_bs))
        return forward(chunk, x_bsh, forward_pass)

    monkeypatch.setattr(model, "forward", spy)
    warm_up(replace(config, data=data), state)
    shape = (config.train.micro_batch_size, config.model.seq_length)
    for documents, positions_bs in seen:
        first_bs = None if documents is None else documents.first_bs
        assert (None if first_bs is None else first_bs.shape) == (shape if apart else None)
        assert (None if positions_bs is None else positions_bs.shape) == (shape if anew else None)
    assert seen
    state.pipeline.close()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v", "gpipe"])
@pytest.mark.parametrize("vocabulary", ["none", "vocab-2", "interlaced"])
def test_the_plan_of_one_microbatch_can_be_run(schedule: str, vocabulary: str) -> None:
    whole = make_plan(schedule, vocabulary, 4, 8)
    one = plan_of_one(whole)
    check(one)
    assert one.microbatches == 1
    assert one.stages == whole.stages
