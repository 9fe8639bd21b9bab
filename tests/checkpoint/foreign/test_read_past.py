"""No tensor of an imported folder is lost: it is compared, or refused by name.

The reference is what ``transformers`` loads from the same folder.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the reference: pip install transformers")

import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.choose import choose, read_model
from megatron.commands.convert_checkpoint import main
from tools.conversions_table import (
    CONFIGS,
    loaded_model,
    random_model_of,
    run_logits,
    some_tokens,
    their_logits,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours

CLOSE = 1e-4
HEADS = {
    "llama 2": ("model.embed_tokens.weight", "lm_head.weight"),
    "qwen 3": ("model.embed_tokens.weight", "lm_head.weight"),
    "gemma": ("model.embed_tokens.weight", "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
}


def run(*words: object) -> None:
    main([str(word) for word in words])


def saved(family: str, folder: Path, **fields: Any) -> Path:
    """Write a random model of a family with other fields."""
    kind, values = CONFIGS[family]
    random_model_of(getattr(transformers, kind)(**(values | fields))).save_pretrained(folder)
    return folder


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], object], **fields: Any) -> None:
    """Change the tensors of a folder with one file, and fields of its ``config.json``."""
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file({name: own.contiguous() for name, own in tensors.items()}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def logits(folder: Path) -> Tensor:
    return run_logits(choose(folder, None), some_tokens())


@pytest.mark.parametrize("family", HEADS)
def test_an_output_matrix_beside_a_tied_embedding_is_imported(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(family, tmp_path / "theirs", tie_word_embeddings=False)
    rewritten(folder, lambda tensors: None, tie_word_embeddings=True)
    wanted = their_logits(loaded_model(folder), some_tokens())
    run("import", folder, tmp_path / "ours", "--seq-length", 20)
    embedding, head = HEADS[family]
    assert f"note: {head} differs from {embedding}" in capsys.readouterr().err
    assert not read_model(choose(tmp_path / "ours", None)).vocabulary.tie_embeddings
    assert (logits(tmp_path / "ours") - wanted).abs().max() < CLOSE
    run("export", tmp_path / "ours", tmp_path / "again")
    assert not json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"]
    again = their_logits(loaded_model(tmp_path / "again"), some_tokens())
    assert (again - wanted).abs().max() < CLOSE


@pytest.mark.parametrize("family", HEADS)
def test_a_copy_of_the_embedding_is_tied(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(family, tmp_path / "theirs", tie_word_embeddings=True)
    embedding, head = HEADS[family]
    rewritten(folder, lambda tensors: tensors.update({head: tensors[embedding].clone()}))
    run("import", folder, tmp_path / "ours", "--seq-length", 20)
    assert "note" not in capsys.readouterr().err
    assert read_model(choose(tmp_path / "ours", None)).vocabulary.tie_embeddings
    wanted = their_logits(loaded_model(folder), some_tokens())
    assert (logits(tmp_path / "ours") - wanted).abs().max() < CLOSE


def refused(folder: Path, target: Path) -> str:
    with pytest.raises(SystemExit) as ended:
        run("import", folder, target)
    told = str(ended.value.code)
    assert told.startswith("error: ")
    assert len(told.splitlines()) == 1
    return told


def test_rope_frequencies_are_those_of_the_config(tmp_path: Path) -> None:
    """Older files hold them, rounded to 16 bits; ``transformers`` computes them anew."""
    folder = saved("llama 2", tmp_path / "theirs")
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    right = 1 / 10000 ** (torch.arange(0, 8, 2) / 8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rewritten(folder, lambda t, d=dtype: t.update({name.format(1): right.to(d)}))  # type: ignore[misc]
        run("import", folder, tmp_path / str(dtype), "--seq-length", 20)
    other = 1 / 500000 ** (torch.arange(0, 8, 2) / 8)
    rewritten(folder, lambda tensors: tensors.update({name.format(1): other}))
    assert re.search(
        r"layers\.1\.self_attn\.rotary_emb\.inv_freq .* differs: mend config.json \(such as rope_t",
        refused(folder, tmp_path / "refused"),
    )


def test_masks_of_gpt2_are_causal(tmp_path: Path) -> None:
    folder = saved("gpt2", tmp_path / "theirs")
    tables = {
        "transformer.h.1.attn.bias": torch.ones(1, 1, 64, 64).tril(),
        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    rewritten(folder, lambda tensors: tensors.update(tables))
    wanted = their_logits(loaded_model(folder), some_tokens())
    run("import", folder, tmp_path / "ours", "--seq-length", 20)
    assert (logits(tmp_path / "ours") - wanted).abs().max() < CLOSE
    for name, other in zip(tables, (torch.ones(1, 1, 64, 64), torch.tensor(0.0)), strict=True):
        rewritten(folder, lambda t, n=name, o=other: t.update(tables | {n: o}))  # type: ignore[misc]
        assert f"{name} is a table" in refused(folder, tmp_path / "refused")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_score_of_hidden_positions_may_be_rounded(dtype: torch.dtype, tmp_path: Path) -> None:
    """bf16 has 8 bits, so it rounds -10000 to a multiple of 64: -9984."""
    folder = saved("gpt2", tmp_path / "theirs")
    name, score = "transformer.h.1.attn.masked_bias", torch.tensor(-1e4).to(dtype)
    assert score == (-9984 if dtype == torch.bfloat16 else -10000)
    rewritten(folder, lambda tensors: tensors.update({name: score}))
    run("import", folder, tmp_path / "ours", "--seq-length", 20)
    rewritten(folder, lambda tensors: tensors.update({name: score / 2}))
    assert f"{name} is a table" in refused(folder, tmp_path / "refused")


def test_copies_of_multi_token_prediction_are_compared_with_a_tied_embedding(
    tmp_path: Path,
) -> None:
    folder = saved("deepseek v3", tmp_path / "theirs", tie_word_embeddings=True)
    copy = "model.layers.4.shared_head.head.weight"
    depth = {"enorm": (32,), "hnorm": (32,), "eh_proj": (32, 64), "shared_head.norm": (32,)}

    def add(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            tensors[name.replace("layers.3", "layers.4")] = tensors[name].clone()
        for name, shape in depth.items():
            tensors[f"model.layers.4.{name}.weight"] = torch.ones(shape)
        tensors[copy] = tensors["model.embed_tokens.weight"].clone()

    rewritten(folder, add, num_nextn_predict_layers=1)
    run("import", folder, tmp_path / "ours", "--seq-length", 20)
    found = read_model(choose(tmp_path / "ours", None))
    assert (found.further.mtp_num_layers, found.vocabulary.tie_embeddings) == (1, True)
    rewritten(folder, lambda tensors: tensors[copy].add_(1))
    told = refused(folder, tmp_path / "refused")
    assert f"{copy} differs from model.embed_tokens.weight, to which tie_word_emb" in told


def test_lacking_depths_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved("deepseek v3", tmp_path / "theirs")
    rewritten(folder, lambda tensors: None, num_nextn_predict_layers=1)
    run("import", folder, tmp_path / "ours", "--seq-length", 20)
    assert "1 layers of multi-token prediction (num_nextn_pred" in capsys.readouterr().err


def test_files_beside_the_model_are_told(tmp_path: Path) -> None:
    """A name in two files, or a whole model beside the index of another one."""
    folder = tmp_path / "theirs"
    kind, values = CONFIGS["llama 2"]
    model = random_model_of(getattr(transformers, kind)(**values))
    model.save_pretrained(folder, max_shard_size="30KB")
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    tensors, others = load_file(first), load_file(second)
    name = min(others)
    save_file(tensors | {name: others[name] + 1}, first, {"format": "pt"})
    assert f"both have a tensor {name}" in refused(folder, tmp_path / "refused")
    save_file(tensors, first, {"format": "pt"})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "has model.safetensors and an index of other" in refused(folder, tmp_path / "refused")
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter_config.json" in refused(folder, tmp_path / "refused")
    (folder / "adapter_config.json").unlink()
    run("import", folder, tmp_path / "ours", "--seq-length", 20)
