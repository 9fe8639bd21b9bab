"""Flags of slices: the lengths that they make, and what they refuse."""

from itertools import accumulate

import pytest
from command_lines import with_flags

from megatron.model.flops import iteration_flops, layers_flops
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.run.slice_lengths import lengths_of_slices

BASE = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 64 --num-attention-heads 8 "
    "--seq-length 1024 --micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 999 --mock-data --device cpu"
)


def run(flags: str, ranks: int = 2) -> RunConfig:
    return parse(with_flags(BASE.split(), flags.split()), ranks)


def test_microbatches_are_whole_by_default() -> None:
    assert run("").parallel.slices.num_seq_splits == 1
    assert run("--num-seq-splits 4").parallel.slices.num_seq_splits == 4


def test_a_strategy_without_slices_is_noted() -> None:
    [note] = [n for n in run("--seq-split-strategy balanced").notes if "seq-split" in n]
    assert "changes nothing" in note


@pytest.mark.parametrize("strategy", ["uniform", "balanced"])
def test_a_named_strategy_bounds_what_auto_compares(strategy: str) -> None:
    opened = run(f"--num-seq-splits auto --seq-split-strategy {strategy} --seq-length 512")
    assert not any("seq-split-strategy" in note for note in opened.notes)
    cuts = [own.parallel for own in opened.alternatives[1:]]
    assert {own.slices.strategy for own in cuts} == {strategy}
    assert len(cuts) == (3 if strategy == "uniform" else 2), "128 tokens have no 8 such slices"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--num-seq-splits 3", "--num-seq-splits 3 does not divide --seq-length 1024"),
        (
            "--num-seq-splits 512 --tensor-model-parallel-size 4 --sequence-parallel "
            "--pipeline-model-parallel-size 1",
            "makes slices of 2 tokens, which --sequence-parallel cannot divide among "
            "--tensor-model-parallel-size 4",
        ),
        (
            "--num-seq-splits 16 --seq-split-strategy balanced",
            "of 128 tokens, and --seq-length 1024 has no 16 of them: take a sequence of at least",
        ),
        (
            "--num-seq-splits 2 --seq-split-strategy balanced --seq-length 1000",
            "of 128 tokens, and --seq-length 1000 has no 2 of them: take a sequence of at least",
        ),
        (
            "--num-seq-splits 512 --context-parallel-size 2",
            "makes slices of 2 tokens, which --context-parallel-size 2 cannot divide into two "
            "equal chunks for every rank: choose fewer slices, or a --seq-length that 2048 divides",
        ),
        (
            "--num-seq-splits 2 --context-parallel-size 2 --cp-comm-type p2p --attention-dropout 0",
            "--num-seq-splits 2 with --cp-comm-type p2p",
        ),
        (
            "--num-seq-splits 2 --num-experts 4 --moe-router-load-balancing-type sinkhorn",
            "--num-seq-splits 2 with --moe-router-load-balancing-type sinkhorn",
        ),
        (
            "--num-seq-splits 2 --num-experts 4 --moe-expert-capacity-factor 1.5",
            "--num-seq-splits 2 with --moe-expert-capacity-factor 1.5",
        ),
        (
            "--num-seq-splits 256 --bf16 --fp8-format hybrid",
            "need tokens in multiples of 16, but --micro-batch-size 2 x 4 tokens of "
            "--num-seq-splits 256 is 8: change one of them, or add --no-fp8-wgrad",
        ),
    ],
)
def test_what_slices_cannot_do_is_refused(flags: str, told: str) -> None:
    with pytest.raises(ValueError, match="--") as caught:
        run(flags, 4)
    assert told in str(caught.value)
    if "balanced" not in flags:  # without slices the rest is accepted
        run(flags.replace("--num-seq-splits", "--log-interval"), 4)


def test_context_parallel_ranks_divide_a_slice_before_tensor_parallel_ranks() -> None:
    shared = (
        "--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel "
        "--pipeline-model-parallel-size 1"
    )
    told = (
        "makes slices of 4 tokens, which --sequence-parallel cannot divide among 2 "
        "context-parallel ranks and then among --tensor-model-parallel-size 4: choose fewer "
        "slices, or a --seq-length that 4096 divides"
    )
    with pytest.raises(ValueError, match=told):
        run(f"{shared} --num-seq-splits 256", 8)
    assert run(f"{shared} --num-seq-splits 128", 8).parallel.slices.num_seq_splits == 128


@pytest.mark.parametrize(
    ("flags", "choices"),
    [
        ("", ((2, "balanced"), (4, "balanced"), (8, "balanced"))),
        ("--seq-length 512", ((2, "balanced"), (4, "balanced"), (8, "uniform"))),
        ("--num-experts 4 --moe-expert-capacity-factor 1.5", ()),
        ("--seq-length 32 --bf16 --fp8-format hybrid", ((2, "uniform"), (4, "uniform"))),
    ],
)
def test_auto_knows_the_slices_that_go_with_the_other_flags(
    flags: str, choices: tuple[tuple[int, str], ...]
) -> None:
    opened = run(f"{flags} --num-seq-splits auto")
    layouts = [own.parallel for own in opened.alternatives[1:]]
    cuts = tuple((own.slices.num_seq_splits, own.slices.strategy) for own in layouts)
    assert cuts == choices
    refused = [note for note in opened.notes if "auto changes nothing" in note]
    assert bool(refused) is not bool(choices)


@pytest.mark.parametrize(("exchange", "chosen"), [("a2a", 3), ("p2p", 0)])
def test_auto_cuts_no_microbatch_beside_a_ring_that_the_flags_name(
    exchange: str, chosen: int
) -> None:
    flags = f"--context-parallel-size 2 --cp-comm-type {exchange} --attention-dropout 0"
    opened = run(f"{flags} --num-seq-splits auto", 4)
    assert len(opened.alternatives[1:]) == chosen


def test_uniform_slices_have_equally_many_tokens() -> None:
    assert lengths_of_slices(run("").model, 4, "uniform") == (256,) * 4


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_balanced_slices_have_about_equal_work(slices: int) -> None:
    """No end is farther from an equal share than half of the multiple to which it is rounded."""
    model = run("--seq-length 16384 --num-layers 2").model
    lengths = lengths_of_slices(model, slices, "balanced")
    assert sum(lengths) == model.seq_length
    assert all(length % 128 == 0 for length in lengths)
    whole = layers_flops(model, model.seq_length)
    for number, end in enumerate(list(accumulate(lengths))[:-1], 1):
        share = whole * number / slices
        assert layers_flops(model, end - 65) <= share <= layers_flops(model, end + 64)


def test_flops_of_tokens_add_up_to_those_of_the_layers() -> None:
    """MFU counts the square of scores, tokens only those that are seen: half, and the diagonal."""
    model = run("--seq-length 64").model
    vocabulary = 2 * model.seq_length * model.hidden_size * model.vocab_size
    scores = 4 * model.num_layers * model.hidden_size  # of a query and a key, with its value
    hidden = scores * (model.seq_length**2 - model.seq_length) // 2
    whole = iteration_flops(model, 1) // 3 - vocabulary
    assert layers_flops(model, model.seq_length) == whole - hidden


def test_a_window_limits_the_work_of_later_tokens() -> None:
    plain, window = (
        [layers_flops(model, tokens + 1) - layers_flops(model, tokens) for tokens in range(64)]
        for model in (run(f"--seq-length 64{w}").model for w in ("", " --window-size 7,0"))
    )
    assert plain[:8] == window[:8]
    assert window[8:] == [window[7]] * 56
