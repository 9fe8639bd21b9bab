"""For every family: flags made of a ``config.json`` make the model that the import makes."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the reference: pip install transformers")

import transformers
from planning.asked.test_model import REST

from megatron.checkpoint.foreign.families import FAMILIES
from megatron.checkpoint.foreign.hugging_face import open_model
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.planning.asked.model import model_of
from megatron.run.command_line import parse
from tools.conversions_table import CONFIGS, random_model

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours


@pytest.mark.parametrize("family", CONFIGS)
def test_the_flags_make_the_model_that_the_import_makes(family: str, tmp_path: Path) -> None:
    """Both parse the file by the same reader; the flags in between are what is tested."""
    random_model(family).save_pretrained(tmp_path)
    words = model_of(tmp_path).words
    assert parse([*words, *REST], 1).model == open_model(tmp_path).model


def test_all_families_are_among_them() -> None:
    """So a new family is tested here too; transformers knows Kimi K2 as DeepSeek-V3 alone."""
    kinds = {getattr(transformers, kind)(**values).model_type for kind, values in CONFIGS.values()}
    assert kinds | {"kimi_k2"} == {family.model_type for family in FAMILIES.values()}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama 2", {"hidden_act": "relu"}),
        ("qwen 2", {"layer_types": ["linear_attention"] * 4}),
        ("deepseek v2", {"n_group": 5}),
        ("mixtral", {"num_experts_per_tok": 9}),
        ("gemma 3", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
    ],
)
def test_a_field_that_the_import_refuses_is_refused_in_its_words(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    random_model(family).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    with pytest.raises(ForeignError) as imported:
        open_model(tmp_path)
    with pytest.raises(ForeignError) as planned:
        model_of(tmp_path)
    assert str(planned.value).startswith(str(imported.value))
