"""The flags on activations and states on the host: what they become, and what excludes them."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.optimizer.settings import HostStateSettings
from megatron.planning.run_plan import make_run_plan
from megatron.run.command_line import parse
from megatron.schedules.make_plan import make_plan
from megatron.simulator.costs.gpus import GIB

RUN = [
    "--num-layers",
    "4",
    "--hidden-size",
    "8",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "8",
    "--micro-batch-size",
    "1",
    "--lr",
    "1e-3",
    "--train-iters",
    "1",
    "--mock-data",
    "--vocab-size",
    "99",
    "--device",
    "cpu",
]


def test_a_plan_that_moves_activations_needs_the_flag(tmp_path: Path) -> None:
    plan, file = make_plan("1f1b", "none", 1, 1), tmp_path / "own.plan"
    file.write_text(replace(plan, offloaded=1).to_text())
    own = [*RUN, "--global-batch-size", "1", "--schedule-file", str(file)]
    with pytest.raises(ValueError, match="add --cpu-offload --offload-chunk-num 1, or take"):
        make_run_plan(parse(own, 1))
    moving = make_run_plan(parse([*own, "--cpu-offload"], 1))
    assert moving.plan.offloaded == 1


def test_without_the_flag_nothing_is_moved() -> None:
    config = parse([*RUN, "--offload-chunk-num", "2"], 1)
    assert not config.parallel.offload.chunks
    assert any("--offload-chunk-num 2 changes nothing" in note for note in config.notes)


def test_the_forks_flags_give_the_chunks() -> None:
    asked = [*RUN, "--cpu-offload", "--auto-offload-time", "--offload-overlap-sr"]
    pair = [*asked, "--num-virtual-stages-per-pipeline-rank", "2", "--offload-chunk-num", "2"]
    every, two = parse(asked, 1), parse(pair, 1)
    assert every.parallel.offload.chunks > 1000  # as many as there are
    assert two.parallel.offload.chunks == 2
    assert sum("offload" in note for note in two.notes) == 2  # how copies are timed and take turns


def test_a_plan_takes_the_bandwidth_of_the_link_and_the_memory_of_a_machine() -> None:
    own = [*RUN, "--bf16", "--cpu-offload", "--host-bandwidth", "12", "--host-memory", "64"]
    config = parse([*own, "--dry-run"], 1)
    assert config.parallel.offload.bandwidth == 12e9
    assert config.parallel.offload.memory == 64 * GIB
    notes = [note for note in parse(own, 1).notes if note.startswith("--host-")]
    assert [note.split()[0] for note in notes] == ["--host-bandwidth", "--host-memory"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--fine-grained-activation-offloading", ["--cpu-offload with --offload-chunk-num"]),
        ("--cpu-offload --offload-time 0.2", ["--offload-time 0.2", "--host-bandwidth"]),
        ("--cpu-optimizer", ["--cpu-optimizer", "take --cpu-offload or --optimizer-cpu-offload"]),
        ("--optimizer-cpu-offload --optimizer muon", ["--optimizer muon", "adam or sgd"]),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 1.1",
            ["--optimizer-offload-fraction 1.1", "at most 1"],
        ),
    ],
)
def test_what_is_not_the_same_is_refused(flags: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match="offload") as refused:
        parse([*RUN, *flags.split()], 1)
    assert [word for word in words if word not in str(refused.value)] == []


def test_megatrons_flags_put_states_on_the_host() -> None:
    asked = [*RUN, "--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    every = parse([*asked, "--use-torch-optimizer-for-cpu-offload", "--pin-cpu-grads"], 1)
    assert every.train.host_states == HostStateSettings(optimizer_cpu_offload=True)
    assert sum("cpu" in note for note in every.notes) == 2
    some = parse(
        [
            *asked,
            "--optimizer-offload-fraction",
            "0.5",
            "--overlap-cpu-optimizer-d2h-h2d",
            "--no-pin-cpu-grads",
            "--no-pin-cpu-params",
        ],
        1,
    )
    assert some.train.host_states == HostStateSettings(
        True, 0.5, overlap_cpu_optimizer_d2h_h2d=True, pins_gradients=False, pins_weights=False
    )
    assert sum("pinned" in note for note in some.notes) == 2


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--optimizer-offload-fraction 0.5", "--optimizer-offload-fraction 0.5 changes nothing"),
        ("--overlap-cpu-optimizer-d2h-h2d", "--overlap-cpu-optimizer-d2h-h2d changes nothing"),
        (
            "--optimizer-cpu-offload --skip-train --load x",
            "--optimizer-cpu-offload changes nothing",
        ),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 0",
            "--optimizer-cpu-offload changes nothing with --optimizer-offload-fraction 0",
        ),
    ],
)
def test_flags_without_states_on_the_host_are_noted(flags: str, note: str) -> None:
    config = parse([*RUN, *flags.split()], 1)
    assert config.train.host_states is None
    assert any(note in own for own in config.notes), config.notes
