"""The plan's bytes for exponentials are those of the rooms that the output layer takes."""

import weakref
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planning.count.counting import MODEL, counted, plan_of, run_of
from torch import Tensor, nn

from megatron.kernels.cpu.kernels import CpuKernels
from megatron.kernels.softmax import LossOptions
from megatron.layers.main_grad import give_main_grad
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.layers.vocabulary.rooms import FreeRooms, RoomSizes
from megatron.layers.vocabulary.settings import ShardSettings
from megatron.layers.vocabulary.shard import VocabularyShard
from megatron.planning.count.run import count_ranks
from megatron.planning.run_memory import run_memory
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import PassKind
from megatron.simulator.costs.rank_memory import _most_rooms, peaks

ROWS, WIDTH = 12, 4
UNIQUE = MODEL.replaced(vocab_size=1280)
"""A model of which no other test has a count: counts are cached."""


class WatchedKernels(CpuKernels):
    """Knows the bytes of all rooms that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}

    def kept_room(self, x_nh: Tensor, rows: int) -> Sequence[Tensor]:
        """See ``Kernels``."""
        room = super().kept_room(x_nh, rows)
        for tile in room:
            storage = tile.untyped_storage()
            self.alive[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, storage._cdata)
        return room


def output_layer(kernels: CpuKernels) -> OutputLayer:
    weight = nn.Parameter(torch.ones(ROWS, WIDTH, dtype=torch.float64))
    give_main_grad(weight, torch.zeros_like(weight))
    shard = VocabularyShard.of(ROWS, ROWS, 0, 1)
    return OutputLayer(shard, weight, LossOptions(ROWS), kernels)


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=20))
def test_bytes_are_those_of_a_layer_that_runs(row: list[tuple[int, bool]]) -> None:
    """A row of S and T: each S has its number of tokens, and perhaps the oldest T comes after."""
    kernels, rooms = WatchedKernels(), RoomSizes()
    layer = output_layer(kernels)
    waiting = []
    for tokens, ends in row:
        weight_n = torch.ones(tokens, dtype=torch.float64)
        x_nh = torch.ones(tokens, WIDTH, dtype=torch.float64)
        state = layer.s(x_nh, torch.zeros(tokens, dtype=torch.int64), form_gradient=True)
        waiting.append((state, weight_n))
        del state
        rooms.take(ROWS * tokens * 8)
        assert rooms.bytes == sum(kernels.alive.values())
        if ends:
            state, weight_n = waiting.pop(0)
            merged, _ = layer.merge(state.statistics_4n.unsqueeze(0), state, weight_n)
            layer.t(state, merged, weight_n)
            rooms.give(ROWS * len(weight_n) * 8)
            del state
            assert rooms.bytes == sum(kernels.alive.values())


def test_a_plan_asks_the_object_that_gives_the_layer_its_rooms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the object keeps no room for another microbatch, each microbatch adds its bytes."""
    microbatches, run = 8, run_of(MODEL, "vocab-2", 2)
    counts = count_ranks(run, plan_of(run), [4, 4])
    plan = make_plan("1f1b", "vocab-2", 2, microbatches)
    memories, program = run_memory(run, plan, counts), lower(plan)
    shared = peaks(program, memories)
    monkeypatch.setattr(FreeRooms, "take", lambda rooms, fits, make: make())
    alone = peaks(program, memories)
    for rank, row in enumerate(plan.rows):
        between = max(accumulate((item.kind == "S") - (item.kind == "T") for item in row))
        assert 0 < between < microbatches
        more = (microbatches - between) * counts[rank].rooms
        assert alone[rank] - shared[rank] == more > 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("treatment", "schedule", "takes", "gives"),
    [
        ("none", "1f1b", "F", "B"),
        ("none", "zb-h1", "F", "W"),
        ("vocab-1", "1f1b", "S", "T"),
        ("vocab-2", "zb-h1", "S", "T"),
        ("naive", "1f1b", "S", "T"),
        ("interlaced", "1f1b", "S", "T"),
    ],
)
def test_a_count_lists_the_rooms_that_passes_take_and_give(
    treatment: str, schedule: str, takes: PassKind, gives: PassKind, recompute: bool
) -> None:
    """Logits in bf16, of a shard with the rank's share of the rows."""
    run = run_of(MODEL, treatment, 2, sizes={"vocabulary": ShardSettings(recompute)})
    sharded = treatment != "none"
    rows = MODEL.vocab_size // (1 + sharded)
    for rank, count in enumerate(counted(run, [4, 4], schedule)):
        room = () if recompute or (rank == 0 and not sharded) else (2 * rows * MODEL.seq_length,)
        taken = {kind: own.taken for (kind, _), own in count.passes.items() if own.taken}
        given = {kind: own.given for (kind, _), own in count.passes.items() if own.given}
        assert (taken, given) == (({takes: room}, {gives: room}) if room else ({}, {}))


def test_a_plan_has_the_rooms_of_a_layer_that_takes_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that keeps no logits, but shares the memory of a tile among its passes."""
    scratch, run = (
        OutputLayer._scratch,
        run_of(UNIQUE, "vocab-2", 2, sizes={"vocabulary": ShardSettings(True)}),
    )

    def shared(layer: OutputLayer, x_nh: Tensor) -> Sequence[Tensor]:
        room = layer._rooms.take(lambda own: True, lambda: scratch(layer, x_nh))
        layer._rooms.give(room)
        return room

    monkeypatch.setattr(OutputLayer, "_scratch", shared)
    plan = make_plan("1f1b", "vocab-2", 2, 8)
    counts = count_ranks(run, plan_of(run), [4, 4])
    tile = -(-UNIQUE.vocab_size // 2 // 4)  # a quarter of the shard's rows
    for count, memory in zip(counts, run_memory(run, plan, counts), strict=True):
        assert count.passes["S", 0].taken == count.passes["T", 0].given
        assert _most_rooms(plan, memory, 0) == 2 * tile * UNIQUE.seq_length
