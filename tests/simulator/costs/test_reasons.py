"""A price taken apart: the seconds of a work by kernels and by the ranks that it waits for."""

from typing import Final

import pytest

from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.count import AWAIT, Begin, Collective, Launch, Step, Work, product
from megatron.simulator.costs.gpus import gpu
from megatron.simulator.costs.reasons import WORK_REASONS, ByReason, Only

CLUSTER: Final = Cluster(gpu("H100").rates, gpu("H100").links())
PRODUCT: Final = product(4096, 4096, 4096)
ATTENTION: Final = Launch("attention", 10**8, 10**12, executed=10**12 // 2)
NORM: Final = Launch("norm", 10**8)
LARGE: Final = Collective("all_reduce", "tensor", 8, 10**9)
SMALL: Final = Collective("all_to_all", "experts", 8, 10**6)
RING: Final = Collective("shift", "context_ring", 8, 10**6)


def spent(*steps: Step) -> dict[str, float]:
    """The seconds of steps by reason; those of 0 s are left out."""
    found = ByReason(CLUSTER).of(Work(steps))
    assert sum(found.values()) == pytest.approx(CLUSTER.seconds(Work(steps)), rel=1e-12)
    return {reason: seconds for reason, seconds in found.items() if seconds}


def alone(step: Launch | Collective) -> float:
    """The seconds of a step."""
    return CLUSTER.seconds(Work((step,)))


def test_kernels_by_kind() -> None:
    assert spent(PRODUCT, ATTENTION, NORM, PRODUCT) == pytest.approx(
        {
            "products": 2 * alone(PRODUCT),
            "attention": alone(ATTENTION),
            "other kernels": alone(NORM),
        }
    )


def test_collectives_that_the_work_waits_for_at_once() -> None:
    assert spent(LARGE, PRODUCT, SMALL, RING) == pytest.approx(
        {
            "products": alone(PRODUCT),
            "tensor": alone(LARGE),
            "experts": alone(SMALL),
            "context": alone(RING),
        }
    )


def test_of_a_collective_beside_kernels_only_the_exposed_part_counts() -> None:
    """It ends later than the product; without its slow-down, by their difference."""
    assert alone(LARGE) > 2 * alone(PRODUCT)
    found = spent(Begin((LARGE,)), PRODUCT, AWAIT)
    assert found == pytest.approx(
        {"products": alone(PRODUCT), "tensor": alone(LARGE) - alone(PRODUCT)}
    )


def test_a_hidden_collective_costs_its_crowding() -> None:
    assert alone(RING) < alone(PRODUCT) / 10
    found = spent(Begin((RING,)), PRODUCT, AWAIT)
    assert 0 < found["context"] < alone(RING)
    assert found["products"] == pytest.approx(alone(PRODUCT))


def test_a_hidden_and_an_exposed_one() -> None:
    found = spent(Begin((RING,)), PRODUCT, AWAIT, LARGE)
    assert found["tensor"] == pytest.approx(alone(LARGE))
    assert 0 < found["context"] < alone(RING)


def test_nothing_takes_no_time() -> None:
    assert spent() == {}


def test_prices_of_single_reasons_add_up() -> None:
    work, by_reason = Work((PRODUCT, LARGE, NORM)), ByReason(CLUSTER)
    prices = [Only(by_reason, reason) for reason in WORK_REASONS]
    assert sum(price.seconds(work) for price in prices) == pytest.approx(CLUSTER.seconds(work))
    assert {price.message(1e9, crossing=True) + price.copy(1e9) for price in prices} == {0.0}
