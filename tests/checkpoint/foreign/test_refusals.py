"""Models that this program and ``transformers`` would compute differently are refused by name."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the reference: pip install transformers")

from checkpoint.foreign.changed_fields import config_of

from megatron.checkpoint.foreign.families import family_of
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.commands.convert_checkpoint import main
from tools.conversions_table import random_model

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        # 16 experts in 8 groups, of which one is chosen: 2 experts, and transformers fills the
        # places of the other two with weights of 0.
        (
            "deepseek v2",
            {"n_group": 8, "topk_group": 1, "num_experts_per_tok": 4},
            "num_experts_per_tok 4 cannot come from topk_group 1 groups of 2 experts",
        ),
        (
            "deepseek v2",
            {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok 3 cannot come from topk_group 2 groups of 4 experts",
        ),
        ("deepseek v2", {"n_group": 5}, "n_group is 5, .* divisor of n_routed_experts 16"),
        ("deepseek v3", {"n_group": 5}, "n_group is 5, .* divisor of n_routed_experts 8"),
        ("deepseek v3", {"n_group": 8}, "n_group is 8, .* with groups of 2 or more"),
        ("deepseek v3", {"topk_group": 5}, "topk_group is 5, which is not at most n_group 4"),
        ("qwen 2 moe", {"num_experts": 1}, "num_experts is 1, which is not more than 1"),
        ("gemma 3", {"attn_logit_softcapping": 2.0}, "attn_logit_softcapping is 2.0"),
        ("gemma 2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0"),
        ("llama 2", {"attention_dropout": 1.0}, "attention_dropout is 1.0"),
        ("llama 2", {"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ("gpt2", {"n_positions": 19}, "n_positions 19 is less than --seq-length 20"),
        ("deepseek v3", {"norm_topk_prob": None}, "norm_topk_prob is null"),
    ],
)
def test_refused_by_name(family: str, fields: dict[str, Any], words: str) -> None:
    config = Fields(config_of(family) | fields, "config.json")
    with pytest.raises(ForeignError, match=words):
        family_of(config).model_of(config, 20)


def test_rope_has_positions_for_longer_samples() -> None:
    """``max_position_embeddings`` limits no rotation; older checkpoints have less than a sample."""
    family = family_of(Fields(config_of("llama 2"), "config.json"))
    fields = Fields(config_of("llama 2") | {"max_position_embeddings": 16}, "config.json")
    model = family.model_of(fields, 20)
    assert (model.seq_length, model.positions.max_position_embeddings) == (20, 20)
    for positions, written in ((16, 20), (20, 20), (64, 64)):
        exported = family.config_of(model.replaced(max_position_embeddings=positions))
        assert exported["max_position_embeddings"] == written


def test_dynamic_rope_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_model("llama, dynamic").save_pretrained(tmp_path / "theirs")
    main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--seq-length", "20"])
    told = capsys.readouterr().err
    assert "scales RoPE dynamically. In samples of more than 16 tokens" in told
