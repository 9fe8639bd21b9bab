"""Whole jobs in bf16, fp16 and 8 bits learn what a job in fp32 learns, from the sample data."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch.test_training_job import ROOT, started

PATIENCE = 900
LEARNING = (
    "--train-iters 100 --log-interval 10 --lr 2e-3 --lr-warmup-iters 10 --lr-decay-style cosine "
    "--min-lr 2e-4 --num-layers 4 --hidden-size 64 --seq-length 64 --micro-batch-size 4 "
    "--global-batch-size 16 --split 1,0,0 --tokenizer-type GPTSentencePieceTokenizer "
)
LINE = re.compile(
    r"lm loss: (?P<loss>\S+) \| loss scale: (?P<scale>\S+) .* "
    r"number of skipped iterations: +(?P<skipped>\d+) "
)


@pytest.fixture(scope="module")
def sample_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What ``tools/sample_data.py`` prints: the data and the tokenizer."""
    cache = tmp_path_factory.mktemp("cache")
    made = subprocess.run(
        [sys.executable, ROOT / "tools/sample_data.py", "--vocab-size", "1k", "--cache", cache],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return dict(line.split("=", 1) for line in made.stdout.splitlines())


def trained(sample_data: dict[str, str], precision: str) -> list[re.Match[str]]:
    flags = (
        f"{LEARNING} --tokenizer-model {sample_data['TOKENIZER_MODEL']} --vocab-size 1024 "
        f"{precision}"
    )
    with started(Path(sample_data["DATA_PATH"]), flags) as job:
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    lines = list(LINE.finditer(output))
    assert len(lines) == 10, output
    return lines


@pytest.mark.full
def test_losses_after_100_iterations_are_those_of_fp32(sample_data: dict[str, str]) -> None:
    """Of the last ten together; the first iterations of fp16 overflow and are skipped."""
    expected = float(trained(sample_data, "")[-1]["loss"])
    first, *_, last = trained(sample_data, "--bf16")
    assert float(last["loss"]) == pytest.approx(expected, rel=0.01)
    assert (last["scale"], last["skipped"]) == ("1.0", "0")
    in_fp16 = trained(sample_data, "--fp16 --initial-loss-scale 4194304 --hysteresis 1")
    first, *_, last = in_fp16
    assert float(last["loss"]) == pytest.approx(expected, rel=0.01)
    assert int(first["skipped"]) > 0
    skipped = sum(int(line["skipped"]) for line in in_fp16)
    assert float(last["scale"]) == 4194304 / 2**skipped


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["delayed --fp8-amax-history-len 16", "tensorwise"])
@pytest.mark.parametrize("form", ["hybrid", "e4m3"])
def test_losses_in_8_bits_are_those_of_bf16(
    form: str, recipe: str, sample_data: dict[str, str]
) -> None:
    """Of iterations 91 to 100 together."""
    expected = float(trained(sample_data, "--bf16")[-1]["loss"])
    last = trained(sample_data, f"--bf16 --fp8-format {form} --fp8-recipe {recipe}")[-1]
    assert float(last["loss"]) == pytest.approx(expected, rel=0.01)
    assert float(last["loss"]) != expected
