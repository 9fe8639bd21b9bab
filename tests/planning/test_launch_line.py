"""The line that starts a job: a shell reads it, and the words make the run that was planned."""

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from planning.asked.test_model import DEEPSEEK_V3, LLAMA_8B, written
from torch.distributed.run import get_args_parser

from megatron.planning.asked.question import Question, dry_run_words, question_of
from megatron.planning.launch_line import WIDTH, launch_line
from megatron.run.command_line import parse

LAYOUT = [
    *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    *("--pipeline-model-parallel-size", "4", "--micro-batch-size", "1"),
    *("--vocab-parallel", "vocab-2", "--use-distributed-optimizer"),
]
BLANKS = {
    "DATA_PATH": "/data/my text_document",
    "TOKENIZER": "/models/it's mine",
    "LR": "3e-4",
    "TRAIN_ITERS": "1000",
    "SAVE": "/checkpoints/run $1",
    "MASTER_ADDR": "node-0",
}
STAND_IN = 'torchrun() { printf "%s\\0" "$@"; }; exec() { shift; printf "%s\\0" "$@"; }\n'
"""Shell functions that print the words with which the job would be started."""


def asked(folder: Path, *words: str, gpus: str = "64xH100") -> Question:
    """A question for a model whose ``config.json`` is in the folder."""
    job = ["--gpus", gpus, "--global-batch-tokens", "4M", "--seq-length", "8192"]
    return question_of(["--model", str(folder), *job, *words], "About.")


def filled(line: str, values: Mapping[str, str]) -> str:
    """The line with values of its variables, as a user writes them."""
    lines = line.splitlines()
    for at, one in enumerate(lines):
        name, _, rest = one.partition("=")
        if name in values and rest.lstrip().startswith("#"):
            lines[at] = f"{name}={shlex.quote(values[name])} {rest}"
    return "\n".join(lines)


def run(line: str, node_rank: str | None = "1") -> "subprocess.CompletedProcess[str]":
    """Let a shell run the line, in which torchrun and srun only print their words."""
    environment = {} if node_rank is None else {"NODE_RANK": node_rank}
    script = ["bash", "-c", STAND_IN + line]
    return subprocess.run(script, env=environment, capture_output=True, text=True, check=False)


def words_of(line: str) -> tuple[list[str], list[str]]:
    """The words of the launcher, and those of pretrain_gpt.py."""
    ran = run(filled(line, BLANKS))
    assert ran.returncode == 0, ran.stderr
    words = ran.stdout.split("\0")[:-1]
    place = words.index("pretrain_gpt.py")
    return words[:place], words[place + 1 :]


def dry(words: list[str], gpu: str, replicas: int) -> list[str]:
    """The command line of a dry run."""
    return [*words, "--dry-run", "--dry-run-gpu", gpu, "--dry-run-replicas", str(replicas)]


@pytest.mark.parametrize("tokens", [["--tokens", "1T"], []])
def test_a_line_for_several_machines(tokens: list[str], tmp_path: Path) -> None:
    question = asked(written(LLAMA_8B, tmp_path), *tokens)
    launcher, words = words_of(launch_line(question, LAYOUT))
    ranks = get_args_parser().parse_args([*launcher, "pretrain_gpt.py"])
    assert (ranks.nnodes, ranks.nproc_per_node, ranks.node_rank) == ("8", "8", 1)
    assert (ranks.master_addr, ranks.master_port) == ("node-0", 29500)
    made = parse(dry(words, "H100", 8), 1)
    planned = parse(dry_run_words(question, LAYOUT, 8), 1)
    assert made.model == planned.model
    assert made.parallel == planned.parallel
    assert made.train.global_batch_size == planned.train.global_batch_size == 512
    assert words[words.index("--train-iters") + 1] == ("238419" if tokens else "1000")
    assert words[words.index("--data-path") + 1] == BLANKS["DATA_PATH"]
    assert words[words.index("--tokenizer-model") + 1] == BLANKS["TOKENIZER"]
    assert str(made.checkpoint.save) == str(made.checkpoint.load) == BLANKS["SAVE"]
    assert not [note for note in made.notes if "changes nothing" in note]


def test_a_line_for_one_machine_with_all_that_it_needs(tmp_path: Path) -> None:
    """Flags of the user take the place of variables."""
    own = ["--mock-data", "--lr", "1e-4", "--train-iters", "7", "--save", "a b"]
    line = launch_line(asked(written(LLAMA_8B, tmp_path), *own, gpus="8xA100"), LAYOUT)
    assert "Fill" not in line
    launcher, words = words_of(line)
    assert launcher == ["--standalone", "--nproc-per-node", "8"]
    made = parse(dry(words, "A100", 1), 1)
    assert str(made.checkpoint.save) == "a b"


def test_a_batch_script_for_slurm(tmp_path: Path) -> None:
    question = asked(written(DEEPSEEK_V3, tmp_path), "--slurm", gpus="16x4xH200")
    line = launch_line(question, LAYOUT)
    assert line.startswith("#!/usr/bin/env bash\n#SBATCH ")
    told = dict(re.findall(r"(?m)^#SBATCH --([a-z-]+)=(\S+)$", line))
    assert (told["nodes"], told["ntasks-per-node"], told["gpus-per-node"]) == ("16", "4", "4")
    launcher, words = words_of(line)
    assert launcher == ["--kill-on-bad-exit=1", "--cpu-bind=none", "python"]
    made = parse(dry(words, "H200", 8), 1)
    assert made.model == parse(dry_run_words(question, LAYOUT, 8), 1).model
    assert made.guard.exit_signals  # Slurm's signal, some minutes before the time is up


@pytest.mark.parametrize("missing", [*BLANKS, "NODE_RANK"])
def test_what_is_not_filled_is_refused_by_name(missing: str, tmp_path: Path) -> None:
    line = launch_line(asked(written(LLAMA_8B, tmp_path)), LAYOUT)
    values = {name: value for name, value in BLANKS.items() if name != missing}
    ran = run(filled(line, values), None if missing == "NODE_RANK" else "1")
    assert ran.returncode != 0
    assert not ran.stdout
    assert missing in ran.stderr


def test_the_tokenizer_of_the_models_folder_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "a model"
    folder.mkdir()
    (written(LLAMA_8B, folder) / "tokenizer.json").write_text("{}")
    line = launch_line(asked(folder), LAYOUT)
    assert f"TOKENIZER='{folder}'" in line


def test_lines_are_readable(tmp_path: Path) -> None:
    line = launch_line(asked(written(DEEPSEEK_V3, tmp_path)), LAYOUT)
    assert max(map(len, line.splitlines())) <= WIDTH + 2
    assert "--moe-layer-freq '[0]*3+[1]*58'" in line
