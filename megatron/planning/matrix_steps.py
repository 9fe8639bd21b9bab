"""The time in which an optimizer updates whole matrices (Muon), on every pipeline rank."""

from collections import Counter
from collections.abc import Iterator, Sequence

from megatron.planning.count.matrix_step import count_matrix_step
from megatron.planning.run_buckets import RankBuckets
from megatron.run.run_config import RunConfig
from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.count import Matrix, Parameters, RankCount, last_words


def matrix_steps(
    config: RunConfig,
    cluster: Cluster,
    counts: Sequence[RankCount],
    buckets: Sequence[RankBuckets] = (),
) -> list[float]:
    """Return the seconds that updates of whole matrices take on every pipeline rank.

    They are 0 with optimizers that update every element by itself. Of the replicas that share a
    sharded optimizer, the slowest counts.

    Args:
        config: the run.
        cluster: GPUs and links.
        counts: of the ranks, with their parameters.
        buckets: of the ranks; only a sharded optimizer needs them.
    """
    if not config.optimizer.takes_whole_matrices:
        return [0.0] * len(counts)
    sharded = config.parallel.replicas.shard_optimizer and bool(buckets)
    found = []
    for rank, count in enumerate(counts):
        own = count.parameters
        seconds = {
            matrix: cluster.seconds(count_matrix_step(config, matrix)) for matrix in {*own.shapes}
        }
        replicas = _of_replicas(own, buckets[rank]) if sharded else [Counter(own.shapes)]
        times = (sum(n * seconds[one] for one, n in some.items()) for some in replicas)
        found.append(max(times, default=0.0))
    return found


def _of_replicas(parameters: Parameters, buckets: RankBuckets) -> Iterator[Counter[Matrix]]:
    """Yield the matrices that every replica updates: each has whole ones (``bucket_layouts``)."""
    known = {(one.name, one.elements): one for one in parameters.shapes}
    for parts in buckets.parts:
        keys = ((last_words(name), size) for name, size in parts)
        yield Counter(known[key] for key in keys if key in known)
