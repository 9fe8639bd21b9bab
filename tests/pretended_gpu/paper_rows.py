"""The memory of the paper's models beside the paper's own figures.

``python -m pretended_gpu`` (``__main__.py``) prints it.
"""

from collections.abc import Iterator
from pathlib import Path

from correctness.short_runs import Layout
from pretended_gpu.paper_memory import memory, paper_config
from pretended_gpu.pool import GpuPool

from tools.predictions.measured import METHODS
from tools.predictions.paper_tables import VOCABULARIES, read_cells

RANKS = 8


def rows(published: Path, gpus: GpuPool) -> Iterator[str]:
    """Yield a table of the fullest rank of every cell."""
    yield "| sequence | method | V | allocated | dry run | paper |"
    yield "|--:|---|--:|--:|--:|--:|"
    for cell in read_cells("1f1b", published):
        if cell.gpus != RANKS:
            continue
        layout = Layout(RANKS, METHODS[cell.method.lower()])
        vocab_size = VOCABULARIES[cell.vocabulary]
        config = paper_config(layout, vocab_size, sequence=cell.seq_length, dropout=0.1)
        own = memory(config, gpus)
        assert not own.faults, own.faults
        yield (
            f"| {cell.seq_length} | {cell.method} | {cell.vocabulary} | {max(own.allocated):.2f} | "
            f"{max(own.predicted):.1f} | {cell.peak_gib:.2f} |"
        )
