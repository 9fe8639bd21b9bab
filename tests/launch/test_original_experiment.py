"""Every run of the originals' experiments becomes a line that the parser takes.

The experiment (``artifact/full_exp.sh`` of sail-sg/VocabularyParallelism) exports the variables of
40 runs, one after another, and starts ``pretrain_gpt.sh`` on 8 GPUs.
"""

import re
import shlex
from itertools import product
from pathlib import Path

import pytest
from launch.made_up_machine import ROOT, Machine

from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig

ALL_RUNS = {
    "EXIT_INTERVAL": "20",
    "LOG_INTERVAL": "1",
    "SCHEDULE_TIMER_START": "1000",
    "SCHEDULE_TIMER_END": "1000",
    "GPUS_PER_NODE": "8",
    "GLOBAL_BATCH_SIZE": "128",
    "HIDDEN_SIZE": "3072",
    "LAYERS": "32",
    "IMM_SIZE": "12288",
    "ATTENTION_HEADS": "24",
    "PIPELINE_SIZE": "8",
    "MICRO_BATCH_SIZE": "1",
}
SWITCHES = {
    "none": (),
    "redis": ("ENABLE_LAYER_REDISTRIBUTION",),
    "interlaced": ("VOCAB_PARALLEL", "INTERLACED_SCHEDULE"),
    "vocab-1": ("VOCAB_PARALLEL", "FB_SPLIT"),
    "vocab-2": ("VOCAB_PARALLEL",),
}
"""Switches of each method, by the name of our treatment. The others are exported empty."""

READ = """
    AIP_RUN_NAME ATTENTION_HEADS ENABLE_EXACTLY_NUMERIC_MATCH ENABLE_LAYER_REDISTRIBUTION
    ENABLE_OPTIMIZER_POST_VALIDATION ENABLE_ZERO_BUBBLE EVAL_INTERVAL EXIT_INTERVAL
    EXTRA_OPTIONS FB_SPLIT FFN_HIDDEN_SIZE FINAL_STAGE_LAYERS FP32 GLOBAL_BATCH_SIZE
    GPUS_PER_NODE GQA HIDDEN_SIZE IMM_SIZE INTERLACED_SCHEDULE INTERLEAVED_1F1B
    INTERLEAVE_GROUP LAYERS LOG_INTERVAL MASTER_ADDR MASTER_PORT MICRO_BATCH_SIZE NO_BARRIER
    OFFLOAD OFFLOAD_CHUNK_NUM OFFLOAD_TIME PIPELINE_SIZE PROFILED RANK SCHEDULE_TIMER_END
    SCHEDULE_TIMER_START SEQ_LENGTH SYNC_OPTIMIZER TP_SIZE VOCAB_PARALLEL VOCAB_SIZE WORLD_SIZE
    ZERO_BUBBLE_MEM_LIMIT ZERO_BUBBLE_TIMER_END ZERO_BUBBLE_TIMER_START ZERO_BUBBLE_V_SCHEDULE
    ZERO_BUBBLE_V_SCHEDULE_MEM_SETUP
"""
"""Variables that the scripts of VocabularyParallelism and of the zero-bubble fork read."""


def config_of(machine: Machine, variables: dict[str, str], vocab_size: int) -> RunConfig:
    """What the parser makes of the line that the script prints.

    The line is parsed as a dry run, which needs no GPUs and no data, but ``vocab_size``.
    """
    done = machine.run(**variables)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    flags = words[words.index(str(ROOT / "pretrain_gpt.py")) + 1 :]
    return parse([*flags, "--dry-run", "--vocab-size", str(vocab_size)], world_size=8)


@pytest.mark.parametrize("treatment", SWITCHES)
def test_every_run_parses_as_what_it_is(tmp_path: Path, treatment: str) -> None:
    machine = Machine(tmp_path, gpus=8)
    for sequence, thousands in product((2048, 4096), (32, 64, 128, 256)):
        run = {name: "" for names in SWITCHES.values() for name in names} | ALL_RUNS
        run |= dict.fromkeys(SWITCHES[treatment], "1")
        run |= {"SEQ_LENGTH": str(sequence), "VOCAB_SIZE": f"{thousands}k"}
        run |= {"FINAL_STAGE_LAYERS": "0" if treatment == "redis" else "4"}
        run |= {"AIP_RUN_NAME": f"{treatment}_v{thousands}k", "RUN_NAME": "a name", "LOGS_DIR": "."}
        config = config_of(machine, run, 1000 * thousands)
        assert config.parallel.vocab_parallel == treatment
        assert config.parallel.pipeline.size == 8
        assert config.model.seq_length == sequence
        assert config.model.num_layers == 32
        assert config.train.global_batch_size == 128
        assert config.train.train_iters == 20
        assert config.parallel.layers.last == (0 if treatment == "redis" else None)


ZERO_BUBBLE = {"ENABLE_ZERO_BUBBLE": "1", "ZERO_BUBBLE_MEM_LIMIT": "16"}
V_SHAPE = {**ZERO_BUBBLE, "ZERO_BUBBLE_V_SCHEDULE": "1"}
SETUP = "--zero-bubble-v-schedule-mem-setup"


@pytest.mark.parametrize(
    ("variables", "schedule", "post_validation"),
    [
        ({}, "1f1b", False),
        (ZERO_BUBBLE, "zb-auto", True),
        (V_SHAPE, "zb-v", True),
        ({**V_SHAPE, "SYNC_OPTIMIZER": "1", "EXTRA_OPTIONS": f"{SETUP} half"}, "v-half", False),
        ({**V_SHAPE, "SYNC_OPTIMIZER": "1", "EXTRA_OPTIONS": f"{SETUP} min"}, "v-min", False),
        ({"INTERLEAVED_1F1B": "1"}, "interleaved", False),
    ],
)
def test_the_forks_methods_parse_as_its_schedules(
    tmp_path: Path, variables: dict[str, str], schedule: str, post_validation: bool
) -> None:
    """The variables of ``examples/test_all_schedules.sh``, where it uses what is built here."""
    config = config_of(Machine(tmp_path, gpus=8), ALL_RUNS | variables, 32000)
    assert config.parallel.pipeline_schedule == schedule
    assert config.optimizer.post_validation == post_validation


def test_every_variable_that_the_originals_scripts_read_is_explained() -> None:
    head, _, _ = (ROOT / "pretrain_gpt.sh").read_text().partition("set -euo pipefail")
    assert [name for name in READ.split() if name not in re.findall(r"\w+", head)] == []
