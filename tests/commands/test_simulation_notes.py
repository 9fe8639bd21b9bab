"""Costs that are missing, and costs that no pass takes, are told: neither is a free pass."""

import pytest

from megatron.commands.simulate_schedule import main


def noted(capsys: pytest.CaptureFixture[str], words: str) -> list[str]:
    main(["-p", "4", "-m", "8", *words.split()])
    lines = capsys.readouterr().out.splitlines()
    return [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]


def test_passes_without_a_cost_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    passes, barrier = noted(capsys, "--vocab-parallel vocab-2 --cost F=1,B=2,p2p=0.3")
    assert passes.startswith("S, T, IF and IB take no time")
    assert "S=TIME,T=TIME,IF=TIME,IB=TIME" in passes
    assert "--output-layer TIME" in passes
    assert barrier.startswith("C1 of the output layer: no time")


@pytest.mark.parametrize(
    "words",
    [
        "--vocab-parallel vocab-2",
        "--vocab-parallel vocab-2 --cost F=1,B=2,S=0.25,T=0.25",
        "--vocab-parallel vocab-2 --cost F=1,B=2 --output-layer 1",
        "--vocab-parallel vocab-2 --cost F=1,B=2,S=0.25,T=0.25,p2p=0.1,C1=0.1",
        "--vocab-parallel none --cost F=1,B=2",
        "--vocab-parallel none",
    ],
)
def test_nothing_is_told_of_costs_that_are_there(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not noted(capsys, words)


def test_only_the_missing_barrier_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    [found] = noted(capsys, "--vocab-parallel vocab-1 --cost F=1,B=2,S=0.25,T=0.25,p2p=0.1,C1=0.1")
    assert found.startswith("C2 of the output layer: no time")
    assert found.endswith("add C2=TIME to --cost")


def test_times_that_no_pass_takes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    [found] = noted(capsys, "--vocab-parallel none --cost F=1,B=2,S=0.25,T=0.25")
    assert found.startswith("--vocab-parallel none has no passes S and T")
