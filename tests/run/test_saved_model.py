"""A model's flags and its fields say the same, both ways; --use-checkpoint-args reads them."""

from pathlib import Path

import pytest
import torch
from command_lines import with_flags
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint import folder, storage
from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.common import COMMON
from megatron.checkpoint.saved_model import differences, read_model, stored
from megatron.model.settings import ModelSettings
from megatron.parallel.box import whole
from megatron.parallel.groups import ConnectedAxis
from megatron.run.command_line import parse, read

ALONE = ConnectedAxis("world", 0, (0,))
RUN = [
    "--micro-batch-size",
    "1",
    "--train-iters",
    "1",
    "--lr",
    "1e-3",
    "--mock-data",
    "--device",
    "cpu",
    "--vocab-size",
    "63",
]
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16"

OPTIONS = [
    "--ffn-hidden-size 48",
    "--group-query-attention --num-query-groups 2",
    "--group-query-attention",
    "--kv-channels 12",
    "--position-embedding-type rope --rotary-base 500 --rotary-percent 0.5 --rotary-interleaved",
    "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 4",
    "--position-embedding-type rope --rope-type yarn --rotary-scaling-factor 4 --beta-fast 16 "
    "--beta-slow 2 --mscale 0.5 --mscale-all-dim 0.25 --original-max-position-embeddings 8 "
    "--yarn-exact-range",
    "--position-embedding-type rope --rope-type dynamic --rotary-scaling-factor 4",
    "--normalization RMSNorm --norm-epsilon 1e-6",
    "--swiglu",
    "--qk-layernorm",
    "--disable-bias-linear --add-qkv-bias",
    "--untie-embeddings-and-output-weights",
    "--attention-dropout 0 --hidden-dropout 0.25",
    "--init-method-std 0.01 --label-smoothing 0.1 --z-loss-coeff 1e-4 --logit-softcap 30",
    "--use-mup --mup-base-hidden-size 8 --mup-base-head-dim 2 --mup-attn-scale-power 0.75 "
    "--mup-output-mult 0.5",
    "--embedding-init-method-std 0.5",
    "--max-position-embeddings 32",
    "--window-size 4,0 --window-attn-skip-freq 2 --attn-logit-softcapping 50",
    "--position-embedding-type rope --rotary-seq-len-interpolation-factor 8 --no-rope-freq [0,1]",
    "--position-embedding-type alibi --embed-layernorm --query-pre-attn-scalar 24",
    "--apply-layernorm-1p --post-self-attn-layernorm --post-mlp-layernorm",
    "--parallel-attn --parallel-layernorm --apply-residual-connection-post-layernorm",
    "--geglu --scale-embeddings-by-hidden-size",
    "--num-experts 4 --disable-bias-linear --moe-layer-freq [0,1] --moe-ffn-hidden-size 16 "
    "--moe-router-topk 1 --moe-router-pre-softmax --moe-router-dtype fp32 --moe-aux-loss-coeff 0.1 "
    "--moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate",
    "--num-experts 8 --disable-bias-linear --moe-layer-freq 2 --moe-router-score-function sigmoid "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-dtype fp64",
]


def first_flag(option: str) -> str:
    """What only one option may give; an MLP has one gate."""
    first = option.split()[0].replace("--geglu", "--swiglu")
    return first.replace("--disable-bias-linear", "--num-experts")


def model_of(words: list[str]) -> ModelSettings:
    return parse([*RUN, *words], 1, speak=False).model


@settings(max_examples=examples(25))
@given(st.lists(st.sampled_from(OPTIONS), unique_by=first_flag))
def test_the_flags_of_a_model_make_that_model(options: list[str]) -> None:
    model = model_of([*MODEL.split(), *" ".join(options).split()])
    flags = model.flags()
    again = model_of([word for option, words in flags.items() for word in (option, *words)])
    assert again == model
    assert differences(stored(model), again) == []


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("500000", "500000"),
        ("500000.0", "500000"),
        ("5e5", "500000"),
        ("999999.4420358813", "999999.4420358813"),
    ],
)
def test_a_theta_is_written_without_a_fraction_that_it_does_not_have(
    given: str, written: str
) -> None:
    words = f"{MODEL} --position-embedding-type rope --window-size 4,0"
    model = model_of(f"{words} --rotary-base {given} --rotary-base-local {given}".split())
    flags = model.flags()
    assert flags["--rotary-base"] == flags["--rotary-base-local"] == [written]
    assert (
        model_of(f"{words} --rotary-base 10000.0".split())
        .flags()
        .keys()
        .isdisjoint(("--rotary-base", "--rotary-base-local"))
    )


def test_a_checkpoint_of_before_holds_an_integer_theta() -> None:
    model = model_of(f"{MODEL} --position-embedding-type rope --rotary-base 500000".split())
    saved = {**stored(model), "rotary_base": 500000}
    assert read_model(saved) == model
    assert hash(read_model(saved)) == hash(model)
    assert differences(saved, model) == []
    assert read_model(saved).flags() == model.flags()
    assert differences({**saved, "rotary_base": 500000.5}, model) == [
        "--rotary-base 500000.5 there, --rotary-base 500000 here"
    ]


@pytest.mark.parametrize(
    "options",
    [
        "--rotary-base 500000 --rotary-percent 0.5 --rotary-interleaved --no-rope-freq 2",
        "--rope-scaling-factor 4 --rope-type yarn --rotary-scaling-factor 2 --beta-fast 16",
        "--mscale 2 --mscale-all-dim 1 --original-max-position-embeddings 8 --yarn-exact-range",
        "--add-qkv-bias --parallel-layernorm --rotary-seq-len-interpolation-factor 8",
        "--window-attn-skip-freq 2 --use-rope-scaling",
        "--window-size 0,0 --window-attn-skip-freq [1,0]",
    ],
)
def test_flags_that_change_nothing_are_those_of_the_run_that_goes_on(options: str) -> None:
    """A run with --use-checkpoint-args would otherwise be refused as another model."""
    model = model_of([*MODEL.split(), *options.split()])
    flags = model.flags()
    again = model_of([word for option, words in flags.items() for word in (option, *words)])
    assert again == model
    assert differences(stored(model), again) == []


def test_fields_that_this_version_does_not_know_are_left_out() -> None:
    model = model_of(MODEL.split())
    saved = {**stored(model), "width_of_nothing": 8}
    assert read_model(saved, passes_over_unknown=True) == model
    with pytest.raises(ValueError, match="width_of_nothing, which this version does not know"):
        read_model(saved)


def test_models_differ_by_flags_that_decide_the_weights() -> None:
    one = stored(model_of(MODEL.split()))
    other = f"{MODEL} --swiglu --untie-embeddings-and-output-weights --attention-dropout 0"
    told = differences(one, model_of(f"{other} --group-query-attention".split()))
    assert told == [
        "no --group-query-attention there, --group-query-attention --num-query-groups 1 here",
        "--ffn-hidden-size 128 there, --ffn-hidden-size 64 here",
        "no --swiglu there, --swiglu here",
        "no --untie-embeddings-and-output-weights there, "
        "--untie-embeddings-and-output-weights here",
    ]


def test_a_flag_that_is_not_given_is_told_as_such() -> None:
    one = stored(model_of([*MODEL.split(), "--window-size", "4,0", "--softmax-scale", "0.5"]))
    assert differences(one, model_of(MODEL.split())) == [
        "--window-size 4,0 there, no --window-size here",
        "--softmax-scale 0.5 there, no --softmax-scale here",
    ]


@pytest.mark.parametrize(
    ("there", "here", "told"),
    [
        (
            "--num-attention-heads 8",
            "",
            ["--num-attention-heads 8 there, --num-attention-heads 4 here",
             "--kv-channels 4 there, --kv-channels 8 here"],
        ),
        (
            "--num-experts 4 --disable-bias-linear --moe-ffn-hidden-size 16",
            "--disable-bias-linear",
            ["--num-experts 4 there, no --num-experts here",
             "--moe-ffn-hidden-size 16 there, no --moe-ffn-hidden-size here"],
        ),
        (
            "--multi-latent-attention --position-embedding-type rope",
            "--position-embedding-type rope",
            ["--multi-latent-attention there, no --multi-latent-attention here"],
        ),
    ],
)  # fmt: skip
def test_a_difference_names_no_value_that_others_decide(
    there: str, here: str, told: list[str]
) -> None:
    one, other = (model_of([*MODEL.split(), *words.split()]) for words in (there, here))
    assert differences(stored(one), other) == told


def save(root: Path, iteration: int, model: ModelSettings) -> None:
    tensors = {"weight.a": BoxedTensor(torch.ones(2), (2,), whole((2,)))}
    storage.write(root, iteration, tensors, {"model": stored(model)}, ALONE)


def test_the_checkpoint_gives_the_flags_that_the_line_does_not(tmp_path: Path) -> None:
    saved = model_of([*MODEL.split(), "--swiglu", "--attention-dropout", "0"])
    save(tmp_path, 10, saved)
    use = ["--load", str(tmp_path), "--use-checkpoint-args"]
    config = parse([*RUN, *use], 1, speak=False)
    assert config.model == saved
    [note] = [note for note in config.notes if note.startswith("--use-checkpoint-args")]
    assert "is read as --num-layers 2 --hidden-size 32" in note
    assert note.endswith(f"from {folder.folder_of(tmp_path, 10)}")
    own = parse([*RUN, *use, "--attention-dropout", "0.5", "--seq-length", "8"], 1, speak=False)
    assert own.model.attention.attention_dropout == 0.5
    assert own.model.seq_length == 8


@pytest.mark.parametrize(
    "flags",
    [
        "--query-pre-attn-scalar 16",
        "--softmax-scale 0.25",
        "--scale-embeddings-by-hidden-size",
        "--embedding-multiplier 2",
    ],
)
def test_a_job_that_starts_again_gives_the_flags_of_its_first_start(
    flags: str, tmp_path: Path
) -> None:
    """Also those that a checkpoint keeps in other words."""
    line = [*RUN, *MODEL.split(), *flags.split(), "--load", str(tmp_path), "--use-checkpoint-args"]
    first = parse(line, 1, speak=False).model
    save(tmp_path, 10, first)
    assert parse(line, 1, speak=False).model == first


def test_a_given_flag_counts_against_a_saved_one_that_excludes_it(tmp_path: Path) -> None:
    save(tmp_path, 10, model_of([*MODEL.split(), "--swiglu"]))
    use = [*RUN, "--load", str(tmp_path), "--use-checkpoint-args"]
    assert parse([*use, "--geglu"], 1, speak=False).model.mlp.function == "geglu"
    assert parse(use, 1, speak=False).model.mlp.function == "swiglu"


def test_of_several_checkpoints_it_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    for iteration, layers in ((10, 2), (20, 4), (30, 6)):
        save(
            tmp_path, iteration, model_of(with_flags(MODEL.split(), ["--num-layers", str(layers)]))
        )
    use = [*RUN, "--load", str(tmp_path), "--use-checkpoint-args"]
    assert parse([*use, "--ckpt-step", "10"], 1, speak=False).model.num_layers == 2
    (folder.folder_of(tmp_path, 30) / COMMON).write_text("{}")
    assert parse(use, 1, speak=False).model.num_layers == 4


def test_without_a_checkpoint_the_line_counts(tmp_path: Path) -> None:
    """So that the first start of a job and all later ones have the same command line."""
    use = [*RUN, "--load", str(tmp_path), "--use-checkpoint-args"]
    config = parse([*use, *MODEL.split()], 1, speak=False)
    assert (
        f"--use-checkpoint-args changes nothing: {tmp_path} has no checkpoint yet" in config.notes
    )
    with pytest.raises(ValueError, match="--num-layers"):
        parse(use, 1, speak=False)


def test_a_checkpoint_that_cannot_tell_is_named(tmp_path: Path) -> None:
    save(tmp_path, 10, model_of(MODEL.split()))
    (folder.folder_of(tmp_path, 10) / COMMON).unlink()
    use = [*RUN, *MODEL.split(), "--load", str(tmp_path), "--use-checkpoint-args"]
    [mistake] = read(use, 1, speak=False).mistakes
    assert mistake.startswith("--use-checkpoint-args: ")
    assert "common.json is missing; give the flags of the model" in mistake
