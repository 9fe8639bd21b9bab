"""The lines of a dry run on replicas: bytes, seconds, and the effect of other flags."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from megatron.parallel.settings import ReplicaSettings
from megatron.planning.forecast_run import RunForecast, forecast_run
from megatron.schedules.counted import counted
from megatron.simulator.draw.palette import MEANINGS
from megatron.simulator.exchange import Exchanges
from megatron.simulator.units import MEMORY, TIME

UNEVEN: Final = 0.03
"""A replica's part is reported if it exceeds the mean part by more than this share of the mean."""


def replica_lines(found: RunForecast, exchanges: Exchanges) -> Iterator[str]:
    """Yield the lines on the replicas of a forecast."""
    link, count = exchanges.link, exchanges.replicas.count
    shared = found.config.parallel.context.size > 1
    alike = f"{count} ranks with the same parameters" if shared else counted(count, "replica")
    yield (
        f"{alike}: a rank sends up to {exchanges.bytes_sent / 1e9:.3g} GB an "
        f"iteration, at {link.bandwidth / 1e9:g} GB/s and {1e6 * link.latency:g} us a step"
    )
    for kind, own in found.hidden.items():
        alone = TIME.write(own.alone)
        yield f"{kind} ({MEANINGS[kind]}): {alone}, of which {own.share:.0%} is hidden"
    yield f"padding of the buckets: {found.padding:.2%} of a rank's parameters at most"
    if found.config.parallel.replicas.shard_optimizer and found.uneven > UNEVEN:
        yield (
            f"Muon's matrices are whole: one replica updates {found.uneven:.0%} more parameters "
            "than the mean, at most"
        )
    for named, replicas in _alternatives(found):
        parallel = replace(found.config.parallel, replicas=replicas)
        config = replace(found.config, parallel=parallel)
        other = forecast_run(config, found.run_plan, found.gpu)
        yield (
            f"{named}: iteration {TIME.write(other.outcome.seconds)}, fullest rank "
            f"{MEMORY.write(max(other.outcome.peak))}"
        )


def _alternatives(found: RunForecast) -> Iterator[tuple[str, ReplicaSettings]]:
    """Yield other configurations of the replicas, each with one flag added or left out."""
    now = found.config.parallel.replicas
    flags = {"--overlap-grad-reduce": "overlap", "--use-distributed-optimizer": "shard_optimizer"}
    if now.shard_optimizer and not found.config.optimizer.post_validation:
        flags["--overlap-param-gather"] = "overlap_gather"
    for flag, name in flags.items():
        given = getattr(now, name)
        turned: dict[str, Any] = {name: not given}
        other = replace(now, **turned)
        if not other.shard_optimizer:
            other = replace(other, overlap_gather=False, gathers_eight_bits=False)
        yield f"{'without' if given else 'with'} {flag}", other
