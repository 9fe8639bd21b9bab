"""A job with the options of training data: documents apart, corpora by split, sets told apart."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data.indexed import IndexedWriter

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--pipeline-model-parallel-size 2 --enable-vocab-parallel --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --global-batch-size 8 "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 63 "
    "--device cpu --peak-tflops 0.1 --train-iters 40 --lr 1e-2 --eval-interval 40 --eval-iters 2 "
    "--eod-mask-loss --reset-attention-mask --reset-position-ids --num-workers 2 "
    "--multiple-validation-sets --log-progress"
)


@pytest.mark.full
def test_a_job_with_options_of_its_data(corpus: Path, tmp_path: Path) -> None:
    """What is learned soon is another task than that of the second validation set."""
    falling, file, saved = tmp_path / "falling", tmp_path / "paths.json", tmp_path / "saved"
    with IndexedWriter(falling, 64) as writer:
        for document in range(60):
            writer.add_document([(document - i) % 50 for i in range(40)] + [63])
    file.write_text(json.dumps({"train": str(corpus), "valid": [str(corpus), str(falling)]}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    paths = ["--per-split-data-args-path", str(file), "--save", str(saved)]
    job = subprocess.run(
        [*torchrun, str(ROOT / "pretrain_gpt.py"), *FLAGS.split(), *paths],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert f"validation-1 is {falling}" in job.stdout
    line = r" (validation-\d) loss at iteration 40 \| lm loss value: (\S+)"
    losses = {name: float(value) for name, value in re.findall(line, job.stdout)}
    assert losses.keys() == {"validation-0", "validation-1"}
    assert losses["validation-0"] + 1 < losses["validation-1"]
    started, ended = (saved / "progress.txt").read_text().splitlines()
    assert started.split("\t")[3:] == ["Starting job"]
    assert ended.split("\t")[3:5] == ["Saved checkpoint", "Iteration: 40"]
