"""Flags of pairs: where they join passes, and where they change nothing."""

from command_lines import with_flags

from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--vocab-size 999 --mock-data --device cpu --bf16 --dry-run --disable-bias-linear "
    "--tp-comm-overlap"
)
SHARED = "--tensor-model-parallel-size 2 --sequence-parallel"


def parsed(flags: str) -> RunConfig:
    return parse(with_flags(BASE.split(), flags.split()), 2)


def test_without_collectives_to_hide_nothing_is_joined() -> None:
    found = parsed("")
    assert not found.parallel.pairs.joins
    assert any(
        note.startswith("--tp-comm-overlap changes nothing at --tensor-model-parallel-size 1")
        for note in found.notes
    )


def test_passes_of_slices_make_pairs_too() -> None:
    assert parsed(f"{SHARED} --num-seq-splits 2").parallel.pairs.joins


def test_pairs_switch_where_the_flags_say() -> None:
    experts = (
        "--num-experts 8 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
        "--overlap-moe-expert-parallel-comm"
    )
    assert parsed(SHARED).parallel.pairs.axes == ("tensor", "context", "context_heads")
    assert parsed(f"{SHARED} {experts}").parallel.pairs.axes == (
        *("experts", "expert_tensor"),
        *("tensor", "context", "context_heads"),
    )


def test_weight_gradients_may_be_delayed_behind_any_pair() -> None:
    assert parsed(f"{SHARED} --delay-wgrad-compute").parallel.pairs.delay_wgrad_compute
    assert not parsed("--delay-wgrad-compute").parallel.pairs.delay_wgrad_compute


def test_a_graph_has_no_place_to_switch() -> None:
    found = parsed(f"{SHARED} --cuda-graph-impl local")
    assert not found.train.captures_passes
    assert any("--tp-comm-overlap lets passes switch within a pair" in n for n in found.notes)
