"""A line on a job: which ranks share a machine, and how fast the links between them are."""

from megatron.config.parallel_config import ParallelConfig
from megatron.schedules.counted import counted
from megatron.simulator.costs.collective_time import Path


def links_in_words(parallel: ParallelConfig) -> str:
    """Return the line on a job."""
    found, links = parallel.placement, parallel.links
    near = "" if links is None else f", {_speed(links.link)} from rank to rank"
    if found.machines == 1:
        return f"links: all ranks are in one machine{near}"
    speeds = ""
    if links is not None:
        speeds = f", {_speed(links.link)} within and {_speed(links.network)} between them"
    hops = counted(parallel.pipeline_size - 1, "hop")
    beyond = [
        name
        for name, leaves in (
            ("ranks that share a layer", found.tensor),
            ("ranks that share a sequence", found.context),
            ("replicas", found.data),
        )
        if leaves
    ]
    others = f"; {' and '.join(beyond)} are in different machines" if beyond else ""
    return (
        f"links: {found.machines} machines of {parallel.ranks_per_machine} ranks{speeds}; ranks "
        f"are numbered {parallel.replicas.order}, so {found.hops} of the {hops} from a pipeline "
        f"rank to the next leave a machine{others}"
    )


def _speed(link: Path) -> str:
    return f"{link.bandwidth / 1e9:g} GB/s and {link.latency * 1e6:g} us"
