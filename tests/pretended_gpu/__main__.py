"""Print what the paper's models would hold on GPUs, or what the parts of an iteration launch there.

PYTHONPATH=tests python -m pretended_gpu docs/reference/paper_table5_1f1b.csv
PYTHONPATH=tests python -m pretended_gpu launches
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from pretended_gpu.one_gpu import tables
from pretended_gpu.paper_rows import rows
from pretended_gpu.pool import GpuPool, gpu_pool


def lines(what: str, pool: GpuPool) -> Iterator[str]:
    """Yield the lines of a table."""
    if what != "launches":
        yield from rows(Path(what), pool)
        return
    yield from tables(pool)


with gpu_pool() as pool:
    for line in lines(sys.argv[1], pool):
        print(line, flush=True)
