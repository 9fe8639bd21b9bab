"""What is known of each treatment of the vocabulary, against section 4 of arXiv 2411.05288."""

from typing import get_args

import pytest

from megatron.schedules.treatments import FP32_OF_A_TOKEN, TREATMENTS, Payload, Treatment

NAMES = ("naive", "vocab-1", "vocab-2", "interlaced")
split = pytest.mark.parametrize("treatment", [TREATMENTS[name] for name in NAMES])


def test_which_treatments_split_the_vocabulary() -> None:
    assert tuple(name for name, own in TREATMENTS.items() if own.is_sharded) == NAMES
    assert all(name == own.name for name, own in TREATMENTS.items())


def test_every_payload_has_a_size() -> None:
    assert set(FP32_OF_A_TOKEN) == set(get_args(Payload))


@pytest.mark.parametrize(
    ("name", "chain", "products"),
    [
        ("naive", "S C1 E C2 T C3", {"S": 1, "E": 0, "T": 2}),
        ("vocab-1", "S C1 T C2", {"S": 1, "E": 0, "T": 2}),
        ("vocab-2", "S C1 T", {"S": 2, "E": 0, "T": 1}),
        ("interlaced", "S C1 T C2", {"S": 1, "E": 0, "T": 2}),
    ],
)
def test_passes_and_barriers_alternate(name: str, chain: str, products: dict[str, int]) -> None:
    own = TREATMENTS[name]
    after = {barrier.after: barrier.kind for barrier in own.barriers}
    found = [part for kind in own.output_passes for part in (kind, after.get(kind)) if part]
    assert found == chain.split()
    assert own.products == products
    assert own.passes == (*own.output_passes, "IF", "IB")
    for place, part in enumerate(found):
        if part in own.output_passes and part != "S":
            assert own.barrier_before(part).kind == found[place - 1]


@split
def test_the_backward_has_its_gradient_after_the_last_barrier(treatment: Treatment) -> None:
    carried = [payload for barrier in treatment.barriers for payload in barrier.carries]
    assert carried[-1] == "gradient"
    assert carried.count("gradient") == 1
    assert treatment.barriers[-1].after == treatment.gradient_pass
    assert treatment.delay == len(treatment.barriers)


@split
def test_every_statistic_is_merged_once(treatment: Treatment) -> None:
    carried = {payload for barrier in treatment.barriers for payload in barrier.carries}
    parts = {"maximum", "sums"} if treatment.maximum_first else {"statistics"}
    assert carried == parts | {"gradient"}


def test_a_plan_knows_nothing_of_layers() -> None:
    assert TREATMENTS["redis"].in_plan == TREATMENTS["none"]
    others = [own for name, own in TREATMENTS.items() if name != "redis"]
    assert [own.in_plan for own in others] == others


@pytest.mark.parametrize("name", ["none", "redis"])
def test_a_whole_output_layer_forms_its_gradient_at_once(name: str) -> None:
    own = TREATMENTS[name]
    assert (own.passes, own.barriers, own.delay) == ((), (), 0)
    assert own.gradient_pass == "S"
