"""The plan of a run knows which states of the optimizer leave its GPUs, and their step's time."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.config.replicas import ReplicaConfig
from megatron.config.run_config import RunConfig
from megatron.optimizer.config import HostStates
from megatron.optimizer.host_link import BATCH, HostLink, slot_elements
from megatron.parallel.groups import single_rank
from megatron.simulator.costs.count import Parameters
from megatron.simulator.costs.gpus import HOST_MEMORY, gpu
from megatron.training.planning import must_fit
from megatron.training.planning.forecast_run import RunForecast, forecast_run
from megatron.training.planning.host_step import HostStep
from megatron.training.planning.must_fit import check_host, check_memory
from megatron.training.planning.run_memory import held_by_ranks, largest_part
from megatron.training.planning.run_plan import make_run_plan
from megatron.training.setup import build_train_state

A100 = gpu("A100")
HALF = HostStates(0.5)


def config(states: HostStates | None, **parallel: Any) -> RunConfig:
    """A GPT in bf16 with two ranks, whose parameters are some thousand."""
    job = Job(GPTOptions(num_layers=4, vocab_size=64), microbatches=4, iterations=1)
    made = job.config(Layout(2, "vocab-2"), torch.bfloat16)
    return replace(
        made,
        parallel=replace(made.parallel, device="cuda", gpu=A100, **parallel),
        train=replace(made.train, host_states=states),
    )


def planned(states: HostStates | None, **parallel: Any) -> RunForecast:
    own = config(states, **parallel)
    return forecast_run(own, make_run_plan(own), A100)


def test_the_share_leaves_every_gpu_for_its_host() -> None:
    """Master and two moments in fp32 are 12 bytes; the check before a run counts alike.

    Two slots of the host have room for gradients in fp32, and for weights in bf16. PyTorch pins a
    power of two of bytes for each.
    """
    without, half = planned(None), planned(HALF)
    rows = zip(without.outcome.peak, half.outcome.peak, half.memories, strict=True)
    for before, after, memory in rows:
        elements = memory.count.parameters.all // 2
        assert before - after == pytest.approx(12 * elements, abs=12)
        slot = sum(1 << (size * elements - 1).bit_length() for size in (4, 2))
        assert memory.on_host == pytest.approx(12 * elements + 2 * slot, abs=24)
    checked, _ = held_by_ranks(half.config, half.run_plan)
    assert checked == pytest.approx(half.outcome.peak)


def test_the_step_has_its_copies_and_the_bytes_of_the_cpu() -> None:
    """A gradient takes 4 bytes out and a weight 2 back, at 1 GB/s here.

    PyTorch's step reads and writes gradient, master and both moments, and rounds to the weight.
    """
    without, half = (planned(own, host_bandwidth=1e9) for own in (None, HALF))
    elements = 0.5 * max(memory.count.parameters.all for memory in half.memories)
    on_host = elements * ((4 + 2) / 1e9 + (8 * 4 + 4 + 2) / HOST_MEMORY)
    on_gpu = 0.5 * without.outcome.step + 0.5 * elements * 2 * 4 / (0.7 * A100.bandwidth)
    assert half.outcome.step == pytest.approx(on_host + on_gpu, rel=0.02)


def test_overlap_hides_all_but_the_longest_part() -> None:
    apart = HostStep(4.0, 6.0, 2.0, batches=3, overlaps=False)
    assert apart.seconds == 12.0
    assert replace(apart, overlaps=True).seconds == 6.0 + (4.0 + 2.0) / 3
    assert replace(apart, overlaps=True, batches=1).seconds == 12.0


def test_the_host_holds_what_is_counted() -> None:
    """But for one parameter, as whole parameters are chosen, and rooms in slots are aligned."""
    own = config(HALF)
    own = replace(own, parallel=replace(own.parallel, pipeline_size=1, device="cpu", gpu=None))
    run_plan = make_run_plan(own)
    [memory] = held_by_ranks(own, run_plan)[1]
    state = build_train_state(own, single_rank(torch.device("cpu")), run_plan)
    link = HostLink(state.updated, HALF, torch.device("cpu"))
    there = [
        tensor
        for part in state.updated
        if part.name in link.names
        for tensor in state.optimizer.tensors_of(part.name).values()
    ]
    largest = max(part.weight.numel() for part in state.updated)
    held = sum(tensor.nbytes for tensor in there)
    slots = sum(slot.gradients.nbytes + slot.weights.nbytes for slot in link.slots)
    alignment = 2 * (4 + 2) * 64 * len(link.names)
    assert 0 <= held + slots - memory.on_host < 2 * 12 * largest + alignment
    state.close()


def test_lanes_to_the_host_end_with_the_run() -> None:
    own = config(HostStates(overlap=True))
    own = replace(own, parallel=replace(own.parallel, pipeline_size=1, device="cpu", gpu=None))
    state = build_train_state(own, single_rank(torch.device("cpu")))
    state.close()
    assert state.host_link is not None
    for lane in (state.host_link.out, state.host_link.back):
        with pytest.raises(RuntimeError):
            lane.submit(lambda: None)


def test_slots_have_room_for_the_largest_parameter() -> None:
    """Few parameters travel in one batch; many in batches of equal size, or of one parameter."""
    assert slot_elements(1000, 600) == 1000
    assert slot_elements(4 * BATCH, 600) == BATCH
    assert slot_elements(4 * BATCH, 2 * BATCH) == 2 * BATCH
    counted = planned(HALF).memories[0].count.parameters
    assert 0 < counted.largest < counted.all


def test_rows_of_a_shard_travel_with_a_sharded_optimizer() -> None:
    own, counted = config(HALF), Parameters(1000, 0, 0, largest=800)
    assert largest_part(own, counted) == 800
    replicas = ReplicaConfig(size=4, bucket_size=400, shard_optimizer=True)
    sharded = replace(own, parallel=replace(own.parallel, replicas=replicas))
    assert largest_part(sharded, counted) == 300
    few = replace(replicas, bucket_size=None, buckets=1)
    assert largest_part(replace(own, parallel=replace(own.parallel, replicas=few)), counted) == 450


def test_states_beyond_the_hosts_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = config(HALF)
    run_plan = make_run_plan(own)
    monkeypatch.setattr(must_fit, "machine_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"^--optimizer-cpu-offload: .*--optimizer-offload-fract"):
        check_host(own, run_plan, 0)
    on_cpus = replace(own, parallel=replace(own.parallel, device="cpu", gpu=None))
    held = held_by_ranks(own, run_plan)[1][0]
    monkeypatch.setattr(must_fit, "_memory", lambda _: held.static + 0.5 * held.on_host)
    with pytest.raises(ValueError, match="optimizer state of rank 0 take"):
        check_memory(on_cpus, run_plan, 0)
