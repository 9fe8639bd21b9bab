"""From a ``config.json`` to the flags of the same model.

The published numbers of parameters are those of the models' cards and reports.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.foreign.layouts import ForeignError, tensor_shapes
from megatron.model.settings import ModelSettings
from megatron.planning.asked.model import model_of
from megatron.run.command_line import parse

REST = ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--bf16", "--dry-run"]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
LLAMA_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def written(fields: object, folder: Path) -> Path:
    """Write a ``config.json`` and return its folder."""
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def by_flags(*words: str) -> ModelSettings:
    """The model of a command line."""
    return parse([*words, *REST], 1).model


@pytest.mark.parametrize(
    ("fields", "billions"),
    [(LLAMA_8B, 8.03), (LLAMA_70B, 70.55), (QWEN3_30B_A3B, 30.53), (GPT_OSS_20B, 20.91)],
    ids=["8B", "70B", "30B-A3B", "gpt-oss-20b"],
)
def test_a_model_has_its_published_number_of_parameters(
    fields: dict[str, Any], billions: float, tmp_path: Path
) -> None:
    asked = model_of(written(fields, tmp_path), 4096)
    made = by_flags(*asked.words)
    assert made == asked.model
    shapes = tensor_shapes(made)
    assert sum(map(prod, shapes.values())) == pytest.approx(billions * 1e9, rel=1e-3)
    assert made.seq_length == 4096


def test_a_config_of_quantised_weights_is_planned_with_a_note(tmp_path: Path) -> None:
    """As DeepSeek publishes it: 671B, and 11.5B of a layer of multi-token prediction besides."""
    asked = model_of(written(DEEPSEEK_V3, tmp_path), 4096)
    made = by_flags(*asked.words)
    assert made == asked.model
    sizes = {name: prod(shape) for name, shape in tensor_shapes(made).items()}
    further = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    assert sum(sizes.values()) - further == pytest.approx(671.0e9, rel=1e-3)
    assert further == pytest.approx(11.5e9, rel=0.01)
    assert len(asked.notes) == 1
    assert "quantised" in asked.notes[0]


def test_a_file_of_any_name_is_read_as_its_folder_is(tmp_path: Path) -> None:
    folder = written(LLAMA_8B, tmp_path)
    other = tmp_path / "llama-8b.json"
    other.write_bytes((folder / "config.json").read_bytes())
    assert model_of(other).words == model_of(folder).words


def test_flags_of_the_command_line_stand_in_place_of_the_files(tmp_path: Path) -> None:
    asked = model_of(written(LLAMA_8B, tmp_path), 4096)
    words = asked.words_without({"--vocab-size", "--num-layers"})
    made = by_flags(*words, "--vocab-size", "256000", "--num-layers", "7")
    assert (made.vocab_size, made.num_layers) == (256000, 7)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_type": "nobody_knows"}, r"model_type 'nobody_knows' is none of gpt2, .*--num-lay"),
        ({"architectures": ["X"]}, r"has no model_type: .*--num-layers N"),
        ([1], "does not hold the fields of a model"),
        (LLAMA_8B | {"hidden_act": "relu2"}, 'hidden_act is "relu2", and this program has only'),
        (LLAMA_8B | {"num_attention_heads": 0}, "num_attention_heads is 0, .*whole number"),
        (
            {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
            "save the llama4_text part alone",
        ),
    ],
)
def test_other_files_are_refused_by_name(fields: object, told: str, tmp_path: Path) -> None:
    with pytest.raises(ForeignError, match=told):
        model_of(written(fields, tmp_path))


def test_a_missing_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ForeignError, match=r"no such file or folder.*config\.json.*--num-layers"):
        model_of(Path("meta-llama/Meta-Llama-3-8B"))
    with pytest.raises(ForeignError, match=r"has no config\.json"):
        model_of(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ForeignError, match="cannot be read"):
        model_of(tmp_path)
