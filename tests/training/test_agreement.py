"""Ranks that would run different things are told apart, and only those."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from correctness.short_runs import Job as TrainingJob
from correctness.short_runs import Layout
from numpy.typing import NDArray
from reference.plain_gpt import GPTOptions

from megatron.checkpoint.settings import CheckpointSettings
from megatron.data.batch_sizes import Rampup
from megatron.data.microbatch import MicrobatchLoader
from megatron.data.samples import SampleDataset
from megatron.flags.tree import changed as changed_in_tree
from megatron.flags.tree import kinds_in, values_of
from megatron.inference.words import Words
from megatron.layers.recompute import Part, Recomputation
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.schedules.costs import Costs
from megatron.schedules.lower import Program, Run
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.schedules.turn_order import TurnOrder
from megatron.training.agreement import (
    _text,
    check_agreement,
    data_digests,
    disagreement,
    gpu_digests,
    run_digests,
)
from megatron.training.open_data import Data
from megatron.training.open_prompts import Prompts
from megatron.training.rendezvous import Rendezvous, UserError

CONFIG = TrainingJob(GPTOptions(num_layers=4, vocab_size=61), microbatches=6).config(
    Layout(2, "vocab-1")
)
PARTS = ["model", "parallel", "train", "optimizer", "data", "guard", "log", "checkpoint"]
PLAN_DIGESTS = {
    "layers of the stages",
    "plan",
    "order of communication in training",
    "order of communication in evaluation",
}


def changed(part: str, **values: object) -> RunConfig:
    return dataclasses.replace(CONFIG, **{part: changed_in_tree(getattr(CONFIG, part), **values)})


def digests(config: RunConfig) -> dict[str, str]:
    return run_digests(config, make_run_plan(CONFIG))


def differing(config: RunConfig) -> set[str]:
    one, other = digests(CONFIG), digests(config)
    assert one.keys() == other.keys()
    return {name for name in one if one[name] != other[name]}


@pytest.mark.parametrize("part", PARTS)
def test_every_value_of_the_configuration_counts(part: str) -> None:
    """Each is replaced by one that no flag could give."""
    for name in values_of(getattr(CONFIG, part)):
        assert differing(changed(part, **{name: "other"})) == {f"{part}.{name}"}


@pytest.mark.parametrize("part", PARTS)
def test_a_name_stands_for_one_value(part: str) -> None:
    own: Any = getattr(CONFIG, part)
    kind: Any = type(own)
    nodes = kinds_in(kind)
    named = sum(len(dataclasses.fields(node)) for node in nodes) - (len(nodes) - 1)
    assert len(values_of(own)) == named


@pytest.mark.parametrize(
    ("part", "name", "of_path"),
    [
        ("parallel", "schedule_file", lambda path: path),
        ("parallel", "measured_costs", lambda path: path),
        ("data", "blend", lambda path: ((0.5, path), (1.5, path))),
        ("data", "data_cache_path", lambda path: path),
        ("log", "profile_dir", lambda path: path),
        ("log", "record_timeline", lambda path: path),
        ("log", "save_measured_costs", lambda path: path),
    ],
)
def test_paths_may_differ_by_machine_but_not_whether_there_is_one(
    part: str, name: str, of_path: Any
) -> None:
    here, there = (changed(part, **{name: of_path(Path(p))}) for p in ("/a/here", "there"))
    assert digests(here) == digests(there)
    assert differing(changed(part, **{name: None})) | differing(here) == {f"{part}.{name}"}


def test_equal_sets_do_not_differ_by_their_order() -> None:
    """Hashes of words are drawn anew in every process; those of numbers need a collision."""
    one, other = frozenset((0, 8)), frozenset((8, 0))
    assert one == other
    assert list(one) != list(other)
    of_one, of_other = (
        changed("train", recomputation=Recomputation(cast("frozenset[Part]", numbers)))
        for numbers in (one, other)
    )
    assert digests(of_one) == digests(of_other)
    assert differing(of_one) == {"train.recomputation"}


def test_another_plan_differs_and_so_does_one_plan_with_other_costs() -> None:
    run_plan = make_run_plan(CONFIG)
    own = run_digests(CONFIG, run_plan)
    assert own.keys() >= PLAN_DIGESTS
    gpipe = make_run_plan(changed("parallel", pipeline_schedule="gpipe"))
    moved = dataclasses.replace(run_plan, layers=(3, 1))
    slow = {kind: 10.0 if kind in ("F", "T") else 0.1 for kind in run_plan.costs.passes}
    costly = dataclasses.replace(run_plan, costs=Costs(slow, {"X": 30.0}))
    for other, names in (
        (gpipe, {"plan", "order of communication in training"}),
        (moved, {"layers of the stages"}),
        (costly, {"order of communication in training"}),
    ):
        found = run_digests(CONFIG, other)
        assert {n for n in own if own[n] != found[n]} & PLAN_DIGESTS >= names
    assert own["plan"] == run_digests(CONFIG, costly)["plan"]


def test_other_turns_of_a_pair_differ() -> None:
    plan = Plan.from_text("microbatches 2\nstages 0.0\nvocabulary none\n0: F0 F1|B0 B1\n")
    orders = (None, TurnOrder("F", (1, 2)), TurnOrder("B", (1, 2)), TurnOrder("F", (2, 1)))
    pair = Pass("F", 1), Pass("B", 0)
    found = {_text(Program(plan, ((Run(*pair, turns),),))) for turns in orders}
    assert len(found) == len(orders)


class Numbers(SampleDataset):
    """Samples of random tokens; one may be replaced."""

    seq_length, masked_token = 4, 7

    def __init__(self, samples: int, other: int | None = None) -> None:
        self._tokens = np.random.RandomState(0).randint(0, 9, (samples, self.seq_length + 1))
        if other is not None:
            self._tokens[other] += 1

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, index: int, out: NDArray[np.int64]) -> None:
        out[:] = self._tokens[index]


def of_data(
    train: Numbers, valid: Numbers | None = None, rampup: Rampup | None = None
) -> dict[str, str]:
    """Digests of two iterations of three microbatches of two samples, or of fewer at the start."""
    config = changed("train", micro_batch_size=2, global_batch_size=6, train_iters=2, rampup=rampup)
    train_loader = MicrobatchLoader(train, 2, 3)
    evaluated = {} if valid is None else {"validation": MicrobatchLoader(valid, 2, 3)}
    found = data_digests(config.train, Data(train_loader, evaluated))
    assert train_loader.consumed_samples == 0, "training begins at the beginning all the same"
    return found


@pytest.mark.parametrize("other", [0, 5, 6, 11])
def test_other_data_differ(other: int) -> None:
    plain = of_data(Numbers(12), Numbers(12))
    assert of_data(Numbers(12), Numbers(12)) == plain
    assert of_data(Numbers(12, other), Numbers(12))["training data"] != plain["training data"]
    of_evaluation = of_data(Numbers(12), Numbers(12, other % 6))
    assert of_evaluation["training data"] == plain["training data"]
    assert of_evaluation["validation data"] != plain["validation data"]
    assert of_data(Numbers(12)).keys() == {"training data"}


@pytest.mark.parametrize("other", [0, 1, 2, 3])
def test_a_run_may_end_before_a_batch_has_its_full_size(other: int) -> None:
    """Two iterations of 2 samples, where batches grow to 6: the data are these 4 samples."""
    rampup = Rampup(2, 2, 8)
    assert of_data(Numbers(4, other), rampup=rampup) != of_data(Numbers(4), rampup=rampup)


def of_prompts(end: int | None, *tokens: tuple[int, ...]) -> dict[str, str]:
    prompts = Prompts(Words.ids(60, end), tuple(map(str, tokens)), tokens)
    config = changed("train", micro_batch_size=2, global_batch_size=6, train_iters=2)
    return data_digests(config.train, Data(MicrobatchLoader(Numbers(12), 2, 3), prompts=prompts))


@pytest.mark.parametrize(
    ("end", "tokens"), [(60, [(1, 2), (4,)]), (60, [(1, 2)]), (None, [(1, 2), (3,)])]
)
def test_other_prompts_differ_and_so_do_prompts_whose_texts_end_elsewhere(
    end: int | None, tokens: list[tuple[int, ...]]
) -> None:
    """A rank whose texts end earlier would leave the others waiting."""
    own = of_prompts(60, (1, 2), (3,))
    assert disagreement([own, of_prompts(60, (1, 2), (3,))]) is None
    message = disagreement([own, of_prompts(end, *tokens)])
    assert message is not None
    assert message.startswith("prompts of rank 1 differ")
    assert "--generate-prompts-file" in message


@pytest.mark.parametrize(
    ("by_rank", "words"),
    [
        ([{"plan": "a"}] * 3, None),
        (
            [{"model.num_layers": "a", "plan": "a"}, {"model.num_layers": "b", "plan": "b"}],
            "model.num_layers, plan of rank 1 differ same command line",
        ),
        (
            [{"plan": plan, "training data": "a"} for plan in "abb"],
            "plan of rank 1, 2 differ --schedule-file --save-plan",
        ),
        (
            [{"plan": "a", "training data": x} for x in "aab"],
            "training data of rank 2 differ same --data-path",
        ),
        (
            [
                {"train.seed": "a", "plan": "a"},
                {"train.seed": "a", "plan": "b"},
                {"train.seed": "b"},
            ],
            "plan of rank 1; train.seed, plan of rank 2 differ same command line",
        ),
        (
            [{"plan": "a", "GPU that draws initial weights": x} for x in "ab"],
            "GPU that draws initial weights of rank 1 differ --use-cpu-initialization",
        ),
    ],
)
def test_the_message_names_what_differs_where_and_the_first_way_out(
    by_rank: list[dict[str, str]], words: str
) -> None:
    message = disagreement(by_rank)
    if words is None:
        assert message is None
        return
    assert message is not None
    position = 0
    for word in words.split():
        position = message.find(word, position)
        assert position >= 0, f"no {word!r} in its place in: {message}"


def test_gpus_that_draw_must_be_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of a GPU has its name and fewer multiprocessors, and spreads numbers otherwise."""
    kinds = [("NVIDIA H100", 132), ("NVIDIA H100", 132), ("NVIDIA H100", 60), ("NVIDIA H200", 132)]

    def properties(local_rank: int) -> SimpleNamespace:
        name, count = kinds[local_rank]
        return SimpleNamespace(
            name=name, multi_processor_count=count, max_threads_per_multi_processor=2048
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    config = changed("parallel", device="cuda")
    found = [gpu_digests(config, local_rank) for local_rank in range(4)]
    assert disagreement(found[:2]) is None
    message = disagreement(found)
    assert message is not None
    assert "of rank 2, 3 differ" in message
    on_cpu = dataclasses.replace(config.train, use_cpu_initialization=True)
    assert gpu_digests(dataclasses.replace(config, train=on_cpu), 3) == {}
    assert gpu_digests(CONFIG, 3) == {}, "CPUs draw alike"
    for must_load in (False, True):
        checkpoint = CheckpointSettings(load=Path("saved"), exit_on_missing_checkpoint=must_load)
        loading = dataclasses.replace(config, checkpoint=checkpoint)
        assert (gpu_digests(loading, 3) == {}) == must_load


@pytest.mark.parametrize("odd", [None, 0, 2])
def test_every_rank_comes_to_the_same_verdict(odd: int | None) -> None:
    store = dist.HashStore()

    def verdict(rank: int) -> str:
        own = {"train.seed": "other" if rank == odd else "same"}
        try:
            check_agreement(Rendezvous(store, rank, 3), own)
        except UserError as error:
            return str(error)
        return "agreed"

    with ThreadPoolExecutor(3) as threads:
        verdicts = set(threads.map(verdict, range(3)))
    assert len(verdicts) == 1
    assert (verdicts == {"agreed"}) == (odd is None)
