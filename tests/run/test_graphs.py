"""Graphs of passes: where they are asked for, and where passes are launched one by one."""

from unittest.mock import patch

import pytest
from command_lines import with_flags

from megatron.parallel.context import CONTEXT_EXCHANGES
from megatron.run.command_line import parse

RUN = (
    "--num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 1 --mock-data --vocab-size 99 --attention-dropout 0 "
    "--hidden-dropout 0 --cuda-graph-impl local"
)


NARROW = "--hidden-size 32 --seq-length 16 --ffn-hidden-size 64 --bf16 --fp8-format"
MIXTURE = "--num-experts 4 --swiglu --disable-bias-linear --ffn-hidden-size 16"


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("", 1),
        ("--tensor-model-parallel-size 2", 2),
        *[(f"--context-parallel-size 2 --cp-comm-type {own}", 2) for own in CONTEXT_EXCHANGES],
        ("--reset-position-ids", 1),
        ("--mtp-num-layers 1 --position-embedding-type rope", 1),
        (f"{MIXTURE} --moe-aux-loss-coeff 0.1", 1),
        (f"{NARROW} hybrid", 1),
        (f"{NARROW} e4m3 --fp8-recipe tensorwise", 1),
    ],
)
def test_a_gpu_captures_passes(flags: str, ranks: int) -> None:
    if "a2a+p2p" in flags:
        flags, ranks = f"{flags} --hierarchical-context-parallel-sizes 2 2", 4
        flags = flags.replace("size 2 ", "size 4 ")
    with patch("megatron.run.graphs.on_cuda", lambda flags: True):
        config = parse(with_flags([*RUN.split(), "--device", "cpu"], flags.split()), ranks)
    assert config.train.captures_passes
    assert not any("--cuda-graph-impl" in note for note in config.notes)


@pytest.mark.parametrize(
    ("flags", "ranks", "reason"),
    [
        ("--attention-dropout 0.1", 1, "seeds --attention-dropout 0.1 anew"),
        ("--hidden-dropout 0.2", 1, "seeds --hidden-dropout 0.2 anew"),
        ("--position-embedding-type alibi", 1, "copies slopes from the host"),
        ("--reset-attention-mask --eod-mask-loss", 1, "other bounds"),
        (f"{MIXTURE} --moe-input-jitter-eps 0.1", 1, "seeds --moe-input-jitter-eps"),
        (f"{MIXTURE} --moe-router-force-load-balancing", 1, "seeds --moe-router-force"),
        (
            f"{MIXTURE} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
            1,
            "earlier microbatches",
        ),
        (f"{MIXTURE} --moe-router-load-balancing-type sinkhorn", 1, "whether another one follows"),
        (f"{MIXTURE} --expert-model-parallel-size 2", 2, "number of rows that arrive"),
        (f"{MIXTURE} {NARROW} hybrid", 1, "products of experts in 8 bits"),
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


def test_a_dry_run_counts_them() -> None:
    config = parse([*RUN.split(), "--device", "cpu", "--dry-run", "--bf16"], 1)
    assert config.train.captures_passes
    assert not any("--cuda-graph-impl" in note for note in config.notes)
