"""The time of Muon's updates on every rank, priced so that a second is a FLOP."""

from dataclasses import replace
from math import prod
from typing import Literal, cast

from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.planning.count.run import count_ranks
from megatron.planning.matrix_steps import matrix_steps
from megatron.planning.run_buckets import run_buckets
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.schedules.plan import plan_of_one
from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.count import Work

JOB = Job(GPTOptions(num_layers=4, vocab_size=64), micro_batch_size=1, microbatches=8, iterations=1)


class ByFlops:
    """A price: every FLOP takes a second, and nothing else takes time."""

    def seconds(self, work: Work) -> float:
        return work.flops


def config_of(optimizer: Literal["adam", "muon"], replicas: int = 1) -> RunConfig:
    sharded = replicas > 1
    config = JOB.config(Layout(2, "none", "1f1b", replicas=replicas, sharded=sharded))
    return replace(config, optimizer=replace(config.optimizer, optimizer=optimizer))


def steps_of(config: RunConfig) -> list[float]:
    run_plan, by_flops = make_run_plan(config), cast(Cluster, ByFlops())
    counts = count_ranks(config, plan_of_one(run_plan.plan), run_plan.layers)
    buckets = run_buckets(config, run_plan) if config.parallel.reduces_gradients else []
    return matrix_steps(config, by_flops, counts, buckets)


def flops(shape: tuple[int, ...], name: str) -> int:
    """Return the FLOPs of Newton-Schulz; queries, keys and values are three square matrices."""
    if name.endswith("linear_qkv.weight"):
        return 3 * flops((shape[1], shape[1]), "")
    m, n = min(shape), max(shape)
    return 5 * (4 * m * m * n + 2 * m**3)


def by_hand(config: RunConfig) -> list[list[int]]:
    """Return the FLOPs of the matrices that each replica updates, for every pipeline rank."""
    found = []
    for own in run_buckets(config, make_run_plan(config)):
        flat = [0] * own.replicas
        for layout, named in own.laid_out:
            for index, (name, shape) in enumerate(named):
                if len(shape) == 2 and "word_embeddings" not in name and "output" not in name:
                    start = layout.starts[index]
                    [owner] = [
                        k
                        for k in range(own.replicas)
                        if layout.bounds[k] <= start and start + prod(shape) <= layout.bounds[k + 1]
                    ]
                    flat[owner] += flops(shape, name)
        found.append(flat)
    return found


def test_a_rank_updates_all_its_matrices() -> None:
    found, shards = steps_of(config_of("muon")), by_hand(config_of("muon", replicas=2))
    assert found == [sum(own) for own in shards]
    assert min(found) > 0


def test_the_slowest_replica_of_a_sharded_optimizer_counts() -> None:
    config = config_of("muon", replicas=2)
    found, shards = steps_of(config), by_hand(config)
    assert found == [max(own) for own in shards]
    assert all(own < sum(both) for own, both in zip(found, shards, strict=True))


def test_adam_has_no_such_updates() -> None:
    assert steps_of(config_of("adam")) == [0.0, 0.0]
    assert steps_of(config_of("adam", replicas=2)) == [0.0, 0.0]
