"""Graphs of passes: where they are asked for, and where passes are launched one by one."""

from unittest.mock import patch

import pytest
from command_lines import with_flags

from megatron.run.command_line import parse

RUN = (
    "--num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 1 --mock-data --vocab-size 99 --attention-dropout 0 "
    "--hidden-dropout 0 --cuda-graph-impl local"
)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_gpu_captures_passes(tensor: int) -> None:
    flags = [*RUN.split(), "--device", "cpu", "--tensor-model-parallel-size", str(tensor)]
    with patch("megatron.run.graphs.on_cuda", lambda flags: True):
        config = parse(flags, tensor)
    assert config.train.captures_passes
    assert not any("--cuda-graph-impl" in note for note in config.notes)


@pytest.mark.parametrize(
    ("flags", "ranks", "reason"),
    [
        ("--attention-dropout 0.1", 1, "seeds --attention-dropout 0.1 anew"),
        ("--hidden-dropout 0.2", 1, "seeds --hidden-dropout 0.2 anew"),
        ("--context-parallel-size 2", 2, "never been captured"),
        ("--reset-position-ids --eod-mask-loss", 1, "other bounds"),
        ("--mtp-num-layers 1 --position-embedding-type rope", 1, "further embeddings"),
        (
            "--recompute-ahead 1 --recompute-granularity full --recompute-method uniform",
            1,
            "no graph",
        ),
    ],
)
def test_what_no_graph_can_have_is_noted(flags: str, ranks: int, reason: str) -> None:
    with patch("megatron.run.graphs.on_cuda", lambda flags: True):
        config = parse(with_flags([*RUN.split(), "--device", "cpu"], flags.split()), ranks)
    assert not config.train.captures_passes
    (note,) = [each for each in config.notes if "--cuda-graph-impl" in each]
    assert reason in note


def test_what_auto_takes_decides_whether_there_are_graphs() -> None:
    """Beside ``auto`` nothing is noted before the plan has decided."""
    flags = "--num-seq-splits auto --cpu-offload --offload-chunk-num auto --seq-length 1024"
    with patch("megatron.run.graphs.on_cuda", lambda flags: True):
        opened = parse(with_flags([*RUN.split(), "--device", "cpu"], flags.split()), 1)
    assert not any("--cuda-graph-impl" in note for note in opened.notes)
    for own in opened.alternatives:
        told = " ".join(note for note in opened.taking(own).notes if "--cuda-graph-impl" in note)
        on_host, cut = "--cpu-offload" in own.taken, "--num-seq-splits 1" not in own.taken
        assert own.train.captures_passes is not (on_host or cut)
        assert ("lets go of memory" in told, "another number of keys" in told) == (on_host, cut)


def test_a_cpu_has_none() -> None:
    config = parse([*RUN.split(), "--device", "cpu"], 1)
    assert not config.train.captures_passes
    assert "--cuda-graph-impl local changes nothing: ranks on CPUs launch nothing" in config.notes


def test_a_dry_run_does_not_predict_them() -> None:
    config = parse([*RUN.split(), "--device", "cpu", "--dry-run", "--bf16"], 1)
    assert any("changes nothing in a dry run" in note for note in config.notes)
