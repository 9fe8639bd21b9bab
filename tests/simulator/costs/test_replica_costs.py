"""Bytes and steps of the exchange are those of a ring that is played through, send by send."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from megatron.simulator.costs.collective_time import Path
from megatron.simulator.costs.replicas import Replicas

PARAMETERS = 5040
"""Divided by all numbers of replicas that are tried here."""


@dataclass
class Ring:
    """Replicas that pass parts of a vector on to the next one; counts what each has sent."""

    vectors: list[list[int]]
    steps: int = 0
    sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sent = [0] * len(self.vectors)

    def reduce_scatter(self) -> None:
        self._pass_on(0, lambda old, came: old + came)

    def all_gather(self) -> None:
        self._pass_on(1, lambda old, came: came)

    def _pass_on(self, ahead: int, combine: Callable[[int, int], int]) -> None:
        d = len(self.vectors)
        size = len(self.vectors[0]) // d
        for step in range(d - 1):
            moves = []
            for rank, vector in enumerate(self.vectors):
                part = (rank + ahead - step) % d
                own = slice(part * size, (part + 1) * size)
                moves.append(((rank + 1) % d, own, vector[own]))
                self.sent[rank] += size
            for receiver, own, came in moves:
                vector = self.vectors[receiver]
                vector[own] = list(map(combine, vector[own], came))
            self.steps += 1


@pytest.mark.parametrize("d", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("gradient_bytes", [2, 4])
def test_a_ring_sends_as_many_bytes(d: int, sharded: bool, gradient_bytes: int) -> None:
    replicas = Replicas(d, sharded=sharded, gradient_bytes=gradient_bytes)
    vectors = [[rank + 3 * i for i in range(PARAMETERS)] for rank in range(d)]
    sums = [sum(column) for column in zip(*vectors, strict=True)]
    ring = Ring(vectors)
    ring.reduce_scatter()
    gathered = Ring(ring.vectors)
    gathered.all_gather()
    assert gathered.vectors == [sums] * d
    steps = ring.steps + (0 if sharded else gathered.steps)
    link = Path(bandwidth=8.0, latency=0.25)
    for sent, more in zip(ring.sent, gathered.sent, strict=True):
        reduced = gradient_bytes * (sent if sharded else sent + more)
        assert replicas.reduced_bytes(PARAMETERS) == pytest.approx(reduced)
        assert replicas.gathered_bytes(PARAMETERS) == pytest.approx(2 * more if sharded else 0)
        assert replicas.reduction([PARAMETERS], link).times == pytest.approx([reduced / 8])
    assert replicas.reduction([PARAMETERS], link).latency == pytest.approx(steps / 4)
    gathering = replicas.gathering([PARAMETERS], link).latency
    assert gathering == pytest.approx(gathered.steps / 4 if sharded else 0)


def test_all_reduce_is_twice_d_minus_1_over_d_and_sharding_halves_it() -> None:
    whole, sharded = Replicas(4), Replicas(4, sharded=True)
    assert whole.reduced_bytes(100) == pytest.approx(2 * 3 / 4 * 400)
    assert sharded.reduced_bytes(100) == pytest.approx(3 / 4 * 400)
    assert sharded.gathered_bytes(100) == pytest.approx(3 / 4 * 200)
    assert (whole.optimizer_parts, sharded.optimizer_parts) == (1, 4)


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan")])
def test_a_link_moves_something(bandwidth: float) -> None:
    with pytest.raises(ValueError, match=r"bandwidth of .* above 0"):
        Path(bandwidth)


@pytest.mark.parametrize("latency", [-1.0, float("inf"), float("nan")])
def test_a_latency_is_a_time(latency: float) -> None:
    with pytest.raises(ValueError, match=r"latency of .* 0 or more"):
        Path(1.0, latency)


def test_there_is_a_replica() -> None:
    with pytest.raises(ValueError, match="0 replicas"):
        Replicas(0)
