"""The proposal's ways to hold less: each is a run, and holds less than the ways before it."""

import pytest

from megatron.planning.run_plan import asked
from megatron.planning.search.dimensions import MEMORY
from megatron.run.line import Line
from megatron.simulator.costs.gpus import gpu

MODEL = (
    "--num-layers 4 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8 "
    "--seq-length 4096 --vocab-size 999 --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 "
    "--train-iters 1 --bf16 --mock-data --dry-run --dry-run-gpu H100 "
    "--pipeline-schedule 1f1b --vocab-parallel none --attention-dropout 0 --hidden-dropout 0"
)


def line_of(*more: str) -> Line:
    return Line.of([*MODEL.split(), *more], 1)


def held(line: Line) -> float:
    [candidate] = asked(line.run(gpu("H100")))
    return candidate.least_memory.peak


def named(line: Line) -> list[str]:
    choices = MEMORY.choices(line.flags)
    return [" ".join(word for edit in choice for word in edit.words) for choice in choices]


@pytest.mark.parametrize("activation", ["--swiglu", "--squared-relu"])
def test_every_way_on_the_gpu_holds_less_than_those_before_it(activation: str) -> None:
    line = line_of(activation)
    sizes = [
        held(line.edited(choice))
        for choice in MEMORY.choices(line.flags)
        if not any(edit.option == "--cpu-offload" and edit.values is not None for edit in choice)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == len(set(sizes))


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        ("--swiglu", "layernorm mlp_act"),
        ("--squared-relu", "layernorm"),
        ("--swiglu --num-experts 4", "layernorm mlp_act moe_act"),
    ],
)
def test_activations_are_dropped_where_there_is_something_to_drop(flags: str, modules: str) -> None:
    ways = named(line_of(*flags.split()))
    of_modules = "--recompute-granularity selective --recompute-modules"
    assert f"{of_modules} {modules}" in ways
    assert f"{of_modules} layernorm" in ways
    assert len(ways) == len(set(ways))
