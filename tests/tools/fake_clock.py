"""A clock that only sleeping moves, and links whose communications have a price."""

from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.gpus import gpu

CLUSTER = Cluster(gpu("H200").rates, gpu("H200").links())


class FakeTime:
    """A clock that only sleeping moves, and looking at it by a tick."""

    TICK = 1e-9

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        self.now += self.TICK
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
