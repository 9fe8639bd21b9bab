"""A rank that is out of memory says where it was, what it held, and what would fit."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from correctness.short_runs import Job, Layout
from harness.precisions import precision
from planning.test_dry_run import config as large_run
from planning.test_dry_run import few
from reference.plain_gpt import GPTOptions

from megatron.parallel.groups import single_rank
from megatron.parallel.settings import DeviceSettings
from megatron.planning.forecast_run import forecast_run
from megatron.planning.prepared_advice import prepared_advice
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.batch import to_device
from megatron.runtime.stage_passes import StagePasses
from megatron.schedules.passes import Pass
from megatron.simulator.costs.gpus import GIB, GPUS
from megatron.training import out_of_memory
from megatron.training.out_of_memory import Device, OutOfMemoryError, explained, where
from megatron.training.setup import TrainState, build_train_state

CPU = torch.device("cpu")
H100 = Device("NVIDIA H100 80GB HBM3", int(80 * GIB), int(70 * GIB), int(79 * GIB))


def small_run(path: Path) -> RunConfig:
    job = Job(GPTOptions(num_layers=2), microbatches=4)
    run = job.config(Layout(1, "none", "gpipe"), torch.bfloat16)
    return replace(run, log=replace(run.log, memory_snapshot_path=path))


def fail_in_the_second_backward(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> Exception:
    """Run an iteration on this one rank that ends in B1."""
    backward = StagePasses.backward

    def failing(self: StagePasses, item: Pass) -> None:
        if item.microbatch == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        backward(self, item)

    monkeypatch.setattr(StagePasses, "backward", failing)
    pipeline, batch = state.pipeline, Job(GPTOptions(num_layers=2), microbatches=4).batches()[0]
    pipeline.replace_plan(pipeline.train_program.plan, pipeline.costs)  # with this backward
    pipeline.position.enter("iteration 3")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pipeline.train(to_device(batch, CPU), 2)
    return caught.value


def test_it_says_where_it_was_and_what_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "deep" / "memory-5.pickle"
    own.parent.mkdir()
    (tmp_path / "victim").write_text("a file of the user")
    own.symlink_to(tmp_path / "victim")  # a link under the name that the rank chooses
    monkeypatch.setattr(Device, "current", lambda: H100)
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("blocks")
    )
    run = small_run(tmp_path / "deep" / "memory.pickle")
    state = build_train_state(run, single_rank(CPU))
    told = explained(
        fail_in_the_second_backward(state, monkeypatch), run.log, state, 5, ("advice",)
    )
    assert isinstance(told, OutOfMemoryError)
    first, figures, snapshot, *rest = str(told).splitlines()
    row = [str(step.item) for step in state.pipeline.position.row]  # type: ignore[union-attr]
    place = row.index("B1") + 1
    assert first == (
        f"rank 5 is out of memory in iteration 3, at B1 (instruction {place} of {len(row)}); it "
        "holds 3 activations of microbatches, with their chunks: 1.0 2.0 3.0"
    )
    assert figures.startswith("NVIDIA H100 80GB HBM3 has 80.0 GiB: tensors take 70.0 GiB of 79.0")
    assert str(own) in snapshot
    assert own.read_text() == "blocks"
    assert (tmp_path / "victim").read_text() == "a file of the user"
    assert rest == ["advice"]


@pytest.mark.parametrize("asked", [lambda: torch.empty(1 << 50), lambda: bytearray(1 << 60)])
def test_a_host_without_memory_is_told_with_the_ways_out(
    asked: Callable[[], object], tmp_path: Path
) -> None:
    """Both PyTorch and Python say it in their own way; no other error becomes advice."""
    run = small_run(tmp_path / "memory.pickle")
    state = build_train_state(run, single_rank(CPU))
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        asked()
    told = explained(caught.value, run.log, state, 3)
    assert isinstance(told, OutOfMemoryError)
    first, figures, ways = str(told).splitlines()
    assert first.startswith("rank 3 is out of memory in ")
    assert re.match(r"this machine has [\d.]+ [GT]iB .* held [\d.]+ [MG]iB at most", figures)
    assert "--micro-batch-size" in ways
    other = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert explained(other, run.log, state, 3) is other


def on_gpus(run: RunConfig) -> RunConfig:
    return replace(
        run,
        parallel=replace(run.parallel, devices=DeviceSettings("cuda", "nccl"), gpu=GPUS["H100"]),
    )


def test_the_advice_fits_better_than_the_run() -> None:
    """Though its count would fit this GPU, only settings that are counted lower are named."""
    run = on_gpus(few(large_run(2, "none", "gpipe")))
    plan = make_run_plan(run)
    peak = max(forecast_run(run, plan, GPUS["H100"]).outcome.peak)
    lines = "\n".join(prepared_advice(run, plan, 0, seconds=3600.0)).splitlines()
    assert re.match(r"the dry run counts .* at most on pipeline rank 0", lines[0])
    assert lines[1] == "what would fit, the fastest first:"
    named = [line for line in lines if line.startswith("  --")]
    assert named
    for line in named:
        found = re.search(r": ([\d.]+) GiB, ", line)
        assert found is not None, line
        assert float(found[1]) * GIB < peak
    assert any("--vocab-parallel" in line for line in named)


def test_without_time_the_advice_says_how_to_ask() -> None:
    run = on_gpus(few(large_run(2, "none", "gpipe")))
    text = "\n".join(prepared_advice(run, make_run_plan(run), 0, seconds=0.0))
    assert "the search ended after work of about 0 s, with 0 plans of " in text
    assert "(--dry-run --dry-run-gpu NAME with the same flags tries more)" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_nothing_is_known_the_way_to_ask_is_named(dtype: torch.dtype) -> None:
    run = on_gpus(large_run())
    run = replace(run, train=replace(run.train, precision=precision(dtype)))
    if dtype == torch.bfloat16:
        run = replace(run, parallel=replace(run.parallel, gpu=None))
    [line] = prepared_advice(run, make_run_plan(run), 0)
    assert "--dry-run" in line
    assert ("--bf16" in line) == (dtype == torch.float32)
    on_cpus = replace(run, parallel=replace(run.parallel, devices=DeviceSettings("cpu", "gloo")))
    assert prepared_advice(on_cpus, make_run_plan(on_cpus), 0) == ()


def test_a_rank_that_is_not_built_yet_says_what_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Device, "current", lambda: H100)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    log = small_run(tmp_path / "m.pickle").log
    told = explained(torch.OutOfMemoryError("x"), log, None, 0)
    assert str(told).startswith("rank 0 is out of memory\nNVIDIA H100")
    assert "m-0.pickle" not in str(told)


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    error = RuntimeError("something else")
    assert explained(error, small_run(tmp_path / "m").log, None, 0) is error


def test_memory_is_remembered_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **given: asked.append(given)
    )
    log = small_run(Path("m")).log
    out_of_memory.record_memory(log, torch.device("cuda", 0))
    out_of_memory.record_memory(replace(log, record_memory_history=True), CPU)
    assert asked == []
    out_of_memory.record_memory(replace(log, record_memory_history=True), torch.device("cuda", 0))
    assert asked == [{"max_entries": out_of_memory.HISTORY}]


def test_between_iterations_it_holds_nothing() -> None:
    state = build_train_state(small_run(Path("m")), single_rank(CPU))
    state.pipeline.position.enter("the save")
    assert where(state.pipeline.position, state.pipeline.store) == (
        "the save; it holds no microbatch"
    )
