"""The memory of a host: all ranks of a machine share it, and a run that exceeds it is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from correctness.short_runs import Job, Layout
from harness.still_watch import still_watch
from reference.plain_gpt import GPTOptions

from megatron.optimizer.settings import HostStateSettings
from megatron.parallel.grid import Grid
from megatron.parallel.placement import Placement
from megatron.parallel.settings import DeviceSettings
from megatron.planning import host_room, must_fit
from megatron.planning.dry_run import dry_run
from megatron.planning.forecast_run import forecast_run
from megatron.planning.host_room import HostUse, fullest_host, machine_memory
from megatron.planning.must_fit import check_host
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.schedules.settings import OffloadSettings
from megatron.simulator.costs.gpus import GIB, gpu
from megatron.simulator.units import MEMORY
from megatron.training.prepare import Prepared, _having_taken
from megatron.training.rendezvous import Rendezvous, UserError

A100 = gpu("A100")
STATES, ACTIVATIONS = (1, 2, 3, 4), (40, 30, 20, 10)
"""Bytes of four pipeline ranks."""


def config(host_memory: float | None = None, states: HostStateSettings | None = None) -> RunConfig:
    """A GPT in bf16 on two ranks of one machine, whose activations wait on the host."""
    job = Job(GPTOptions(num_layers=4, vocab_size=64), microbatches=8, iterations=1)
    made = job.config(Layout(2, "vocab-2"), torch.bfloat16)
    parallel = replace(
        made.parallel,
        devices=DeviceSettings("cuda", "nccl"),
        gpu=A100,
        offload=OffloadSettings(True, 1, 1000.0, host_memory and host_memory / 2**30),
    )
    return replace(made, parallel=parallel, train=replace(made.train, host_states=states))


def used(own: RunConfig) -> HostUse:
    return forecast_run(own, make_run_plan(own), A100).host


def test_the_machine_whose_ranks_keep_the_most_decides() -> None:
    """Two pipelines of four ranks on two machines of four ranks."""
    pipelines = Placement(Grid(1, 2, 4, "tp-pp-dp"), 4)
    assert fullest_host(pipelines, STATES, ACTIVATIONS) == HostUse(4, 10, 100)
    # Both replicas of the first two pipeline ranks, and of the last two.
    halves = Placement(Grid(1, 2, 4, "tp-dp-pp"), 4)
    assert fullest_host(halves, STATES, ACTIVATIONS) == HostUse(4, 6, 140)
    assert fullest_host(halves, STATES, ACTIVATIONS, pipeline_rank=3) == HostUse(4, 14, 60)


def test_a_machine_that_is_not_full_keeps_less() -> None:
    assert fullest_host(Placement(Grid(1, 1, 4), 3), STATES, (0, 0, 0, 0)) == HostUse(3, 6, 0)


@pytest.mark.parametrize(
    ("groups", "files", "least"),
    [
        ("0::/job/step\n", {"job/memory.max": "5000\n", "job/step/memory.max": "max\n"}, 5000),
        ("0::/\n", {"memory.max": "6000\n"}, 6000),
        (
            "9:cpu,memory:/job\n1:cpu:/job\n0::/\n",
            {"memory/job/memory.limit_in_bytes": "7000\n", "job/memory.max": "1\n"},
            7000,
        ),
        ("0::/job\n", {"memory.max": "max\n"}, None),
    ],
    ids=["of the job", "of the container", "older groups", "no limit"],
)
def test_limits_of_jobs_and_containers_count(
    groups: str,
    files: dict[str, str],
    least: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = tmp_path / "own"
    own.write_text(groups)
    monkeypatch.setattr(host_room, "OWN_GROUPS", own)
    monkeypatch.setattr(host_room, "CONTROL_GROUPS", tmp_path)
    whole = machine_memory()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert whole > GIB / 4
    assert machine_memory() == (whole if least is None else least)


@pytest.mark.parametrize(
    "states",
    [None, HostStateSettings(True, 0.5)],
    ids=["activations", "states too"],
)
def test_bytes_beyond_the_hosts_memory_are_refused_before_a_run(
    states: HostStateSettings | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of both ranks, in the run's own plan: of one microbatch they would be fewer."""
    own = config(states=states)
    run_plan, use = make_run_plan(own), used(own)
    one = replace(own, train=replace(own.train, global_batch_size=own.train.micro_batch_size))
    assert used(one).activations < use.activations
    monkeypatch.setattr(must_fit, "machine_memory", lambda: int(use.bytes))
    check_host(own, run_plan, 0)
    monkeypatch.setattr(must_fit, "machine_memory", lambda: int(use.bytes) - 1)
    flags = "--cpu-offload and --optimizer-cpu-offload" if states else "--cpu-offload"
    with pytest.raises(ValueError, match=rf"^{flags}: 2 ranks of a machine keep ") as refused:
        check_host(own, run_plan, 1)
    assert f"{MEMORY.write(use.activations)} of activations" in str(refused.value)
    assert "lower --offload-chunk-num" in str(refused.value)
    assert ("--optimizer-offload-fraction" in str(refused.value)) == bool(states)


def test_a_flag_may_say_that_a_machine_has_less(monkeypatch: pytest.MonkeyPatch) -> None:
    use = used(config())
    monkeypatch.setattr(must_fit, "machine_memory", lambda: int(use.bytes))
    for told, fits in ((use.bytes + 1, True), (use.bytes - 1, False)):
        own = config(told)
        if fits:
            check_host(own, make_run_plan(own), 0)
        else:
            with pytest.raises(ValueError, match=f"its memory is {MEMORY.write(told)}"):
                check_host(own, make_run_plan(own), 0)


def test_the_plan_of_rank_0_is_held_against_the_memory_of_every_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, use = config(), used(config())
    run_plan, rendezvous = make_run_plan(own), Rendezvous(dist.HashStore(), 1, 2)
    mine = Prepared(own, own, own.parallel.grid, run_plan, cast("Any", None), {})
    monkeypatch.setattr(must_fit, "machine_memory", lambda: int(use.bytes))
    assert _having_taken(mine, run_plan, rendezvous).run_plan == run_plan
    monkeypatch.setattr(must_fit, "machine_memory", lambda: int(use.bytes) - 1)
    with pytest.raises(UserError, match=r"^--cpu-offload: 2 ranks of a machine keep "):
        _having_taken(mine, run_plan, rendezvous)


def test_a_dry_run_tells_what_the_hosts_need_and_whether_they_have_it() -> None:
    use = used(config())
    need = f"2 ranks of a machine keep {MEMORY.write(use.bytes)} of activations on the host"
    for told, words in (
        (None, "refused on a machine with less memory (--host-memory N compares here)"),
        (use.bytes, f"a machine has {MEMORY.write(use.bytes)} (--host-memory)"),
        (use.bytes / 2, "too little: lower --offload-chunk-num, or run fewer ranks on a machine"),
    ):
        text = "\n".join(dry_run(config(told), A100, still_watch()))
        [line] = [line for line in text.splitlines() if line.startswith("hosts: ")]
        assert need in line
        assert words in line
        fits = told is None or told >= use.bytes
        assert ("the plan fits: " in text) == fits
        assert (f"the plan is too large for its hosts: {need}" in text) == (not fits)
