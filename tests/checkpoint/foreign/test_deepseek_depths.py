"""DeepSeek-V3's layers of multi-token prediction come from Hugging Face's form and go back to it.

``transformers`` reads them too (``MtpModel``) and is the reference of what they predict.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the reference: pip install transformers")

from checkpoint.foreign.known_models import weights
from correctness.rank_runs import train_on_rank
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from megatron.checkpoint.boxed import StreamedTensor
from megatron.checkpoint.choose import choose, read_model
from megatron.checkpoint.foreign.layouts import tensor_shapes
from megatron.checkpoint.foreign.weights import write_weights
from megatron.checkpoint.settings import CheckpointSettings
from megatron.commands.convert_checkpoint import main
from tools.conversions_table import (
    VOCABULARY,
    loaded_model,
    random_model,
    run_logits,
    some_tokens,
    their_logits,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours

DEPTHS, LAYERS = 2, 4
CLOSE = 1e-4
JOB = Job(
    GPTOptions(num_layers=LAYERS, vocab_size=VOCABULARY),
    2,
    microbatches=2,
    iterations=1,
    sequence=12,
)


def run(*words: object) -> None:
    main([str(word) for word in words])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``ours``, a random model with two depths, and ``theirs``, its export."""
    root = tmp_path_factory.mktemp("depths")
    random_model("deepseek v3").save_pretrained(root / "main")
    run("import", root / "main", root / "main_ours", "--seq-length", 20)
    main_model = choose(root / "main_ours", None)
    model = read_model(main_model).replaced(mtp_num_layers=DEPTHS)
    known, generator = weights(main_model), torch.Generator().manual_seed(5)
    streamed = {}
    for name, shape in tensor_shapes(model).items():
        if name not in known:
            known[name] = torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5
        streamed[f"weight.{name}"] = StreamedTensor(
            shape, torch.float32, partial(known[name].clone)
        )
    write_weights(root / "ours", model, streamed)
    run("export", root / "ours", root / "theirs")
    return root


def tensors_of(folder: Path) -> dict[str, Tensor]:
    [file] = folder.glob("*.safetensors")
    found: dict[str, Tensor] = load_file(file)
    return found


def changed(source: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    """A folder with the ``config.json`` of another one, and other tensors."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, target / "model.safetensors")
    return target


def test_the_names_are_those_of_the_published_model(exported: Path) -> None:
    found = tensors_of(exported / "theirs")
    for depth in (LAYERS, LAYERS + 1):
        prefix = f"model.layers.{depth}."
        own = {name.removeprefix(prefix) for name in found if name.startswith(prefix)}
        assert {
            "embed_tokens.weight",
            "enorm.weight",
            "hnorm.weight",
            "eh_proj.weight",
            "shared_head.norm.weight",
            "shared_head.head.weight",
            "self_attn.kv_b_proj.weight",
            "mlp.gate.e_score_correction_bias",
            "mlp.experts.7.down_proj.weight",
        } <= own
        assert found[f"{prefix}embed_tokens.weight"].equal(found["model.embed_tokens.weight"])
        assert found[f"{prefix}shared_head.head.weight"].equal(found["lm_head.weight"])
    config = json.loads((exported / "theirs" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == DEPTHS
    assert config["num_hidden_layers"] == LAYERS


def test_the_main_model_is_the_same_in_both_programs(exported: Path) -> None:
    tokens_bs = some_tokens()
    ours = run_logits(choose(exported / "ours", None), tokens_bs)
    theirs = their_logits(loaded_model(exported / "theirs"), tokens_bs)
    assert (ours - theirs).abs().max() < CLOSE


def test_depths_have_the_losses_that_transformers_gives_them(
    exported: Path, ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pattern of names knows layer 61 alone, the published one."""
    monkeypatch.setattr(
        modeling_deepseek_v3.DeepseekV3PreTrainedModel,
        "_keys_to_ignore_on_load_unexpected",
        [r"model\.layers\.[45].*"],
    )
    main_model = loaded_model(exported / "theirs")
    depths = MtpModel.from_pretrained(main_model, attn_implementation="eager").eval()
    batch = JOB.batches()[0]
    tokens = sum(float(own.loss_mask.sum()) for own in batch)
    wanted = torch.zeros(DEPTHS, dtype=torch.float64)
    for own in batch:
        share = float(own.loss_mask.sum()) / tokens
        wanted += share * their_depth_losses(main_model, depths, own)

    model = replace(read_model(choose(exported / "ours", None)), seq_length=JOB.sequence)
    layout = Layout(2, "vocab-2")
    config = replace(
        JOB.config(layout),
        model=model,
        checkpoint=CheckpointSettings(load=exported / "ours", finetune=True),
    )
    runs = ranks.run(train_on_rank, layout.world_size, config=config, batches=[batch])
    assert runs[0].depth_losses[0] == pytest.approx(wanted.tolist(), rel=1e-5)


@torch.no_grad()
def their_depth_losses(main_model: Any, depths: Any, microbatch: Any) -> Tensor:
    """The mean loss of every depth over the positions whose label counts, float64 [D]."""
    tokens_bs, losses = microbatch.tokens, []
    hidden_bsh = main_model.model(tokens_bs).last_hidden_state
    for depth in range(1, DEPTHS + 1):
        length = tokens_bs.shape[1] - depth
        hidden_bsh = depths.forward_layer(
            depth - 1,
            hidden_bsh[:, :length],
            torch.arange(length)[None],
            None,
            input_ids=tokens_bs[:, depth:],
        )
        logits_bsv = main_model.lm_head(hidden_bsh)
        mask_bs = microbatch.loss_mask[:, depth:]
        losses_bs = torch.nn.functional.cross_entropy(
            logits_bsv.transpose(1, 2), microbatch.labels[:, depth:], reduction="none"
        )
        losses.append((losses_bs * mask_bs).sum() / mask_bs.sum())
    return torch.stack(losses).double()


def test_what_was_exported_is_imported_to_the_last_bit(exported: Path, tmp_path: Path) -> None:
    run("import", exported / "theirs", tmp_path / "again", "--seq-length", 20)
    one, other = choose(exported / "ours", None), choose(tmp_path / "again", None)
    assert read_model(one) == read_model(other)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(own, second[name]) for name, own in first.items())


def test_copies_may_be_lacking_but_not_differ(exported: Path, tmp_path: Path) -> None:
    found = tensors_of(exported / "theirs")
    copies = [name for name in found if "head.head" in name or ".embed_tokens" in name[12:]]
    assert len(copies) == 2 * DEPTHS
    lacking = {name: own for name, own in found.items() if name not in copies}
    run("import", changed(exported / "theirs", tmp_path / "few", lacking), tmp_path / "ours")
    assert read_model(choose(tmp_path / "ours", None)).further.mtp_num_layers == DEPTHS
    for name in copies:
        found[name] = found[name].clone()
    found[copies[0]][3, 4] += 1
    folder = changed(exported / "theirs", tmp_path / "differs", found)
    with pytest.raises(SystemExit, match=r"model\.layers\.\*\..* differs from .*one matrix for"):
        run("import", folder, tmp_path / "refused")


def test_files_of_the_main_model_alone_make_the_main_model(exported: Path, tmp_path: Path) -> None:
    """``transformers`` saves no depth, and leaves their number in ``config.json``."""
    found = tensors_of(exported / "theirs")
    alone = {
        name: own
        for name, own in found.items()
        if not name.startswith(tuple(f"model.layers.{LAYERS + d}." for d in range(DEPTHS)))
    }
    run("import", changed(exported / "theirs", tmp_path / "alone", alone), tmp_path / "ours")
    assert read_model(choose(tmp_path / "ours", None)).further.mtp_num_layers == 0
    lacking = {name: own for name, own in found.items() if not name.endswith("1.eh_proj.weight")}
    del lacking[f"model.layers.{LAYERS}.eh_proj.weight"]
    folder = changed(exported / "theirs", tmp_path / "lacking", lacking)
    with pytest.raises(SystemExit, match=r"has no tensor model\.layers\.4\.eh_proj"):
        run("import", folder, tmp_path / "refused")
