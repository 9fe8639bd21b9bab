"""What of GPT-OSS's files is peculiar: quantised experts, and defaults of fields."""

import json
from pathlib import Path

import pytest

from megatron.checkpoint.foreign.families import family_of
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.gpt_oss import GPT_OSS
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.model.settings import ModelSettings

SMALL = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "vocab_size": 99,
    "max_position_embeddings": 256,
}


def model(**fields: object) -> ModelSettings:
    return GPT_OSS.model_of(Fields(SMALL | fields, "config.json"))


def test_files_in_mxfp4_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ForeignError, match=r"MXFP4.*dequantize=True.*save_pretrained") as told:
        family_of(Fields.read(path))
    assert str(path) in str(told.value)


def test_fields_that_are_left_out_are_those_of_the_published_models() -> None:
    found = model()
    assert [found.window_of(layer) for layer in range(4)] == [127, None, 127, None]
    assert (
        found.rope_scaling.rope_type,
        found.positions.rotary_base,
        found.rope_scaling.rotary_scaling_factor,
    ) == ("yarn", 150000, 32)
    assert found.rope_scaling.yarn_exact_range
    assert (
        found.experts.num_experts,
        found.experts.moe_router_topk,
        found.attention.num_query_groups,
    ) == (128, 4, 8)
    assert (found.mlp.activation_func_clamp_value, found.mlp.glu_linear_offset) == (7.0, 1.0)


@pytest.mark.parametrize(
    ("field", "value"), [("swiglu_alpha", 1.5), ("attention_bias", False), ("hidden_act", "gelu")]
)
def test_other_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ForeignError, match=field):
        model(**{field: value})
