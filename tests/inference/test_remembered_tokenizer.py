"""Models that were trained or imported with a tokenizer speak without a flag of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the reference: pip install transformers")

import transformers
from harness.small_vocabularies import TEXT, hugging_face_folder, sentencepiece_model

from megatron.checkpoint.choose import choose
from megatron.checkpoint.common import COMMON
from megatron.commands.convert_checkpoint import main as convert
from megatron.commands.generate_text import main
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.run.command_line import parse
from tools.checkpoint import main as checkpoint
from tools.conversions_table import random_model_of

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours

ROOT = Path(__file__).resolve().parents[2]
TYPE = "GPTSentencePieceTokenizer"
RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 "
    "--lr 1e-2 --mock-data --device cpu"
)
ASK = ["--prompt", "the quick", "--max-new-tokens", "8"]


def train(words: str) -> str:
    """Run a training job of one process; return what it prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *RUN.split(), *words.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints ``root`` of a run, and its tokenizer ``x.model``."""
    folder = tmp_path_factory.mktemp("trained")
    model = sentencepiece_model(folder / "x.model")
    words = f"--tokenizer-type {TYPE} --tokenizer-model {model} --save {folder / 'root'}"
    train(f"{words} --train-iters 2")
    return folder


def test_a_moved_run_speaks_and_goes_on_without_its_tokenizer(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--tokenizer-type", TYPE, "--tokenizer-model", str(trained / "x.model")]
    capsys.readouterr()
    main([str(trained / "root"), *ASK, *given])
    wanted = capsys.readouterr()
    assert wanted.out.startswith("the quick")
    assert wanted.err == ""
    (trained / "x.model").unlink()
    moved = (trained / "root").rename(trained / "moved")
    main([str(moved), *ASK])
    found = capsys.readouterr()
    assert found.out == wanted.out
    (line,) = found.err.splitlines()
    assert line.startswith(f"note: the tokenizer is that of {moved / 'iter_0000002'}: --tokenizer")

    (copy,) = moved.glob("tokenizer_*/*")
    said = train(f"--train-iters 3 --load {moved} --save {moved}")
    assert f"--load: the tokenizer is that of {moved / 'iter_0000002'}: --tokenizer-type" in said
    assert f"saved {moved / 'iter_0000003'}" in said
    assert list(moved.glob("tokenizer_*/*")) == [copy]
    said = train(f"--skip-train --eval-iters 1 --load {moved} --use-checkpoint-args")
    assert "validation loss at iteration 3 on test set" in said

    for command, status in ((["ls", str(moved)], 0), (["verify", str(moved)], 0)):
        with pytest.raises(SystemExit) as ended:
            checkpoint(command)
        assert ended.value.code == status
    listed = capsys.readouterr().out
    assert f"tokenizer: {copy.parent.name}: {TYPE}, 1 file, 0.000 GB" in listed
    with pytest.raises(SystemExit):
        checkpoint(["reshard", str(moved), str(trained / "other")])
    capsys.readouterr()
    main([str(trained / "other"), *ASK])
    assert capsys.readouterr().out.startswith("the quick")

    copy.write_bytes(b"another one")
    with pytest.raises(SystemExit) as ended:
        checkpoint(["verify", str(moved)])
    assert ended.value.code == 1
    assert f"{copy} is not what was written" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=f"{copy} is not what was written: its BLAKE3 digest is "):
        main([str(moved), *ASK])


def imported(tokenizer: bool, folder: Path, entries: int = 400) -> Path:
    """Import a small Llama with a tokenizer beside it, or without; return its checkpoints."""
    theirs = random_model_of(
        transformers.LlamaConfig(
            vocab_size=entries, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip
    theirs.save_pretrained(folder / "theirs")
    if tokenizer:
        hugging_face_folder(folder / "theirs")
    convert(["import", str(folder / "theirs"), str(folder / "ours")])
    return folder / "ours"


def test_an_import_remembers_the_tokenizer_beside_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = imported(True, tmp_path)
    used = TokenizerSettings("HuggingFaceTokenizer", tmp_path / "theirs")
    entries = build_tokenizer(used).vocab_size
    assert entries < 400
    stored = json.loads((choose(root, None) / COMMON).read_text())["tokenizer"]
    assert stored["flags"] == {"tokenizer_type": "HuggingFaceTokenizer", "vocab_size": 400}
    capsys.readouterr()
    main([str(root), "--prompt", TEXT, "--max-new-tokens", "3"])
    assert capsys.readouterr().out.startswith(TEXT)
    words = "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --device cpu --finetune"
    config = parse([*words.split(), "--load", str(root), "--use-checkpoint-args"], 1, speak=False)
    assert config.model.vocab_size == 400
    assert config.data.tokenizer.tokenizer_type == "HuggingFaceTokenizer"


def test_an_import_says_why_it_has_no_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(True, tmp_path, entries=99)
    said = capsys.readouterr().err
    assert "note: the checkpoint has no tokenizer: that of" in said
    assert "and the model 99" in said


def test_a_checkpoint_without_a_tokenizer_needs_the_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = imported(False, tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(root), *ASK])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: give --tokenizer-type and --tokenizer-model, or --ids for token ids\n"
    )
