"""How long a run is, in iterations and in samples, where batches may grow."""

from typing import NamedTuple

from megatron.config.data_flags import parse_rampup, parse_size_steps
from megatron.config.flags import TrainFlags
from megatron.data.batch_sizes import BatchSizes, Growth


class Iterations(NamedTuple):
    """How long a run is.

    Attributes:
        batch: samples of an iteration, once batches grow no more.
        total: iterations of the whole job; 0 where no length is given.
        last: the last iteration that runs now.
        samples: of all iterations of the job.
    """

    batch: int
    total: int
    last: int
    samples: int


def iterations(flags: TrainFlags) -> Iterations:
    """The run's length; samples are rounded down to whole iterations."""
    batch = flags.global_batch_size or flags.micro_batch_size
    try:
        sizes = BatchSizes(batch, growth_of(flags))
    except ValueError:  # a rule tells it
        sizes = BatchSizes(batch)
    total = flags.train_iters or sizes.iterations(flags.train_samples or 0)
    last = min(total, flags.exit_interval or total)
    return Iterations(batch, total, last, sizes.samples_of(total))


def growth_of(flags: TrainFlags) -> Growth | None:
    """Return how batches grow; ``None``: they do not. Errors as of ``parse_rampup``."""
    unit = flags.micro_batch_size
    batch = flags.global_batch_size or unit
    rampup = parse_rampup(flags.rampup_batch_size, batch, unit)
    return rampup or parse_size_steps(flags.batch_size_steps, batch, unit)
