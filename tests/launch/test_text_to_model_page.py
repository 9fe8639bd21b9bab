"""The commands of docs/from-text-to-model.md lead from raw text to a model that others load."""

import json
import re
from pathlib import Path

import pytest
from launch.page_commands import run_page

from megatron.checkpoint.choose import choose, read_model

for package in ("transformers", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason="the page needs it")

ENTRIES = 1000


@pytest.mark.full
def test_the_page_leads_from_raw_text_to_a_model_that_others_load(tmp_path: Path) -> None:
    printed = run_page("from-text-to-model.md", tmp_path)
    (training,) = (text for block, text in printed.items() if "pretrain_gpt.py" in block)
    losses = [float(loss) for loss in re.findall(r"lm loss(?: value)?: (\S+)", training)]
    assert losses[-1] < losses[0] - 0.5
    *_, generated, by_transformers = printed.values()
    assert generated == by_transformers
    assert generated.startswith("The vocabulary")
    assert len(generated) > len("The vocabulary") + 12
    assert read_model(choose(tmp_path / "trained", None)).vocab_size == ENTRIES
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["vocab_size"] == ENTRIES
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    (end,) = (token["id"] for token in tokenizer["added_tokens"])
    assert config["eos_token_id"] == end
