"""What is imported from and exported to Hugging Face computes the same there and here."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the reference: pip install transformers")

from checkpoint.foreign.known_models import our_logits, weights

from megatron.checkpoint.choose import choose, read_model
from megatron.checkpoint.foreign.families import FAMILIES
from megatron.checkpoint.foreign.hugging_face import open_model, plan_export
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.commands.convert_checkpoint import main
from tools.conversions_table import (
    BEGIN,
    CONFIGS,
    END,
    PAGE,
    loaded_model,
    measure,
    random_model,
    rewritten,
    run_logits,
    some_tokens,
    their_logits,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours

CLOSE = 1e-4
"""Largest difference of two logits in fp32; they are of the order of 10."""


def run(*words: object) -> None:
    """Run the command."""
    main([str(word) for word in words])


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_the_same_in_both_directions(family: str, tmp_path: Path) -> None:
    """Those of our program, of the plain reference, and of the exported model."""
    found = measure(family, tmp_path)
    assert found.imported < CLOSE
    assert found.exported < CLOSE
    assert found.largest > 1000 * CLOSE
    where, tokens_bs = choose(tmp_path / "ours", None), some_tokens()
    wanted = their_logits(loaded_model(tmp_path / "theirs"), tokens_bs)
    assert (our_logits(where, tokens_bs) - wanted).abs().max() < CLOSE


def test_a_wrong_weight_is_measured(tmp_path: Path) -> None:
    """The difference is that of logits, not of nothing."""
    random_model("llama 2").save_pretrained(tmp_path / "theirs")
    run("import", tmp_path / "theirs", tmp_path / "ours")
    other = random_model("llama 2")
    with torch.no_grad():
        other.model.layers[3].mlp.down_proj.weight[5, 7] += 0.1
    ours = run_logits(choose(tmp_path / "ours", None), some_tokens())
    assert (ours - their_logits(other, some_tokens())).abs().max() > CLOSE


def test_the_page_has_a_row_for_every_family() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index(BEGIN) : text.index(END)]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == list(CONFIGS)
    for _, _, largest, imported, exported in rows[1:]:
        assert 0 <= float(exported) <= float(imported) < CLOSE < float(largest)
    lines = table.splitlines()[2:-1]
    assert rewritten(text, iter(lines)) == text


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


@pytest.mark.parametrize(
    ("bad", "words"),
    [(float("nan"), "1 NaN and 0 infinite"), (float("-inf"), "0 NaN and 1 infinite")],
)
def test_weights_that_are_not_finite_are_refused_by_name(
    bad: float, words: str, tmp_path: Path
) -> None:
    """Unless they are asked for; then they arrive as they are."""
    model = random_model("llama 2")
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight[5, 7] = bad
    model.save_pretrained(tmp_path / "theirs")
    arguments = ("import", tmp_path / "theirs", tmp_path / "ours")
    with pytest.raises(SystemExit, match=rf"layers\.3\.mlp\.down_proj\.weight has {words} of"):
        run(*arguments)
    with pytest.raises(SystemExit, match="no complete checkpoint"):
        run("export", tmp_path / "ours", tmp_path / "out")
    run(*arguments, "--allow-not-finite")
    found = weights(choose(tmp_path / "ours", None))["decoder.layers.3.mlp.linear_fc2.weight"]
    assert torch.equal(found[5, 7], torch.tensor(bad)) or found[5, 7].isnan()


def test_damage_that_an_export_meets_is_laid_to_the_checkpoint(tmp_path: Path) -> None:
    """It came after the checkpoint was compared with its manifest; the output is not to blame."""
    random_model("llama 2").save_pretrained(tmp_path / "theirs")
    run("import", tmp_path / "theirs", tmp_path / "ours")
    where = choose(tmp_path / "ours", None)
    plan = plan_export(where, lambda _: None)
    for file in where.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ForeignError, match=rf"^{where}: weight\.\S+ cannot be read") as told:
        plan.write(tmp_path / "out", 1 << 30)
    assert str(tmp_path / "out") not in str(told.value)
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []
