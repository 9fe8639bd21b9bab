"""Properties of single families that the tests of all families do not show."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch

pytest.importorskip("transformers", reason="the reference: pip install transformers")

from checkpoint.foreign.changed_fields import Change, Comparison, config_of
from checkpoint.foreign.known_models import weights
from safetensors.torch import load_file, save_file

from megatron.checkpoint.choose import choose, read_model
from megatron.checkpoint.foreign.families import FAMILIES, family_for, family_of
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.commands.convert_checkpoint import main
from megatron.model.settings import ModelSettings
from tools.conversions_table import random_model, run_logits, some_tokens, their_logits

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours


_STARCODER2_3B: Final = 999999.4420358813
"""RoPE theta of the published StarCoder2-3b."""


def imported(family: str, folder: Path, *words: str) -> Path:
    """Import a random model; return the folder of the checkpoint."""
    random_model(family).save_pretrained(folder / "theirs")
    main(["import", str(folder / "theirs"), str(folder / "ours"), *words])
    return choose(folder / "ours", None)


def test_kimi_k2_is_a_model_of_deepseek_v3(tmp_path: Path) -> None:
    """Under the name of its ``config.json``, which an export with --like keeps."""
    theirs = random_model("deepseek v3")
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "kimi_k2"}))
    main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--seq-length", "20"])
    where = choose(tmp_path / "ours", None)
    wanted = their_logits(theirs, some_tokens())
    assert (run_logits(where, some_tokens()) - wanted).abs().max() < 1e-4
    words = ("--like", str(tmp_path / "theirs"))
    main(["export", str(tmp_path / "ours"), str(tmp_path / "again"), *words])
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("kimi_k2", ["DeepseekV3ForCausalLM"])
    assert family_for(read_model(where)).name == "deepseek_v3", "the name that transformers knows"


def test_the_two_first_rows_of_opts_positions_survive(tmp_path: Path) -> None:
    """No position reads them, and an export writes them where they were."""
    where = imported("opt", tmp_path)
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    name = "model.decoder.embed_positions.weight"
    table = weights(where)["embedding.position_embeddings.weight"]
    assert torch.equal(table[:64], theirs[name][2:])
    assert torch.equal(table[64:], theirs[name][:2])
    main(["export", str(tmp_path / "ours"), str(tmp_path / "again")])
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert torch.equal(again[name], theirs[name])


def test_opt_has_no_positions_for_longer_samples(tmp_path: Path) -> None:
    assert read_model(imported("opt", tmp_path)).seq_length == 64
    config = Fields(config_of("opt"), "config.json")
    with pytest.raises(ForeignError, match="max_position_embeddings 64 is less than"):
        family_of(config).model_of(config, 65)
    trained = family_of(config).model_of(config, 20).replaced(seq_length=66)
    with pytest.raises(ForeignError, match="opt has no such model"):
        FAMILIES["opt"].config_of(trained)


def test_longrope_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported("phi 4 mini, longrope", tmp_path, "--seq-length", "20")
    assert "scales RoPE by longrope. Here --seq-length decides" in capsys.readouterr().err


def test_the_depth_of_glm_4_5_is_imported_and_exported(tmp_path: Path) -> None:
    """Its files have DeepSeek-V3's names; transformers reads past them."""
    theirs, tokens = random_model("glm 4.5"), some_tokens()
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.startswith("model.layers.3.")]:
        tensors[name.replace("layers.3", "layers.4")] = tensors[name] + 0.01
    more = {"enorm": (32,), "hnorm": (32,), "eh_proj": (32, 64), "shared_head.norm": (32,)}
    for name, shape in more.items():
        tensors[f"model.layers.4.{name}.weight"] = torch.rand(shape)
    tensors["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.4.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    config = tmp_path / "theirs" / "config.json"
    values = json.loads(config.read_text())
    values.pop("num_mtp_layers", None)
    config.write_text(json.dumps(values | {"num_nextn_predict_layers": 1}))
    main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--seq-length", "20"])
    where = choose(tmp_path / "ours", None)
    assert read_model(where).further.mtp_num_layers == 1
    assert (run_logits(where, tokens) - their_logits(theirs, tokens)).abs().max() < 1e-4
    main(["export", str(tmp_path / "ours"), str(tmp_path / "again")])
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], own) for name, own in tensors.items())


def test_a_quarter_of_gpt_neoxs_heads_turns_where_a_file_tells_nothing() -> None:
    values = {name: own for name, own in config_of("gpt-neox").items() if "rope" not in name}
    config = Fields(values, "config.json")
    assert family_of(config).model_of(config, 20).positions.rotary_percent == 0.25


@pytest.mark.parametrize("length", [16, 17])
def test_samples_on_both_sides_of_longropes_length(length: int, tmp_path: Path) -> None:
    """16 tokens take the divisors of short samples, 17 tokens those of long ones."""
    where = imported("phi 4 mini, longrope", tmp_path, "--seq-length", str(length))
    tokens = some_tokens(length)
    wanted = their_logits(random_model("phi 4 mini, longrope"), tokens)
    assert (run_logits(where, tokens) - wanted).abs().max() < 1e-4


_ALPHA: Final = {"rope_type": "dynamic", "alpha": 2.5, "factor": 1.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("family", "path", "value", "thetas"),
    [
        ("starcoder 2", ("rope_parameters", "rope_theta"), _STARCODER2_3B, (_STARCODER2_3B, None)),
        ("hunyuan", ("rope_parameters",), _ALPHA, (10000.0 * 2.5 ** (16 / 14), None)),
        (
            "gemma 3",
            ("rope_parameters", "sliding_attention", "rope_theta"),
            10000.5,
            (1000000.0, 10000.5),
        ),
    ],
)
def test_thetas_that_are_not_whole(
    family: str,
    path: tuple[str, ...],
    value: Any,
    thetas: tuple[float, float | None],
    tmp_path: Path,
) -> None:
    """Their logits are those of ``transformers``, imported and exported again."""
    change = Change(path, value)
    config = Fields(change.of(config_of(family)), "config.json")
    positions = family_of(config).model_of(config, 20).positions
    assert (positions.rotary_base, positions.rotary_base_local) == thetas
    assert Comparison(family).fault_of(change, tmp_path) is None


@pytest.mark.parametrize("alpha", [1e-9, 1e9, 1e300])
def test_an_alpha_that_makes_no_theta(alpha: float) -> None:
    values = config_of("hunyuan") | {"rope_parameters": _ALPHA | {"alpha": alpha}}
    config = Fields(values, "config.json")
    with pytest.raises(ForeignError, match=r"rope_parameters: alpha is .*, which is not one that"):
        family_of(config).model_of(config, 20)


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is false"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim is 16, .* hidden_size 32"),
        ("falcon 7b", {"alibi": True}, "alibi is true"),
        ("gpt-neox", {"rope_theta": 500.0}, "rope_theta is 500.0"),
        ("gpt-neox", {"attention_bias": False}, "attention_bias is false"),
        ("granite", {"mlp_bias": True}, "mlp_bias is true and attention_bias is false"),
        ("starcoder 2", {"embedding_dropout": 0.5}, "embedding_dropout is 0.5, .*residual_dropout"),
        ("glm 4.5", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("dots.llm1", {"norm_topk_prob": None}, "norm_topk_prob is null"),
        ("nemotron", {"partial_rotary_factor": 0.45}, "partial_rotary_factor"),
        (
            "bloom",
            {"model_type": "ernie4_5_moe"},
            "adds a bias to the softmax by which",
        ),
    ],
)
def test_refused_by_name(family: str, fields: dict[str, Any], words: str) -> None:
    values = {name: own for name, own in config_of(family).items() if name != "rope_parameters"}
    config = Fields(values | fields, "config.json")
    with pytest.raises(ForeignError, match=words):
        family_of(config).model_of(config, 20)


def test_a_model_of_the_maximal_update_parametrisation_is_written_by_its_factors() -> None:
    """Granite has a factor of the logits and one of the scores; Llama has neither."""
    model = ModelSettings.of(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        seq_length=16,
        vocab_size=64,
        normalization="RMSNorm",
        activation="swiglu",
        position_embedding_type="rope",
        add_bias_linear=False,
        use_mup=True,
        mup_base_hidden_size=16,
        mup_base_head_dim=4.0,
    )
    written = FAMILIES["granite"].config_of(model)
    assert (written["logits_scaling"], written["attention_multiplier"]) == (4.0, 2 / 16)
    with pytest.raises(ForeignError, match=r"softmax_scale|logit_multiplier"):
        FAMILIES["llama"].config_of(model)
