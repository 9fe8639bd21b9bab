"""Compare the layouts of published iterations with those that ``plan-pretraining`` proposes.

python -m tools.predictions.proposed docs/reference               # minutes
python -m tools.predictions.proposed docs/reference --rows 1268
python -m tools.predictions.proposed docs/reference --update docs/predictions.md

Both are predicted for this program, by the same model of time: the published layout with the flags
of its row, and the layout that the search finds for the same model, GPUs, batch and precision.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron.flags.command import read
from megatron.flags.declare import flag, positional
from megatron.flags.ranges import COUNT
from megatron.flags.readable import told_as_error
from megatron.planning.answer import Proposal
from megatron.planning.asked.question import question_of
from megatron.planning.propose import propose
from megatron.simulator.costs.gpus import GIB
from tools.pages.tables import percent, row, tell, update_flag
from tools.predictions.shared_runs import OF_EVERY_RUN, SHARED, SharedRun, read_shared
from tools.predictions.shared_times import SharedPrediction

HEADING: Final = (
    "| id | model, GPUs | published layout | s | proposed layout | schedule, vocabulary | s | GiB "
    "| shorter by | without a split vocabulary, s |"
)


@dataclass(frozen=True)
class Compared:
    """A published iteration beside the proposal for its model and GPUs.

    Attributes:
        run: the row.
        published: predicted seconds of this program in the published layout.
        proposed: the proposal.
        unsplit: the best proposal that leaves the vocabulary whole; ``None``: none fits.
    """

    run: SharedRun
    published: float
    proposed: Proposal
    unsplit: Proposal | None

    @property
    def gain(self) -> float:
        """How much shorter the proposal is, as a share of the published layout's time."""
        return 1 - self.proposed.seconds / self.published

    @property
    def cells(self) -> Iterator[str]:
        """The cells of ``HEADING``."""
        run, own = self.run, self.proposed
        parallel = own.config.parallel
        chunks = parallel.schedule.chunks or 1
        yield str(run.number)
        yield f"{run.name}, {run.gpus} {run.gpu.name}"
        yield f"t {run.tensor} p {run.pipeline} c {run.context} v {run.chunks} b {run.micro_batch}"
        yield f"{self.published:.4g}"
        sizes = " ".join(f"{letter} {size}" for letter, size in own.sizes.items() if letter != "d")
        yield f"{sizes} v {chunks} b {own.config.train.micro_batch_size}"
        yield f"{parallel.pipeline_schedule}, {parallel.vocab_parallel}"
        yield f"{own.seconds:.4g}"
        yield f"{own.peak / GIB:.1f}"
        yield percent(self.gain)
        yield "none fits" if self.unsplit is None else f"{self.unsplit.seconds:.4g}"


def compared(run: SharedRun) -> Compared:
    """Return a row beside the proposal for its model, GPUs, batch and precision."""
    words = (
        f"{run.model.flags}--vocab-size {run.vocab_size} --gpus {run.gpus}x{run.gpu.name} "
        f"--global-batch-size {run.global_batch} --seq-length {run.seq_length} {OF_EVERY_RUN}"
        f"{run.precision_flags}"
    )
    answer = propose(question_of(words.split(), None))
    return Compared(run, SharedPrediction(run).ours, answer.taken, answer.unsplit)


def smallest(runs: Sequence[SharedRun]) -> Iterator[SharedRun]:
    """Yield, of every dense model in bf16 on H100s, the first row with the fewest GPUs.

    Rows with more GPUs have more replicas of its layout.
    """
    found = dict[str, SharedRun]()
    for run in sorted(runs, key=lambda run: (run.gpus, run.number)):
        if run.gpu.name == "H100" and run.precision == "BF16" and not run.model.mixture:
            found.setdefault(run.model.family, run)
    yield from found.values()


@dataclass(frozen=True)
class ProposedFlags:
    """What is compared."""

    reference: Path = positional(f"Folder with {SHARED}.", "REFERENCE")
    rows: tuple[int, ...] = flag(
        (), "Only these rows, by their id.", COUNT, unset="the smallest job of each dense model"
    )
    update: Path | None = update_flag("--rows", "Also write the table into this page.")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        ValueError: for a file that is no such table, or rows that it lacks.
    """
    given = read(argv, __doc__, ProposedFlags)[ProposedFlags]
    runs, _ = read_shared(given.reference / SHARED)
    if unknown := set(given.rows).difference(run.number for run in runs):
        raise ValueError(
            f"--rows {' '.join(map(str, sorted(unknown)))}: {SHARED} has no such row that can be "
            "predicted; docs/reference/predicted_2026.csv lists the rows"
        )
    wanted = [run for run in runs if run.number in given.rows] or list(smallest(runs))
    tell({HEADING: (row(*compared(run).cells) for run in wanted)}, given.update)


if __name__ == "__main__":
    with told_as_error(ValueError):
        main()
