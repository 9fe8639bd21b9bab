"""A line on a job: which ranks share a machine, and how fast the links between them are."""

from megatron.run.parallel_config import ParallelConfig
from megatron.schedules.counted import counted
from megatron.simulator.costs.collective_time import Path


def links_in_words(parallel: ParallelConfig) -> str:
    """Return the line on a job."""
    found, links = parallel.domains, parallel.links
    machines, own, kinds = parallel.placement.machines, "machine", "machines"
    near = "" if links is None else f", {_speed(links.link)} from rank to rank"
    if machines == 1:
        return f"links: all ranks are in one machine{near}"
    if found.machines == 1:
        return f"links: NVLink connects all ranks, in {machines} machines{near}"
    if found.machines < machines:
        own, kinds = "domain of NVLink", "domains of NVLink"
    speeds = ""
    if links is not None:
        speeds = f", {_speed(links.link)} within and {_speed(links.network)} between them"
    hops = counted(parallel.pipeline.size - 1, "hop")
    beyond = [
        name
        for name, leaves in (
            ("ranks that share a layer", found.tensor),
            ("ranks that share a sequence", found.context),
            ("replicas", found.data),
        )
        if leaves
    ]
    others = f"; {' and '.join(beyond)} are in different {kinds}" if beyond else ""
    return (
        f"links: {found.machines} {kinds} of {found.ranks_per_machine} ranks{speeds}; "
        f"ranks are numbered {parallel.replicas.order}, so {found.hops} of the {hops} from a "
        f"pipeline rank to the next leave a {own}{others}"
    )


def _speed(link: Path) -> str:
    return f"{link.bandwidth / 1e9:g} GB/s and {link.latency * 1e6:g} us"
