"""The passes of a rank run on the meta device, for ranks that are asked about and not there."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.small_models import GPT, ROWS, give_main_grads
from torch import Tensor

from megatron.kernels.counted import counted_kernels
from megatron.layers.recompute import Recomputation
from megatron.layers.site import Site
from megatron.model.placement import place
from megatron.model.settings import ModelSettings
from megatron.model.stage import RankModel
from megatron.parallel import collectives
from megatron.parallel.context import ContextParallel
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.lanes import MetaLane, make_lane
from megatron.parallel.tensor import tensor_parallel
from megatron.runtime.batch import DeviceMicrobatch
from megatron.runtime.stage_passes import StagePasses
from megatron.runtime.store import ActivationStore
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import Pass

META = torch.device("meta")
BATCH = 2


@pytest.fixture(autouse=True)
def _nobody_to_talk_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let collectives move nothing: without values, a tensor's shape is all that there is."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr(collectives, "_gather_whole", nothing)
    monkeypatch.setattr(collectives, "_scatter_sums", nothing)
    for name in ("all_reduce", "broadcast", "reduce"):
        monkeypatch.setattr(dist, name, nothing)


class Rank:
    """One rank of p, whose messages to other ranks nobody sends.

    Args:
        config: the model.
        treatment: of the vocabulary; ``none`` for a whole model on one rank.
        place: pipeline rank and ranks.
        tensor_ranks: t.
        sequence_parallel: each of them has its own part of the sequence between layers.
        context_ranks: c.
        schedule: of the plan.
        options: of the model.
    """

    def __init__(
        self,
        config: ModelSettings,
        treatment: str,
        at: tuple[int, int],
        tensor_ranks: int = 1,
        *,
        sequence_parallel: bool = False,
        context_ranks: int = 1,
        schedule: str = "1f1b",
        **options: Any,
    ) -> None:
        rank, ranks = at
        plan = make_plan(schedule, treatment, ranks, 2 * ranks)
        predicts = config.further.mtp_num_layers > 0
        self.plan = replace(plan, ahead_stage=len(plan.stages) - 1 if predicts else None)
        stages, shards = self.plan.stages, ranks * tensor_ranks
        own = rank * tensor_ranks, shards
        placement = place(
            config,
            stages,
            rank,
            layers=[config.num_layers // len(stages)] * len(stages),
            padded_vocab_size=ROWS,
            vocabulary_shard=own if self.plan.treatment.is_sharded else None,
            tensor_shard=(0, tensor_ranks),
        )
        axis = ConnectedAxis("tensor", 0, tuple(range(tensor_ranks)))
        self.tensor = tensor_parallel(axis, META, sequence_parallel=sequence_parallel)
        context = ContextParallel(ConnectedAxis("context", 0, tuple(range(context_ranks))))
        dtype = torch.bfloat16
        site = Site(
            META,
            dtype,
            tensor=self.tensor,
            context=context,
            given_kernels=counted_kernels(dtype),
            **options,
        )
        self.model = RankModel(config, placement, site)
        give_main_grads(self.model)
        self.store = ActivationStore()
        self.passes = StagePasses(self.model, self.plan, rank, self.store, seed=1)
        self.tokens = config.seq_length // context_ranks
        batch = [self._microbatch() for _ in range(self.plan.microbatches)]
        self.passes.begin(batch, 0, training=True, predicts_ahead=True)

    def _microbatch(self) -> DeviceMicrobatch:
        count = BATCH * self.tokens
        ids_n = torch.empty(count, dtype=torch.int64, device=META)
        return DeviceMicrobatch(
            ids_n, ids_n, torch.empty(count, device=META), BATCH, valid_tokens=count
        )

    def run(self, *kinds: str) -> None:
        """Run passes of microbatch 0."""
        for kind in kinds:
            self.passes.table[kind](Pass(kind, 0))  # type: ignore[index,arg-type]  # of a test

    def activation(self) -> Tensor:
        """Return an activation between two stages."""
        tokens = self.tokens // self.tensor.sequence_parts
        hidden = self.model.config.hidden_size
        return torch.empty(BATCH, tokens, hidden, dtype=torch.bfloat16, device=META)

    def merge(self) -> None:
        """Do the work of C1 between its collectives."""
        state = self.store.get("state", 0)
        shards = self.plan.ranks * self.tensor.size
        statistics_p4n = torch.empty(shards, *state.statistics_4n.shape, device=META)
        merged, _ = self.passes.merge(0, state, statistics_p4n)
        self.store.put("merged", 0, merged)


SHARING = [(1, False), (2, False), (2, True)]


@pytest.mark.parametrize(("tensor_ranks", "sequence_parallel"), SHARING)
@pytest.mark.parametrize("treatment", ["vocab-1", "vocab-2"])
def test_the_last_stage_with_its_shard(
    treatment: str, tensor_ranks: int, sequence_parallel: bool
) -> None:
    rank = Rank(GPT, treatment, (1, 2), tensor_ranks, sequence_parallel=sequence_parallel)
    rank.store.put("input", 0, rank.activation(), 1)
    rank.run("F", "S")
    rank.merge()
    rank.run("T")
    rank.store.put("output_gradient", 0, rank.activation(), 1)
    rank.run("B")
    assert rank.store.take("input_gradient", 0, 1).shape == rank.activation().shape
    if treatment == "vocab-1":
        partial_nh = rank.store.take("partial_gradient", 0)
        assert partial_nh.shape == (BATCH * GPT.seq_length, GPT.hidden_size)
    assert not len(rank.store)


@pytest.mark.parametrize(("tensor_ranks", "sequence_parallel"), SHARING)
def test_the_first_stage_with_its_shard(tensor_ranks: int, sequence_parallel: bool) -> None:
    rank = Rank(GPT, "vocab-2", (0, 2), tensor_ranks, sequence_parallel=sequence_parallel)
    rank.run("IF")
    shape = BATCH * GPT.seq_length, GPT.hidden_size
    assert rank.store.take("partial_embedding", 0).shape == shape
    rank.store.put("input", 0, rank.activation())
    rank.run("F")
    assert rank.store.take("output", 0).shape == rank.activation().shape
    rank.store.put("output_gradient", 0, rank.activation())
    rank.run("B", "IB")
    assert not len(rank.store)


@pytest.mark.parametrize(("tensor_ranks", "sequence_parallel"), SHARING)
@pytest.mark.parametrize("depths", [0, 1])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_whole_model(
    schedule: str, depths: int, tensor_ranks: int, sequence_parallel: bool
) -> None:
    config = GPT.replaced(mtp_num_layers=depths)
    rank = Rank(
        config,
        "none",
        (0, 1),
        tensor_ranks,
        sequence_parallel=sequence_parallel,
        schedule=schedule,
        recomputation=Recomputation(group=1),
    )
    assert rank.plan.split_backward == (schedule == "zb-h1")
    rank.run("F", "B", *("W" if rank.plan.split_backward else ""))
    assert not len(rank.store)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_ranks_share_sequences(dropout: float) -> None:
    config = GPT.replaced(
        position_embedding_type="none", attention_dropout=dropout, hidden_dropout=dropout
    )
    rank = Rank(config, "none", (0, 1), context_ranks=2)
    rank.run("F", "B")
    assert not len(rank.store)


def test_a_lane_without_values_works_at_once() -> None:
    lane = make_lane(META, 2, "tensor")
    assert isinstance(lane, MetaLane)
    assert lane.submit(torch.is_grad_enabled).wait() is False
    lane.close()
