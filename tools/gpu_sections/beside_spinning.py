"""A product beside kernels that spin: what a collective that waits costs the work beside it."""

from collections.abc import Callable
from typing import Final

import torch

from tools.gpu_sections.links import leaving_free
from tools.gpu_sections.peers import Peers
from tools.gpu_sections.timing import Scale, Section, seconds_of, table

SPINS: Final = (1, 2, 4, 16)
"""Thread blocks of one kernel that spins beside a product."""

_SPIN_SECONDS: Final = 0.8
_PROBE_SECONDS: Final = 5e-3


def product_beside_blocks(scale: Scale, peers: Peers) -> Section:
    """Time a product beside kernels that spin.

    Raises:
        RuntimeError: if such a kernel does not last its time, so that all else would say nothing.
    """
    if peers.spinner is None:
        return Section(["", "On a CPU nothing spins: waits sleep."], {})
    lasted = _probe(peers)
    if not 0.9 < lasted / _PROBE_SECONDS < 1.2:
        raise RuntimeError(
            f"a kernel that should spin {_PROBE_SECONDS:g} s took {lasted:g} s: the GPU's clock "
            "is not in nanoseconds, or does not advance"
        )
    n, h, o = (64, 64, 56) if scale.small else (8192, 8192, 7168)
    x, w, out = scale.drawn(n, h), scale.drawn(h, o), scale.drawn(n, o)

    def multiply() -> object:
        return torch.mm(x, w, out=out)

    alone = seconds_of(scale, multiply)
    rows = []
    for blocks in SPINS:
        beside = _beside(scale, peers, blocks, multiply)
        with leaving_free(blocks):
            room = seconds_of(scale, multiply)
            both = _beside(scale, peers, blocks, multiply)
        rows.append((blocks, beside / alone, room / alone, both / alone))
        print(f"a product beside {blocks} blocks: {beside / alone:.3f} of its time", flush=True)
    head = ("blocks", "beside them", "leaving so many free", "both")
    said = (
        f"A product [{n}, {h}] x [{h}, {o}], {1e6 * alone:.4g} us alone, by cuBLAS; times relative "
        f"to it. A kernel planned for {1e3 * _PROBE_SECONDS:g} ms took {1e3 * lasted:.4g} ms."
    )
    values = {
        "product_s": alone,
        "beside_blocks": [dict(zip(head, row, strict=True)) for row in rows],
    }
    return Section(["", said, "", *table(head, rows)], values)


def _probe(peers: Peers) -> float:
    """Return the seconds of a kernel that should spin for ``_PROBE_SECONDS``, run once before."""
    word = torch.zeros(1 << 16, device=peers.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    peers.spinner.begin()
    for _ in range(2):
        begin.record()
        peers.spinner.launch(1, 0.0, _PROBE_SECONDS, word, word)
        end.record()
        torch.cuda.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return 1e-3 * milliseconds


def _beside(scale: Scale, peers: Peers, blocks: int, multiply: Callable[[], object]) -> float:
    """Return the seconds of a product while a kernel of so many blocks spins.

    Raises:
        RuntimeError: if the kernel has ended before.
    """
    word, stream = torch.zeros(1 << 16, device=peers.device), torch.cuda.Stream(priority=-1)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        peers.spinner.launch(blocks, 0.0, _SPIN_SECONDS, word, word)
    done = stream.record_event()
    found = seconds_of(scale, multiply)
    if done.query():
        raise RuntimeError(f"the products took longer than {_SPIN_SECONDS:g} s")
    torch.cuda.synchronize()
    return found
