"""Edits of a command line: their words, and the runs that they make."""

import pytest

from megatron.parallel.settings import TensorRankSettings
from megatron.run.command_line import parse
from megatron.run.edit import Edit, left_out, set_to
from megatron.run.line import Line
from megatron.simulator.costs.gpus import GPUS

LINE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 512 "
    "--micro-batch-size 1 --global-batch-size 16 --train-iters 1 --lr 1 --bf16 --dry-run "
    "--dry-run-gpu H100"
)
WORDS = LINE.split()


def test_an_edit_replaces_adds_and_leaves_out() -> None:
    line = Line.of([*WORDS, "--sequence-parallel"], 8)
    other = line.edited(
        (set_to("--tensor-model-parallel-size", 2), left_out("--sequence-parallel"))
    ).edited((set_to("--tensor-model-parallel-size", 4),))
    assert other.flags[TensorRankSettings].size == 4
    assert not other.flags[TensorRankSettings].sequence_parallel
    assert other.edited_words == ("--tensor-model-parallel-size", "4")
    assert line.flags[TensorRankSettings].sequence_parallel


def test_the_words_of_edits_behind_the_line_make_the_same_run() -> None:
    line = Line.of(WORDS, 8)
    other = line.edited(
        (
            set_to("--pipeline-model-parallel-size", 4),
            set_to("--pipeline-schedule", "zb-v"),
            set_to("--vocab-parallel", "vocab-2"),
            Edit("--vocab-recompute"),
        )
    )
    assert parse([*WORDS, *other.edited_words], 8) == parse(other.words, 8)
    made = other.run(GPUS["H100"])
    assert (made.parallel.pipeline.size, made.train.replicas) == (4, 2)
    assert made.parallel.gpu == GPUS["H100"]


def test_equal_flags_have_equal_keys() -> None:
    line = Line.of(WORDS, 8)
    there = line.edited((Edit("--vocab-recompute"),))
    assert there.edited((left_out("--vocab-recompute"),)).key == line.key != there.key


def test_a_mistake_names_the_flag() -> None:
    line = Line.of(WORDS, 8).edited((set_to("--tensor-model-parallel-size", 3),))
    assert "--tensor-model-parallel-size 3" in line.fault
    with pytest.raises(ValueError, match="--tensor-model-parallel-size 3"):
        line.run(GPUS["H100"])
    with pytest.raises(ValueError, match="--hiden-size is no flag"):
        Line.of(["--hiden-size", "3"], 1)
