"""Layouts of the benchmark: the same ranks as pipelines and replicas, the same batch and model."""

import pytest

from tools.benchmark import Layout, parse_arguments, parse_layout, wanted_cases
from tools.benchmarking.case import BenchmarkCase

FLAGS = "--pipeline-schedule 1f1b zb-v --vocab-parallel none vocab-2 --vocab-size 64 -m 8"


def cases(flags: str) -> list[BenchmarkCase]:
    return list(wanted_cases(parse_arguments(f"{FLAGS} {flags}".split())))


def test_all_layouts_have_the_same_ranks_and_batch() -> None:
    found = cases("--layout p=4 p=2,d=2 d=4 --references single pytorch-ddp")
    assert {case.processes for case in found} == {4}
    assert {case.microbatches for case in found} == {8}
    assert all(case.with_update for case in found)
    ours = [(case.layout, case.schedule, case.treatment) for case in found if case.layout]
    pairs = [(s, t) for s in ("1f1b", "zb-v") for t in ("none", "vocab-2")]
    assert ours == [
        *(("p=4", *pair) for pair in pairs),
        *(("p=2,d=2", *pair) for pair in pairs),
        ("d=4", "1f1b", "none"),
    ]
    assert [case.schedule for case in found if not case.layout] == ["single", "pytorch-ddp"]
    assert len({case.name for case in found}) == len(found)


def test_replicas_share_the_batch_and_the_optimizer() -> None:
    [case] = [case for case in cases("--layout d=4") if case.layout]
    config = case.run_config()
    assert (config.train.global_batch_size, config.train.num_microbatches) == (8, 2)
    replicas = config.parallel.replicas
    assert (replicas.size, replicas.shard_optimizer, replicas.overlap) == (4, True, True)
    assert config.parallel.grid.world_size == 4


def test_tensor_parallel_ranks_split_the_sequence_too() -> None:
    found = [case for case in cases("--layout t=2,p=2 d=4") if case.layout]
    assert {case.processes for case in found} == {4}
    assert [case.layout for case in found] == [*["t=2,p=2"] * 4, "d=4"]
    parallel = found[1].run_config().parallel
    assert (parallel.tensor.size, parallel.tensor.sequence_parallel) == (2, True)
    assert parallel.padded_vocab_size % (128 * parallel.vocab_shards) == 0


def test_without_layouts_there_is_one_pipeline() -> None:
    assert {(c.layout, c.with_update, c.replicas) for c in cases("-p 2")} == {("p=2", False, 1)}


def test_texts_of_layouts() -> None:
    found = [parse_layout(text) for text in ("p=2", "d=3", "d=3,p=2", "t=2,d=3")]
    assert found == [(1, 2, 1), (1, 1, 3), (1, 2, 3), (2, 1, 3)]
    assert parse_layout("p=2") == Layout(tensor=1, pipeline=2, replicas=1)


@pytest.mark.parametrize("text", ["", "2", "p=0", "p=x", "q=2", "p=2,p=3", "p=2,"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give t=2, p=2, d=2"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--layout p=2 d=4", "as many ranks"),
        ("--layout d=3", "-m 8 microbatches cannot be shared by 3 replicas"),
        ("--layout t=3", "t=3 tensor-parallel ranks cannot share --num-attention-heads 8 and"),
    ],
)
def test_layouts_that_cannot_be_compared(
    flags: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(f"{FLAGS} {flags}".split())
    assert fault in capsys.readouterr().err
