"""The recipe of a public model has the shape that its config.json on Hugging Face has."""

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from megatron.run.flag_files import RECIPES, recipe_names

PUBLIC: Final[Mapping[str, Mapping[str, Any]]] = json.loads(
    (Path(__file__).parent / "public_shapes.json").read_text()
)
"""For each shape its repository on Hugging Face, and fields of the config.json there."""


def flags_of(name: str) -> dict[str, str]:
    """The flags of a file with their values, read as plain words."""
    words = shlex.split((RECIPES / f"{name}.flags").read_text(), comments=True)
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            option = word
            found[option] = ""
        else:
            found[option] = f"{found[option]} {word}".strip()
    return found


def first_layers(flags: Mapping[str, str]) -> int:
    """The layers at the beginning without experts, by a pattern such as '[0]*3+[1]*58'."""
    pattern = flags.get("--moe-layer-freq")
    if pattern is None:
        return 0
    dense, experts = (part.partition("*") for part in pattern.split("+"))
    assert (dense[0], experts[0]) == ("[0]", "[1]")
    assert int(dense[2]) + int(experts[2]) == int(flags["--num-layers"])
    return int(dense[2])


def number(option: str, otherwise: float | None = None) -> Callable[[Mapping[str, str]], Any]:
    """Reads the number of a flag, with Megatron-LM's default if the file lacks it."""
    return lambda flags: float(flags[option]) if option in flags else otherwise


def activation(flags: Mapping[str, str]) -> str:
    gates = {"--swiglu": "silu", "--geglu": "gelu_pytorch_tanh", "--quick-geglu": "silu"}
    (own,) = (word for option, word in gates.items() if option in flags)
    return own


FIELDS: Final[Mapping[str, Callable[[Mapping[str, str]], Any]]] = {
    "hidden_size": number("--hidden-size"),
    "num_hidden_layers": number("--num-layers"),
    "num_attention_heads": number("--num-attention-heads"),
    "num_key_value_heads": lambda flags: float(
        flags.get("--num-query-groups", flags["--num-attention-heads"])
    ),
    "head_dim": number("--kv-channels"),
    "intermediate_size": number("--ffn-hidden-size"),
    "vocab_size": number("--vocab-size"),
    "max_position_embeddings": number("--max-position-embeddings"),
    "rope_theta": number("--rotary-base", 10_000),
    "rms_norm_eps": number("--norm-epsilon", 1e-5),
    "hidden_act": activation,
    "tie_word_embeddings": lambda flags: "--untie-embeddings-and-output-weights" not in flags,
    "attention_bias": lambda flags: "--disable-bias-linear" not in flags,
    "query_bias": lambda flags: "--add-qkv-bias" in flags or "--disable-bias-linear" not in flags,
    "query_norm": lambda flags: "--qk-layernorm" in flags,
    "rope_type": lambda flags: (
        "llama3" if "--use-rope-scaling" in flags else flags.get("--rope-type")
    ),
    "rope_factor": number("--rotary-scaling-factor"),
    "num_experts": number("--num-experts"),
    "num_experts_per_tok": number("--moe-router-topk"),
    "moe_intermediate_size": number("--moe-ffn-hidden-size"),
    "sliding_window": lambda flags: int(flags["--window-size"].split(",")[0]) + 1,
    "swiglu_limit": number("--activation-func-clamp-value"),
    "attn_logit_softcapping": number("--attn-logit-softcapping"),
    "final_logit_softcapping": number("--logit-softcap"),
    "q_lora_rank": number("--q-lora-rank"),
    "kv_lora_rank": number("--kv-lora-rank"),
    "qk_nope_head_dim": number("--qk-head-dim", 128),
    "qk_rope_head_dim": number("--qk-pos-emb-head-dim", 64),
    "v_head_dim": number("--v-head-dim", 128),
    "first_k_dense_replace": first_layers,
    "shared_width": number("--moe-shared-expert-intermediate-size"),
    "n_group": number("--moe-router-num-groups"),
    "topk_group": number("--moe-router-group-topk"),
    "routed_scaling_factor": number("--moe-router-topk-scaling-factor"),
    "scoring_func": lambda flags: flags.get("--moe-router-score-function"),
    "num_nextn_predict_layers": number("--mtp-num-layers"),
}
"""For each public field, its value by the flags of a recipe.

Fields with names of their own: ``query_bias`` and ``query_norm`` are the biases and norms of
queries and keys that the model's code has; ``shared_width`` is n_shared_experts x
moe_intermediate_size; ``rope_type`` and ``rope_factor`` stand in rope_scaling; ``num_experts`` is
n_routed_experts or num_local_experts in some families.
"""


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, own in PUBLIC.items() for field in own["fields"]]
)
def test_a_field_of_a_recipe_is_the_public_one(name: str, field: str) -> None:
    assert FIELDS[field](flags_of(name)) == PUBLIC[name]["fields"][field]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_recipe_names_the_model_that_the_table_has(name: str) -> None:
    text = (RECIPES / f"{name}.flags").read_text()
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert f"({PUBLIC[name]['repository']} on Hugging Face)" in comment


def test_every_shape_of_a_public_model_is_in_the_table() -> None:
    texts = {name: (RECIPES / f"{name}.flags").read_text() for name in recipe_names()}
    shapes = {name for name, text in texts.items() if "the shape of its" in text}
    assert shapes == PUBLIC.keys()
    others = texts.keys() - shapes
    used = {line[1:-6] for name in others for line in texts[name].splitlines() if line[:1] == "@"}
    assert used == shapes, "every shape has a layout, and every other recipe takes a shape"
