"""Flags of multi-latent attention and of the scaling of RoPE: what they become, what is refused."""

import math

import pytest
from command_lines import with_flags

from megatron.checkpoint.saved_model import differences, stored
from megatron.layers.recompute import Recomputation
from megatron.model.settings import ModelSettings
from megatron.run.command_line import parse

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--vocab-size 999 --mock-data --device cpu --bf16 --dry-run"
)
LATENT = "--multi-latent-attention --position-embedding-type rope"


def model(flags: str) -> ModelSettings:
    return parse(with_flags(BASE.split(), flags.split()), 1).model


def notes(flags: str) -> str:
    return "\n".join(parse(with_flags(BASE.split(), flags.split()), 1).notes)


def refusal(flags: str) -> str:
    with pytest.raises(ValueError, match="--") as caught:
        parse(with_flags(BASE.split(), flags.split()), 1)
    return str(caught.value)


def test_defaults_are_those_of_megatron_core() -> None:
    found = model(LATENT)
    assert found.latent.q_lora_rank is None
    widths = found.latent.qk_head_dim, found.latent.qk_pos_emb_head_dim, found.latent.v_head_dim
    assert (found.latent.kv_lora_rank, *widths) == (32, 128, 64, 128)
    assert (found.attention.kv_channels, found.attention.num_query_groups) == (192, 8)
    assert (found.rope_scaling.rope_type, model("").rope_scaling.rope_type) == ("yarn", "rope")


@pytest.mark.parametrize("kind", ["rope", "yarn"])
def test_scores_are_scaled_as_megatron_core_does(kind: str) -> None:
    """Whatever turns; and not at all if YaRN would make nothing longer."""
    given = f"{LATENT} --rope-type {kind} --rotary-scaling-factor 40 --mscale-all-dim 0.7"
    length = 1 + 0.07 * math.log(40)
    assert model(given).score_scale == pytest.approx(length**2 / math.sqrt(192))
    assert model(f"{LATENT} --rotary-scaling-factor 40").score_scale is None
    assert model(f"{LATENT} --mscale-all-dim 1").score_scale is None
    assert model(f"{given} --softmax-scale 0.25").score_scale == 0.25


@pytest.mark.parametrize(
    "flags",
    [
        "--q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 6 --v-head-dim 5",
        "--rope-type rope --latent-norm-epsilon 1e-6 --qk-layernorm",
        "--rotary-scaling-factor 4 --mscale-all-dim 0.5 --beta-fast 8",
        "--rope-type dynamic --rotary-scaling-factor 2",
    ],
)
def test_the_flags_of_a_saved_model_make_that_model(flags: str) -> None:
    found = model(f"{LATENT} {flags}")
    words = [word for option, values in found.flags().items() for word in (option, *values)]
    assert parse(with_flags(BASE.split(), words), 1).model == found
    assert differences(stored(found), found) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--multi-latent-attention", "--multi-latent-attention --position-embedding-type rope"),
        (f"{LATENT} --group-query-attention", "--group-query-attention leave"),
        (f"{LATENT} --softmax-type learnable", "--softmax-type leave"),
        (f"{LATENT} --qk-pos-emb-head-dim 5", "--rotary-percent 5 of the 5"),
        (f"{LATENT} --qk-pos-emb-head-dim 2 --rotary-scaling-factor 4", "--rope-type yarn 2"),
        (f"{LATENT} --beta-fast 0.5", "--beta-fast --beta-slow raise"),
        (
            "--recompute-granularity selective --recompute-modules mla_up_proj",
            "--recompute-modules mla_up_proj --multi-latent-attention",
        ),
        (
            "--position-embedding-type rope --rope-type yarn --use-rope-scaling",
            "--rope-type yarn --use-rope-scaling take",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(flags: str, words: str) -> None:
    told = refusal(flags)
    for word in words.split():
        assert word in told


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ("--kv-lora-rank 8", "--kv-lora-rank"),
        (f"{LATENT} --kv-channels 16", "--kv-channels"),
        (f"{LATENT} --use-rope-scaling", "--use-rope-scaling"),
        (f"{LATENT} --rotary-interleaved", "--rotary-interleaved"),
        (f"{LATENT} --rope-type rope --beta-fast 9", "--beta-fast"),
        ("--position-embedding-type rope --mscale 2", "--mscale"),
    ],
)
def test_a_flag_without_an_effect_is_told(flags: str, flag: str) -> None:
    assert f"{flag} " in notes(flags)
    assert "changes nothing" in notes(flags)


def test_yarn_of_megatron_core_is_read() -> None:
    found = model("--position-embedding-type yarn --yarn-rotary-scaling-factor 32")
    assert (found.positions.position_embedding_type, found.rope_scaling.rope_type) == (
        "rope",
        "yarn",
    )
    assert found.rope_scaling.rotary_scaling_factor == 32
    assert model(f"{LATENT} --qk-nope-head-dim 8 --qk-rope-head-dim 4").attention.kv_channels == 12


def test_heads_can_be_made_again() -> None:
    given = f"{LATENT} --recompute-granularity selective --recompute-modules mla_up_proj"
    found = parse(with_flags(BASE.split(), given.split()), 1).train.recomputation
    assert found == Recomputation(frozenset({"mla_up_proj"}))
