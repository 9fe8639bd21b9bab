"""One line on how the ranks of a job lie in machines, and on what connects them."""

from megatron.config.run_config import ParallelConfig
from megatron.parallel.placement import placement
from megatron.schedules.counted import counted
from megatron.simulator.costs.machines import Interconnect
from megatron.simulator.costs.replicas import Link


def links_in_words(parallel: ParallelConfig, links: Interconnect) -> str:
    """Return the line.

    Args:
        parallel: the layout of the job.
        links: its links.
    """
    found = placement(parallel.grid, links.ranks)
    near = _speed(links.link)
    if found.machines == 1:
        return f"links: all ranks are in one machine, {near} from rank to rank"
    hops = counted(parallel.pipeline_size - 1, "hop")
    beyond = [
        name
        for name, leaves in (("ranks that share a layer", found.tensor), ("replicas", found.data))
        if leaves
    ]
    others = f"; {' and '.join(beyond)} are in different machines" if beyond else ""
    return (
        f"links: {counted(found.machines, 'machine')} of {links.ranks} ranks, {near} within and "
        f"{_speed(links.network)} between them; {found.hops} of the {hops} from a pipeline rank to "
        f"the next leave a machine{others}"
    )


def _speed(link: Link) -> str:
    return f"{link.bandwidth / 1e9:g} GB/s and {link.latency * 1e6:g} us"
