"""What is recomputed, in Megatron-LM's words of today and of former years."""

import pytest
from command_lines import with_flags

from megatron.layers.recompute import NO_RECOMPUTATION, Recomputation
from megatron.run.command_line import parse, read

RUN = (
    "--num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 1 --device cpu --mock-data --vocab-size 99"
)
CORE = Recomputation(parts=frozenset({"core_attn"}))


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", NO_RECOMPUTATION),
        ("--recompute-activations", CORE),
        ("--recompute-granularity selective", CORE),
        ("--recompute-activations --recompute-granularity selective", CORE),
        (
            "--recompute-granularity selective --recompute-modules mlp layernorm",
            Recomputation(parts=frozenset({"mlp", "layernorm"})),
        ),
        ("--recompute-granularity full --recompute-method uniform", Recomputation(group=1)),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            Recomputation(group=2),
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            Recomputation(group=1, most=3),
        ),
        ("--checkpoint-activations", Recomputation(group=1)),
        ("--checkpoint-activations --checkpoint-num-layers 2", Recomputation(group=2)),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 2",
            Recomputation(group=1, most=2),
        ),
        (
            "--checkpoint-activations --deepspeed-activation-checkpointing --partition-activations",
            Recomputation(group=1),
        ),
    ],
)
def test_what_flags_ask_for(flags: str, wanted: Recomputation) -> None:
    config = parse(with_flags(RUN.split(), flags.split()), 1)
    assert config.train.recomputation == wanted


@pytest.mark.parametrize(
    ("flags", "ahead"),
    [
        ("", None),
        ("--recompute-ahead 2", 2),
        ("--recompute-ahead 1 --recompute-method block --recompute-num-layers 3", 1),
    ],
)
def test_recomputation_in_a_pass_of_its_own(flags: str, ahead: int | None) -> None:
    full = "--recompute-granularity full --recompute-method uniform"
    config = parse(with_flags([*RUN.split(), *full.split()], flags.split()), 1)
    assert config.parallel.recompute_ahead == ahead


@pytest.mark.parametrize(
    "flags", ["", "--recompute-activations", "--recompute-granularity selective"]
)
def test_only_whole_layers_are_computed_ahead(flags: str) -> None:
    [found] = read([*RUN.split(), *flags.split(), "--recompute-ahead", "1"], 1).mistakes
    fault = "--recompute-ahead 1 moves whole layers, and none is computed again"
    assert found == f"{fault}: add --recompute-granularity full, or leave it out"


@pytest.mark.parametrize(
    ("flags", "noted"),
    [
        ("--recompute-num-layers 2", "--recompute-num-layers 2 changes nothing without"),
        ("--recompute-method block", "--recompute-method block changes nothing without"),
        ("--recompute-modules mlp", "--recompute-modules mlp changes nothing without"),
        ("--distribute-saved-activations", "--distribute-saved-activations changes nothing"),
    ],
)
def test_without_recomputation_they_change_nothing(flags: str, noted: str) -> None:
    config = parse(with_flags(RUN.split(), flags.split()), 1)
    assert config.train.recomputation == NO_RECOMPUTATION
    assert any(note.startswith(noted.split()[0]) for note in config.notes), config.notes


@pytest.mark.parametrize(
    ("flags", "noted"),
    [
        ("--recompute-modules mlp mlp_act", "mlp_act changes nothing beside mlp"),
        ("--recompute-modules mlp_act --squared-relu", "mlp_act changes nothing with --squared"),
    ],
)
def test_an_activation_that_is_dropped_or_kept_anyway_is_noted(flags: str, noted: str) -> None:
    words = with_flags(RUN.split(), f"--recompute-activations {flags}".split())
    assert any(noted in note for note in parse(words, 1).notes)
    alone = with_flags(RUN.split(), ["--recompute-activations", "--recompute-modules", "mlp_act"])
    assert not any("mlp_act" in note for note in parse(alone, 1).notes)
