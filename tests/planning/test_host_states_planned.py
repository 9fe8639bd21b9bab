"""The plan of a run knows which states of the optimizer leave its GPUs, and their step's time."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.optimizer.host_link import BATCH, chosen_for_host, slot_elements
from megatron.optimizer.settings import HostStateSettings
from megatron.parallel.groups import single_rank
from megatron.parallel.settings import DeviceSettings, PipelineRankSettings, ReplicaSettings
from megatron.planning import must_fit
from megatron.planning.forecast_run import RunForecast, forecast_run
from megatron.planning.host_share import host_shares
from megatron.planning.host_step import HostStep
from megatron.planning.must_fit import check_host, check_memory
from megatron.planning.run_memory import held_by_ranks
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.schedules.settings import OffloadSettings
from megatron.simulator.costs.gpus import HOST_MEMORY, gpu
from megatron.simulator.costs.rank_memory import RankMemory
from megatron.training.setup import build_train_state

A100 = gpu("A100")
CPUS = DeviceSettings("cpu", "gloo")
CUDA = DeviceSettings("cuda", "nccl")
HALF = HostStateSettings(True, 0.5)


def config(
    states: HostStateSettings | None, dtype: torch.dtype = torch.bfloat16, **parallel: Any
) -> RunConfig:
    """A GPT with two ranks, whose parameters are some thousand."""
    job = Job(GPTOptions(num_layers=4, vocab_size=64), microbatches=4, iterations=1)
    made = job.config(Layout(2, "vocab-2"), dtype)
    return replace(
        made,
        parallel=replace(made.parallel, devices=CUDA, gpu=A100, **parallel),
        train=replace(made.train, host_states=states),
    )


def planned(states: HostStateSettings | None, **parallel: Any) -> RunForecast:
    own = config(states, **parallel)
    return forecast_run(own, make_run_plan(own), A100)


def test_chosen_parameters_leave_every_gpu_for_its_host() -> None:
    """Master and two moments in fp32 are 12 bytes; the check before a run counts alike.

    Two slots of the host have room for gradients in fp32, and for weights in bf16. PyTorch pins a
    power of two of bytes for each.
    """
    without, half = planned(None), planned(HALF)
    rows = zip(without.outcome.peak, half.outcome.peak, half.memories, strict=True)
    for before, after, memory in rows:
        sizes = chosen(memory)
        assert before - after == pytest.approx(12 * sum(sizes), abs=1)
        in_slot = sum(-(-size // 64) * 64 for size in sizes)
        slot = sum(1 << (size * in_slot - 1).bit_length() for size in (4, 2))
        assert memory.on_host == 12 * sum(sizes) + 2 * slot
    checked, _ = held_by_ranks(half.config, half.run_plan)
    assert checked == pytest.approx(half.outcome.peak)


def chosen(memory: RankMemory) -> list[int]:
    """Return the elements of the parameters that a rank chooses for half of its elements."""
    sizes = memory.count.parameters.sizes
    assert sum(size for _, size in sizes) == memory.count.parameters.all
    return [sizes[index][1] for index in chosen_for_host(sizes, 0.5)]


def test_the_step_has_its_copies_and_the_bytes_of_the_cpu() -> None:
    """A gradient takes 4 bytes out and a weight 2 back, at 1 GB/s here.

    PyTorch's step reads and writes gradient, master and both moments, and rounds to the weight.
    """
    without, half = (
        planned(own, offload=OffloadSettings(host_bandwidth=1.0)) for own in (None, HALF)
    )
    fullest = max(half.memories, key=lambda own: sum(chosen(own)))
    elements = sum(chosen(fullest))
    on_host = elements * ((4 + 2) / 1e9 + (8 * 4 + 4 + 2) / HOST_MEMORY)
    here = 1 - elements / fullest.count.parameters.all
    on_gpu = here * without.outcome.step + elements * 4 / (0.7 * A100.bandwidth)
    assert half.outcome.step == pytest.approx(on_host + on_gpu, rel=0.02)


def test_overlap_hides_all_but_the_longest_part() -> None:
    apart = HostStep(4.0, 6.0, 2.0, batches=3, overlaps=False)
    assert apart.seconds == 12.0
    assert replace(apart, overlaps=True).seconds == 6.0 + (4.0 + 2.0) / 3
    assert replace(apart, overlaps=True, batches=1).seconds == 12.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_host_holds_what_is_counted(dtype: torch.dtype) -> None:
    own = config(HALF, dtype)
    alone = replace(own.parallel, pipeline=PipelineRankSettings(), devices=CPUS, gpu=None)
    own = replace(own, parallel=alone)
    run_plan = make_run_plan(own)
    [memory] = held_by_ranks(own, run_plan)[1]
    state = build_train_state(own, single_rank(torch.device("cpu")), run_plan)
    link = state.host_link
    assert link is not None
    there = [
        tensor
        for part in state.updated
        if part.name in link.names
        for tensor in state.optimizer.tensors_of(part.name).values()
    ]
    slots = sum(slot.gradients.nbytes + slot.weights.nbytes for slot in link.slots)
    assert sum(tensor.nbytes for tensor in there) + slots == memory.on_host
    state.close()


def test_lanes_to_the_host_end_with_the_run() -> None:
    own = config(HostStateSettings(overlap_cpu_optimizer_d2h_h2d=True))
    alone = replace(own.parallel, pipeline=PipelineRankSettings(), devices=CPUS, gpu=None)
    own = replace(own, parallel=alone)
    state = build_train_state(own, single_rank(torch.device("cpu")))
    state.close()
    assert state.host_link is not None
    for lane in (state.host_link.out, state.host_link.back):
        with pytest.raises(RuntimeError):
            lane.submit(lambda: None)


def test_slots_have_room_for_the_largest_parameter() -> None:
    """Few parameters travel in one batch; many in batches of equal size, or of one parameter.

    Parts begin at multiples of 64 elements.
    """
    assert slot_elements([640, 384]) == 1024
    assert slot_elements([600, 400]) == 640 + 448
    assert slot_elements([640] * (BATCH // 64)) == BATCH
    assert slot_elements([640, 2 * BATCH, 4 * BATCH]) == 4 * BATCH


def test_every_replica_chooses_among_the_rows_of_its_shards() -> None:
    """Replicas together have every row once. The fuller device and the fuller host count."""
    replicas = ReplicaSettings(size=2, ddp_bucket_size=3000, shard_optimizer=True)
    forecast = planned(HALF, replicas=replicas)
    for memory, buckets in zip(forecast.memories, forecast.buckets, strict=True):
        rows = Counter[str]()
        for parts in buckets.parts:
            rows.update(dict(parts))
        sizes = [size for _, size in memory.count.parameters.sizes]
        assert sorted(rows.values()) == sorted(sizes)
    shares = host_shares(
        forecast.config,
        forecast.run_plan.plan,
        [own.count for own in forecast.memories],
        forecast.buckets,
    )
    for share, buckets in zip(shares, forecast.buckets, strict=True):
        on_host = [
            sum(parts[index][1] for index in chosen_for_host(parts, 0.5)) for parts in buckets.parts
        ]
        updated = [sum(size for _, size in parts) for parts in buckets.parts]
        assert share.most.elements == max(on_host)
        left = [1 - one / whole for one, whole in zip(on_host, updated, strict=True)]
        assert share.least.here == max(left)
    checked, _ = held_by_ranks(forecast.config, forecast.run_plan)
    assert checked == pytest.approx(forecast.outcome.peak)


def test_states_beyond_the_hosts_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = config(HALF)
    run_plan = make_run_plan(own)
    monkeypatch.setattr(must_fit, "machine_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"^--optimizer-cpu-offload: .*--optimizer-offload-fract"):
        check_host(own, run_plan, 0)
    on_cpus = replace(own, parallel=replace(own.parallel, devices=CPUS, gpu=None))
    held = held_by_ranks(own, run_plan)[1][0]
    monkeypatch.setattr(must_fit, "_memory", lambda _: held.static + 0.5 * held.on_host)
    with pytest.raises(ValueError, match="optimizer state of rank 0 take"):
        check_memory(on_cpus, run_plan, 0)
