"""The command line of ``plan``: words of a run for any layout, and all mistakes at once."""

from dataclasses import replace
from pathlib import Path

import pytest
from planning.asked.test_model import DEEPSEEK_V3, LLAMA_8B, written

from megatron.planning.asked.question import dry_run_words, options_in, question_of
from megatron.run.command_line import parse

JOB = ["--gpus", "64xH100", "--global-batch-tokens", "4M", "--seq-length", "8192"]


@pytest.fixture
def llama(tmp_path: Path) -> list[str]:
    """Words that ask for Llama-3-8B."""
    return ["--model", str(written(LLAMA_8B, tmp_path))]


def test_the_words_make_the_job_for_a_layout(llama: list[str]) -> None:
    asked = question_of([*llama, *JOB, "--tokens", "1T", "--vocab-size", "256000"], "About.")
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"]
    run = parse(dry_run_words(asked, layout, 8), 1)
    assert (run.model.num_layers, run.model.vocab_size, run.model.seq_length) == (32, 256000, 8192)
    assert run.train.global_batch_size == asked.global_batch_size == 512
    assert run.train.num_microbatches == 512 // 8
    assert run.parallel.grid.world_size == asked.gpus.count
    assert run.parallel.placement.machines == asked.gpus.machines
    assert run.dry_run is not None
    assert run.dry_run.gpu == "H100"
    # 10^12 tokens of 512 x 8,192 a step.
    words = list(asked.words)
    assert words[words.index("--train-iters") + 1] == "238419"
    assert asked.notes == (
        "--global-batch-tokens 4,000,000 are 512 samples of 8,192: 4,194,304 tokens",
    )


def test_a_model_by_flags() -> None:
    model = [
        *("--num-layers", "8", "--hidden-size", "512", "--num-attention-heads", "8"),
        *("--vocab-size", "32000", "--max-position-embeddings", "8192"),
        *("--fp16", "--micro-batch-size", "2"),
    ]
    asked = question_of([*JOB, *model], "About.")
    assert asked.model is None
    run = parse(dry_run_words(asked, (), 64), 1)
    assert (run.model.num_layers, run.model.seq_length) == (8, 8192)
    assert run.train.micro_batch_size == 2
    assert "--bf16" not in asked.options
    assert {"--train-iters", "--lr"}.isdisjoint(asked.options)


def test_a_gpu_may_have_another_memory(llama: list[str]) -> None:
    usual, other = (question_of([*llama, *JOB, *own], "About.") for own in ([], ["--memory", "60"]))
    assert usual.gpus.gpu.memory == 80 * 2**30
    assert other.gpus.gpu == replace(usual.gpus.gpu, memory=60 * 2**30)
    assert other.words == usual.words


def test_the_length_may_be_told_in_samples(llama: list[str]) -> None:
    asked = question_of([*llama, *JOB, "--train-samples", "51200"], "About.")
    line = dry_run_words(asked, (), 64)
    assert "--train-iters" not in line
    assert parse(line, 1).train.global_batch_size == 512


def test_experts_may_be_spread_by_hand(tmp_path: Path) -> None:
    """Over ranks of several replicas, of which no layout is known yet."""
    model = ["--model", str(written(DEEPSEEK_V3, tmp_path))]
    asked = question_of([*model, *JOB, "--expert-model-parallel-size", "64"], "About.")
    assert "--expert-model-parallel-size" in asked.options
    assert any("quantised" in note for note in asked.notes)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--gpus 8xH100", ["--seq-length is missing", "--global-batch-tokens is missing"]),
        (
            "--model /nowhere --gpus 8xH10 --global-batch-tokens 4MM --seq-length 0",
            ["--gpus 8xH10: H10 is no GPU", "--global-batch-tokens 4MM: give", "--seq-length 0"],
        ),
        (
            "--model /nowhere --gpus 8xH100 --global-batch-tokens 4k --seq-length 128",
            ["/nowhere: there is no such file"],
        ),
        (
            "LLAMA --gpus 8xH100 --global-batch-tokens 9k --seq-length 8192",
            ["9,000 tokens are no whole number of samples of 8,192"],
        ),
        (
            "LLAMA JOB --globl 7 --lr x --micro-batch-size 0",
            ["--globl is no flag", "--lr x: must be a number", "--micro-batch-size 0: must be"],
        ),
        ("LLAMA JOB --tensor-model-parallel-size 48", ["8x8xH100 are 64 GPUs, which the 48 ranks"]),
        ("LLAMA JOB --global-batch-size 8", ["--global-batch-tokens 4000000 does not go with"]),
        (
            "LLAMA JOB --tokens 1T --train-samples 5000 --dry-run",
            ["--tokens does not go with --train-samples", "--dry-run: this command predicts"],
        ),
        ("JOB --num-layers 4", ["--hidden-size is missing", "--num-attention-heads is missing"]),
    ],
)
def test_all_mistakes_are_told_at_once(
    words: str, told: list[str], llama: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = words.replace("LLAMA", " ".join(llama)).replace("JOB", " ".join(JOB))
    with pytest.raises(SystemExit, match="2"):
        question_of(line.split(), "About.")
    printed = capsys.readouterr().err
    for one in told:
        assert one in printed
    assert len(printed.splitlines()) <= len(told) + 2


def test_help_names_the_forms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        question_of(["--help"], "About.")
    assert "64xH100, 8x8xH100" in " ".join(capsys.readouterr().out.split())


def test_options_of_words() -> None:
    assert options_in(["--a", "1", "--b=2", "--c_d"]) == {"--a", "--b", "--c-d"}


def test_flags_of_a_file_are_part_of_the_question(llama: list[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.flags"
    file.write_text("--vocab-size 256000\n--micro-batch-size 2\n--gpus 8xH100\n")
    asked = question_of([*llama, f"@{file}", *JOB, "--micro-batch-size", "4"], "About.")
    assert asked.gpus.count == 64
    assert asked.words[-4:] == ("--vocab-size", "256000", "--micro-batch-size", "4")
    assert asked.notes[0] == f"@{file} is read as 3 flags of {file}"
    replaced = [note for note in asked.notes if "changes nothing" in note]
    assert {note.split(" (")[0] for note in replaced} == {"--micro-batch-size 2", "--gpus 8xH100"}


def test_mistakes_in_flag_files_are_told_with_all_others(
    llama: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.flags"
    file.write_text("gpus\n")
    with pytest.raises(SystemExit):
        question_of([*llama, f"@{file}", *JOB, "--train-itres", "1"], "About.")
    told = capsys.readouterr().err
    assert f"{file}, line 1: 'gpus' is no flag" in told
    assert "--train-itres is no flag" in told
