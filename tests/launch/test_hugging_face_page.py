"""The commands of docs/hugging-face.md work one after the other, on a small model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the reference")

from checkpoint.foreign.known_models import (  # noqa: E402 (needs the line above)
    loaded_model,
    our_logits,
    their_logits,
    weights,
)

from megatron.checkpoint.choose import choose  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "hugging-face.md"
PATIENCE = 180
VOCABULARY = 151936

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours


def commands() -> list[str]:
    """The commands of the page, in its order."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ")
    return lines.splitlines()


def run(command: str, folder: Path) -> str:
    """Run a command where the small model is; return what it prints."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def small_model(folder: Path) -> None:
    """Write a small Qwen 3 with the vocabulary of the large one."""
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_id=151645,
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


@pytest.mark.full
def test_the_page_works_from_top_to_bottom(tmp_path: Path) -> None:
    for name in ("tools", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    small_model(tmp_path / "Qwen3-0.6B")
    printed = {command: run(command, tmp_path) for command in commands()}
    assert len(printed) == 7
    before, after = (choose(tmp_path / name, None) for name in ("imported", "tuned"))
    first, last = weights(before), weights(after)
    distances = [float((last[name] - first[name]).abs().max()) for name in first]
    assert 0 < max(distances) < 1e-3, "training began with the imported weights"
    exported = loaded_model(tmp_path / "Qwen3-tuned")
    assert exported.config.eos_token_id == 151645
    assert exported.get_input_embeddings().weight.shape[0] == VOCABULARY
    tokens_bs = torch.arange(24).view(2, 12) * 6000
    difference = their_logits(exported.float(), tokens_bs) - our_logits(after, tokens_bs)
    assert difference.abs().max() < 1e-2, "written in bf16"
    alone, together = (text for command, text in printed.items() if "--prompt" in command)
    assert alone == together
    assert len(alone.split()) == 3 + 8
