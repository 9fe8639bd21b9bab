"""Products in 8 bits, from their flags, and what stands in their way."""

import pytest
import torch
from kernels.engine_stand_in import installed, lacking

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.run.command_line import read
from megatron.run.eight_bits import eight_bits_of, engine_multiplies
from megatron.run.replicas import replicas_of
from megatron.run.run_config import resolve

MOCK = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 10 --mock-data --vocab-size 99"
)


def made(flags: str) -> EightBitSettings | None:
    found = read(f"{MOCK} --device cpu {flags}".split(), world_size=1)
    assert not found.mistakes
    return resolve(found.flags).train.eight_bits


def mistakes(flags: str, device: str = "cpu") -> list[str]:
    return list(read(f"{MOCK} --device {device} {flags}".split(), world_size=1).mistakes)


def notes(flags: str, device: str = "cpu") -> list[str]:
    return list(read(f"{MOCK} --device {device} {flags}".split(), world_size=1).notes)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", None),
        ("--fp8-format hybrid", EightBitSettings("hybrid")),
        (
            "--fp8-format e4m3 --fp8-recipe tensorwise --no-fp8-wgrad",
            EightBitSettings("e4m3", "tensorwise", wide_weight_gradients=True),
        ),
        (
            "--fp8-hybrid --fp8-margin 1 --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
            EightBitSettings(
                "hybrid", fp8_margin=1, fp8_amax_history_len=16, fp8_amax_compute_algo="max"
            ),
        ),
        (
            "--fp8 e4m3 --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
            EightBitSettings(
                "e4m3",
                first_last_layers_bf16=True,
                num_layers_at_start_in_bf16=1,
                num_layers_at_end_in_bf16=2,
            ),
        ),
        (
            "--fp8-format hybrid --num-layers-at-end-in-bf16 2",
            EightBitSettings("hybrid", num_layers_at_end_in_bf16=2),
        ),
        ("--fp8-format hybrid --transformer-impl local", EightBitSettings("hybrid")),
    ],
)
def test_what_is_asked_for(flags: str, expected: EightBitSettings | None) -> None:
    assert made(f"--bf16 {flags}") == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--fp8-format hybrid", ["--fp8-format hybrid", "--bf16"]),
        ("--fp16 --fp8-format e4m3", ["--fp8-format e4m3", "--bf16"]),
        (
            "--bf16 --fp8-format e4m3 --hidden-size 72",
            ["--fp8-format e4m3", "--hidden-size", "multiples of 16"],
        ),
        (
            "--bf16 --fp8-format e4m3 --seq-length 24",
            ["--seq-length 24", "multiples of 16", "--no-fp8-wgrad"],
        ),
        (
            "--bf16 --fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-start-in-bf16 3",
            ["--first-last-layers-bf16", "--num-layers 4"],
        ),
        (
            "--bf16 --fp8-format hybrid --fp8-recipe mxfp8 --seq-length 48",
            ["--fp8-recipe mxfp8 of weights' gradients need tokens in multiples of 32", "is 48"],
        ),
        (
            "--bf16 --fp8-format hybrid --fp8-recipe mxfp8 --ffn-hidden-size 80",
            ["--fp8-recipe mxfp8 need widths in multiples of 32", "--ffn-hidden-size makes 80"],
        ),
        (
            "--bf16 --fp8-format hybrid --fp8-recipe blockwise --hidden-size 72",
            ["products in 8 bits need widths in multiples of 16", "--hidden-size makes 72"],
        ),
        (
            "--bf16 --fp8-format hybrid --fp8-recipe mxfp8 --no-fp8-wgrad --transformer-impl "
            "transformer_engine",
            ["products with --fp8-recipe mxfp8", "tokens in multiples of 32"],
        ),
        (
            "--bf16 --fp8-format hybrid --fp8-param-gather --fp8-recipe mxfp8 --transformer-impl "
            "transformer_engine",
            ["--fp8-param-gather with --fp8-recipe mxfp8", "or leave --fp8-param-gather out"],
        ),
    ],
)
def test_what_stands_in_the_way_is_told(flags: str, words: list[str]) -> None:
    told = mistakes(flags)
    assert any(all(word in line for word in words) for line in told), told


def test_tokens_do_not_matter_to_products_in_16_bits() -> None:
    assert mistakes("--bf16 --fp8-format e4m3 --seq-length 24 --no-fp8-wgrad") == []


def test_what_changes_nothing_is_noted() -> None:
    told = notes("--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-amax-history-len 9")
    assert any(line.startswith("--fp8-amax-history-len 9 changes nothing") for line in told)
    assert any("a CPU emulates products in 8 bits" in line for line in told)
    told = notes("--fp8-margin 1")
    assert any(line.startswith("--fp8-margin 1 changes nothing") for line in told)


GATHER = "--bf16 --fp8-format hybrid --fp8-param-gather"


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_replicas_that_share_the_optimizer_gather(world_size: int) -> None:
    line = f"{MOCK} --device cpu {GATHER}"
    usual = read(line.split(), world_size=world_size)
    shared = read(f"{line} --use-distributed-optimizer".split(), world_size=world_size)
    alone = "--fp8-param-gather changes nothing: there is one replica of the model"
    assert shared.mistakes == ()
    assert (alone in shared.notes) == (world_size == 1)
    assert any("--fp8-param-gather: every" in one for one in usual.mistakes) == (world_size > 1)
    for given in (usual, shared):
        wanted = given is shared and world_size == 2
        assert replicas_of(given.flags, world_size).gathers_eight_bits is wanted


def test_delayed_scales_change_although_a_step_is_undone() -> None:
    line = f"{MOCK} {GATHER} --use-distributed-optimizer --enable-optimizer-post-validation"
    words = f"{line} --device cpu --pipeline-model-parallel-size 2 --global-batch-size 8".split()
    (told,) = read(words, world_size=4).mistakes
    assert told.startswith("--fp8-param-gather with --fp8-recipe delayed does not go with")
    assert read([*words, "--fp8-recipe", "tensorwise"], world_size=4).mistakes == ()


def test_without_products_in_8_bits_nothing_is_gathered_in_8_bits() -> None:
    (told,) = notes("--fp8-param-gather")
    assert told == "--fp8-param-gather changes nothing without --fp8-format"


def test_without_products_in_8_bits_transformer_engine_changes_nothing() -> None:
    (told,) = notes("--transformer-impl transformer_engine")
    assert told == "--transformer-impl transformer_engine changes nothing without --fp8-format"
    assert mistakes("--transformer-impl transformer_engine") == []


PACKAGE = "--transformer-impl transformer_engine"
SIZES = "--hidden-size 256 --ffn-hidden-size 512 --seq-length 128 --bf16 --fp8-format hybrid"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that PyTorch finds."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_transformer_engine_is_taken_where_it_is(recipe: str) -> None:
    with installed():
        found = read(f"{MOCK} {SIZES} {PACKAGE} --fp8-recipe {recipe}".split(), world_size=1)
        made = eight_bits_of(found.flags)
    assert not found.mistakes
    assert made is not None
    assert (made.fp8_recipe, made.transformer_engine) == (recipe, True)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("world_size", [1, 2])
def test_kernels_multiply_by_weights_that_were_gathered_in_8_bits(world_size: int) -> None:
    """One replica gathers nothing, so there Transformer Engine multiplies as without the flag."""
    line = f"{MOCK} {SIZES} {PACKAGE} --fp8-recipe blockwise --fp8-param-gather"
    with installed():
        found = read(f"{line} --use-distributed-optimizer".split(), world_size=world_size)
        assert engine_multiplies(found.flags) == (world_size == 1)
        told = "\n".join(found.notes)
    assert not found.mistakes
    replaced = f"{PACKAGE} changes nothing: weights that were gathered in 8 bits" in told
    alone = "--fp8-param-gather changes nothing: there is one replica" in told
    assert (replaced, alone) == (world_size == 2, world_size == 1)


@pytest.mark.usefixtures("gpu")
def test_what_transformer_engine_lacks_is_told_at_the_start() -> None:
    flags = f"{SIZES} {PACKAGE}"
    told = "\n".join(notes(f"{flags} --fp8-recipe blockwise", "cuda"))
    assert f"{PACKAGE} changes nothing: it does not load here (No module named" in told
    assert "pip install" in told
    with installed(version="2.4.0"):
        assert "version 2.4.0" in "\n".join(notes(f"{flags} --fp8-recipe blockwise", "cuda"))
    with installed(is_mxfp8_available=lacking):
        assert "compute capability 10.0 or higher required" in "\n".join(
            notes(f"{flags} --fp8-recipe mxfp8", "cuda")
        )
        assert mistakes(f"{flags} --fp8-recipe blockwise", "cuda") == []


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("package", ["", PACKAGE])
def test_a_gpu_before_blackwell_has_no_scales_of_32_numbers(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"{SIZES} --bf16 --fp8-format hybrid {package} --fp8-recipe mxfp8"
    (told,) = mistakes(flags, "cuda")
    assert told.startswith("--fp8-recipe mxfp8: NVIDIA H100 has compute capability 9.0, and ")
    assert told.endswith("use --fp8-recipe blockwise, tensorwise or delayed")
    assert mistakes(f"{flags} --dry-run", "cuda") == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert mistakes(flags, "cuda") == []


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_kernels_multiply_where_transformer_engine_is_not(recipe: str) -> None:
    flags = f"{SIZES} {PACKAGE} --fp8-recipe {recipe}"
    assert mistakes(flags) == []
    line = f"{PACKAGE} changes nothing: it multiplies on GPUs only; this project's kernels multiply"
    assert line in "\n".join(notes(flags))
    found = read(f"{MOCK} {flags}".split(), world_size=1)
    assert not engine_multiplies(found.flags)


def test_a_dry_run_needs_no_transformer_engine() -> None:
    told = mistakes(f"{SIZES} {PACKAGE} --fp8-recipe mxfp8 --dry-run")
    assert told == []


LATENT = (
    "--bf16 --fp8-format hybrid --multi-latent-attention --position-embedding-type rope "
    "--q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16"
)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_multi_latent_attention_is_accepted(recipe: str) -> None:
    assert mistakes(f"{LATENT} --fp8-recipe {recipe}") == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--q-lora-rank 40", "--q-lora-rank makes 40"),
        ("--kv-lora-rank 24 --qk-pos-emb-head-dim 8", "--kv-lora-rank makes 24"),
        ("--qk-pos-emb-head-dim 8", "--kv-lora-rank + --qk-pos-emb-head-dim makes 40"),
        (
            "--num-attention-heads 5 --qk-head-dim 18 --qk-pos-emb-head-dim 32",
            "--num-attention-heads x (--qk-head-dim + --qk-pos-emb-head-dim) makes 250",
        ),
        (
            "--num-attention-heads 4 --v-head-dim 18",
            "--num-attention-heads x (--qk-head-dim + --v-head-dim) makes 136",
        ),
        ("--num-attention-heads 4 --v-head-dim 6", "--num-attention-heads x --v-head-dim makes 24"),
    ],
)
def test_widths_of_multi_latent_attention_are_multiples(flags: str, words: str) -> None:
    told = mistakes(f"{LATENT} {flags}")
    assert all(line.endswith("change it, or leave --fp8-format out") for line in told)
    assert any(f"multiples of 16, but {words}" in line for line in told), told


def test_latents_are_made_of_the_tokens_outside_of_attention() -> None:
    given = f"{LATENT} --num-attention-heads 8 --device cpu"
    split = f"{given} --tensor-model-parallel-size 2 --sequence-parallel"
    (told,) = read(f"{MOCK} {split}".split(), world_size=2).mistakes
    assert "--seq-length 16 / 2 ranks of --sequence-parallel is 8: change one of them" in told
    whole = f"{given} --tensor-model-parallel-size 2"
    assert not read(f"{MOCK} {whole}".split(), world_size=2).mistakes


def test_a_gpu_without_8_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100-SXM4-80GB")
    for capability, refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, found=capability: found)
        told = mistakes("--bf16 --fp8-format hybrid", "cuda")
        assert any("8.0" in line and "A100" in line for line in told) == refused, told
