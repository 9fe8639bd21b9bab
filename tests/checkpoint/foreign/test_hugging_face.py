"""What is imported from and exported to Hugging Face computes the same there and here."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the reference: pip install transformers")

from checkpoint.foreign.known_models import (
    CONFIGS,
    loaded_model,
    our_logits,
    random_model,
    some_tokens,
    their_logits,
    weights,
)

from megatron.checkpoint.choose import choose, read_model
from megatron.checkpoint.foreign.families import FAMILIES
from megatron.checkpoint.foreign.hugging_face import open_model
from tools.convert import main

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours

CLOSE = 1e-4
"""Largest difference of two logits in fp32; they are of the order of 10."""


def run(*words: object) -> None:
    """Run the command."""
    main([str(word) for word in words])


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_the_same_in_both_directions(family: str, tmp_path: Path) -> None:
    theirs, tokens_bs = random_model(family), some_tokens()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")  # several files
    run("import", tmp_path / "theirs", tmp_path / "ours", "--seq-length", 20)
    wanted, where = their_logits(theirs, tokens_bs), choose(tmp_path / "ours", None)
    assert (our_logits(where, tokens_bs) - wanted).abs().max() < CLOSE
    run("export", tmp_path / "ours", tmp_path / "again", "--max-shard-size", "1MB")
    again = loaded_model(tmp_path / "again")
    assert type(again) is type(theirs)
    assert (their_logits(again, tokens_bs) - wanted).abs().max() < CLOSE


@pytest.mark.parametrize("family", CONFIGS)
def test_what_was_exported_is_imported_to_the_last_bit(family: str, tmp_path: Path) -> None:
    random_model(family).bfloat16().save_pretrained(tmp_path / "theirs")
    run("import", tmp_path / "theirs", tmp_path / "ours")
    run("export", tmp_path / "ours", tmp_path / "out", "--like", tmp_path / "theirs")
    run("import", tmp_path / "out", tmp_path / "again")
    one, other = (choose(tmp_path / name, None) for name in ("ours", "again"))
    assert read_model(one) == read_model(other)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert config["torch_dtype"] == "bfloat16"


def test_the_family_is_found_by_what_the_model_has(tmp_path: Path) -> None:
    """Each configuration is written as of the first family that has such models."""
    expected = {"qwen 2": "qwen2", "gemma 3": "gemma3_text", "llama 2": "llama", "gpt2": "gpt2"}
    for family, name in expected.items():
        theirs = random_model(family)
        theirs.save_pretrained(tmp_path / name)
        model = open_model(tmp_path / name).model
        fitting = []
        for one in FAMILIES.values():
            try:
                one.config_of(model)
            except ValueError:
                continue
            fitting.append(one.name)
        assert fitting[0] == name


def test_files_are_no_larger_than_asked_for(tmp_path: Path) -> None:
    random_model("llama 2").save_pretrained(tmp_path / "theirs")
    run("import", tmp_path / "theirs", tmp_path / "ours")
    run("export", tmp_path / "ours", tmp_path / "out", "--max-shard-size", "1MB")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    with pytest.raises(SystemExit, match="is there already"):
        run("export", tmp_path / "ours", tmp_path / "out")
    with pytest.raises(SystemExit, match="has 1 checkpoint already"):
        run("import", tmp_path / "theirs", tmp_path / "ours")
