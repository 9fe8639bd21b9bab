"""Activations that wait on the host change no bit, under every kind of schedule and treatment."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from correctness.rank_runs import (
    CPU,
    ListLoader,
    Pieces,
    connected,
    factor,
    gradient_pieces,
)
from correctness.short_runs import EIGHT_LAYER_LLAMA, Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.layers.recompute import PARTS, Recomputation
from megatron.layers.slices import SeenKeys
from megatron.parallel.groups import Groups, single_rank
from megatron.planning.count.launches import tensors_of
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime import offload
from megatron.runtime.batch import DeviceMicrobatch, to_device
from megatron.schedules.lower import Start
from megatron.training.own_tokens import kept_tokens
from megatron.training.setup import TrainState, build_train_state

WHOLE, SOME = Recomputation(group=1), Recomputation(parts=frozenset(PARTS))
GPT = GPTOptions(num_layers=8, vocab_size=37)
MIXTURE = GPTOptions(
    num_layers=8,
    vocab_size=37,
    swiglu=True,
    add_bias_linear=False,
    num_experts=4,
    moe_ffn_hidden_size=16,
    moe_aux_loss_coeff=0.01,
)
FURTHER = replace(EIGHT_LAYER_LLAMA, mtp_num_layers=1)
SLICED = replace(EIGHT_LAYER_LLAMA, window_size=5, window_pattern=(1, 0), qk_layernorm=True)

CASES = [
    (Layout(2, "vocab-2", "interleaved"), GPT, 1),
    (Layout(2, "none", "zb-v", recomputation=WHOLE, recompute_ahead=1), EIGHT_LAYER_LLAMA, 2),
    full(Layout(2, "vocab-1", "gpipe", recomputation=SOME), GPT, 1),
    full(Layout(2, "interlaced", "interleaved", recomputation=WHOLE), EIGHT_LAYER_LLAMA, 2),
    full(Layout(2, "naive", "1f1b-v"), MIXTURE, 2),
    full(Layout(2, "vocab-2", "zb-v"), FURTHER, 2),
    full(Layout(2, "vocab-2", "gpipe", tensor=2, sequence=True), EIGHT_LAYER_LLAMA, 1),
    full(Layout(2, "vocab-1", "interleaved", context=2), EIGHT_LAYER_LLAMA, 2),
    full(Layout(2, "redis", "interleaved", replicas=2, sharded=True, overlap=True), GPT, 1),
    full(Layout(4, "vocab-2", "v-half"), GPT, 1),
    (Layout(2, "vocab-2", "zb-v", slices=4, recomputation=SOME), SLICED, 2),
    full(Layout(2, "none", slices=2, recomputation=WHOLE, recompute_ahead=1), SLICED, 1),
    full(Layout(2, "vocab-1", "interleaved", slices=3, tensor=2, sequence=True), SLICED, 2),
    full(Layout(2, "naive", "gpipe", slices=3, replicas=2, sharded=True), GPT, 1),
]
"""Layout, model, and chunks of a rank on the host."""


def _name(value: object) -> str | None:
    return None if isinstance(value, GPTOptions) else str(value)


def states(config: RunConfig, groups: Groups, chunks: int) -> list[TrainState]:
    """The same run without and with activations on the host."""
    plain = make_run_plan(config)
    moving = replace(plain, plan=replace(plain.plan, offloaded=chunks))
    return [build_train_state(config, groups, own) for own in (plain, moving)]


def trained(state: TrainState, config: RunConfig, job: Job) -> tuple[float, Pieces]:
    """The rank's part of the loss and the gradients of two iterations together."""
    groups, depths = state.groups, config.model.further.mtp_num_layers
    kept = kept_tokens(config, groups.context.rank)
    own = ListLoader(job.batches(), groups.replica, kept, depths).next_batch()
    batch = to_device(own, CPU, torch.promote_types(config.train.dtype, torch.float32))
    total = 0.0
    for iteration in range(2):
        loss = state.pipeline.train(batch, iteration)
        assert loss is not None
        total += float(loss.sum())
    found = gradient_pieces(state, batch)
    assert not len(state.pipeline.store)
    state.pipeline.close()
    return total * factor(batch), found


def moved(state: TrainState) -> int:
    row = state.pipeline.train_program.rows[state.groups.pipeline.rank]
    return sum(isinstance(step, Start) and step.comm.kind == "O" for step in row)


def both(
    rank: int, world_size: int, *, config: RunConfig, job: Job, chunks: int
) -> tuple[int, list[tuple[float, Pieces]]]:
    plain, moving = states(config, connected(config), chunks)
    count = moved(moving)
    return count, [trained(own, config, job) for own in (plain, moving)]


def assert_equal(one: tuple[float, Pieces], other: tuple[float, Pieces]) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, (_, parts) in one[1].items():
        for (box, values), (its_box, its_values) in zip(parts, other[1][name][1], strict=True):
            assert box == its_box
            assert torch.equal(values, its_values), name


@pytest.mark.parametrize(("layout", "options", "chunks"), CASES, ids=_name)
@pytest.mark.parametrize("dtype", [torch.float32, full(torch.bfloat16)], ids=str)
def test_bits_are_those_without(
    layout: Layout, options: GPTOptions, chunks: int, dtype: torch.dtype, ranks: RankPool
) -> None:
    job = Job(options, microbatches=4 * layout.replicas, iterations=1, sequence=12, dropout=0.1)
    if layout.context > 1 or options.mtp_num_layers:
        job = replace(job, dropout=0.0)
    config = job.config(layout, dtype)
    found = ranks.run(both, layout.world_size, config=config, job=job, chunks=chunks)
    for count, (plain, moving) in found:
        assert count >= 4
        assert_equal(plain, moving)


ONE = Layout(1, "none", "gpipe")
JOB = Job(replace(GPT, max_position_embeddings=32), microbatches=8, iterations=1, sequence=32)


def on_one_rank(config: RunConfig | None = None) -> list[TrainState]:
    return states(config or JOB.config(ONE), single_rank(CPU), 1)


class Watched(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, and that are still there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        self.held = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tensors_of((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known and key not in given:  # else a view, perhaps of the host's
                self._known[key] = weakref.ref(storage, self._freed(key, size))
                self.held += size
                self.peak = max(self.peak, self.held)
        return result

    def _freed(self, key: int, size: int) -> Callable[[object], None]:
        def free(_: object) -> None:
            del self._known[key]
            self.held -= size

        return free


def test_the_device_holds_less() -> None:
    """Of eight microbatches in flight three or four are on the device.

    The buffers of the host, which on CPUs are memory like any other, are made before.
    """
    peaks = []
    for state in on_one_rank():
        batch = to_device(JOB.batches()[0], CPU, torch.float32)
        state.pipeline.train(batch, 0)
        gc.collect()
        with Watched() as watched:
            state.pipeline.train(batch, 1)
        peaks.append(watched.peak)
        buffers = state.pipeline._host_buffers.bytes
        state.pipeline.close()
    assert peaks[1] < 0.75 * peaks[0]
    assert peaks[0] - peaks[1] > 0.25 * buffers


def test_an_abandoned_iteration_leaves_the_next_one_right() -> None:
    """Buffers of the host that were in use are used again."""
    plain, moving = on_one_rank()
    batch = to_device(JOB.batches()[0], CPU, torch.float32)
    assert moving.pipeline.train(batch, 0, gate=lambda: False) is None
    assert_equal(trained(plain, JOB.config(ONE), JOB), trained(moving, JOB.config(ONE), JOB))
    buffers = moving.pipeline._host_buffers
    assert sum(own.numel() for free in buffers._free.values() for own in free) == buffers.bytes


def test_keys_that_later_slices_read_stay_on_the_device() -> None:
    """The store holds their buffers anyway: a second copy of them would only take memory."""
    config = JOB.config(replace(ONE, slices=4))
    [moving] = on_one_rank(config)[1:]
    batch = to_device(JOB.batches()[0], CPU, torch.float32)
    assert keys_moved(moving, batch) == 0
    with patch.object(SeenKeys, "buffers", lambda self: ()):
        assert keys_moved(moving, batch) > 0
    moving.pipeline.close()


def keys_moved(state: TrainState, batch: list[DeviceMicrobatch]) -> int:
    """How often a buffer of keys and values is copied to the host in an iteration."""
    extend, out = SeenKeys.extend, offload.HostCopies._out
    buffers, copied = list[torch.Tensor](), list[bool]()  # a kept buffer's address stays its own

    def extending(self: SeenKeys, *arguments: Any) -> torch.Tensor:
        buffers.append(extend(self, *arguments))
        return buffers[-1]

    def copying(self: Any, moved: Any) -> Any:
        known = offload.storages_of(buffers)
        copied.extend(kept.elements.untyped_storage()._cdata in known for kept in moved.kept)
        return out(self, moved)

    with (
        patch.object(SeenKeys, "extend", extending),
        patch.object(offload.HostCopies, "_out", copying),
    ):
        state.pipeline.train(batch, 0)
    assert copied
    assert buffers
    return sum(copied)


@pytest.mark.parametrize("slices", [1, 4])
def test_the_warm_up_gets_all_buffers_of_the_host(slices: int) -> None:
    """They suffice for the iterations that follow, which have the same bits as without."""
    plain, moving = on_one_rank(JOB.config(replace(ONE, slices=slices)))
    batch = to_device(JOB.batches()[0], CPU, torch.float32)
    for state in (plain, moving):
        state.pipeline.warm_up(batch[0])
        state.zero_gradients()
    buffers = moving.pipeline._host_buffers
    before = buffers.bytes
    assert before == sum(own.numel() for free in buffers._free.values() for own in free) > 0
    assert_equal(trained(plain, JOB.config(ONE), JOB), trained(moving, JOB.config(ONE), JOB))
    assert buffers.bytes == before


def loaded_too_late() -> AbstractContextManager[Any]:
    """Let L be waited for, but hand nothing over."""
    finish = offload.HostCopies.finish

    def skip(self: Any, comm: Any, pending: Any) -> None:
        if comm.kind == "O":
            finish(self, comm, pending)

    return patch.object(offload.HostCopies, "finish", skip)


def freed_before_the_copy() -> AbstractContextManager[Any]:
    """Let the tensors go, and be overwritten, when O begins."""
    out = offload.HostCopies._out

    def spoil(self: Any, moved: Any) -> Any:
        work = out(self, moved)
        for kept in moved.kept:
            kept.elements.zero_()
        return work

    return patch.object(offload.HostCopies, "_out", spoil)


def test_a_tensor_that_is_read_on_the_host_is_found() -> None:
    moving = on_one_rank()[1]
    batch = to_device(JOB.batches()[0], CPU, torch.float32)
    with loaded_too_late(), pytest.raises(AssertionError, match="read while they are on the host"):
        moving.pipeline.train(batch, 0)
    moving.pipeline.close()


def given_back_before_it_is_read() -> AbstractContextManager[Any]:
    """Let a buffer of the host be used again when its O begins, not when its L does."""
    out = offload.HostCopies._out

    def hurry(self: Any, moved: Any) -> Any:
        work = out(self, moved)
        self._buffers.give(moved.buffer)
        return work

    return patch.object(offload.HostCopies, "_out", hurry)


@pytest.mark.parametrize("fault", [freed_before_the_copy, given_back_before_it_is_read])
def test_memory_that_is_used_again_too_early_is_found(
    fault: Callable[[], AbstractContextManager[Any]],
) -> None:
    plain, moving = on_one_rank()
    one = trained(plain, JOB.config(ONE), JOB)
    with fault():
        other = trained(moving, JOB.config(ONE), JOB)
    with pytest.raises(AssertionError):
        assert_equal(one, other)
