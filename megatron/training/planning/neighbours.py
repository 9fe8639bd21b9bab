"""Settings similar to the settings of a run that does not fit.

They differ in the schedule, the treatment of the vocabulary, the size of microbatches, or the
activations that are kept.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from megatron.config.recompute import EVERY_LAYER
from megatron.config.run_config import RunConfig
from megatron.config.train import TrainConfig
from megatron.layers.recompute import Recomputation
from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.treatments import TREATMENTS
from megatron.training.planning.candidate import Candidate
from megatron.training.planning.run_plan import asked, candidates

_LEAST_DELAYED: Final = min(
    (known for known in TREATMENTS.values() if known.is_sharded and not known.synchronous),
    key=lambda known: known.delay,
)
"""The sharded treatment, with overlapped barriers, that adds the fewest microbatches in flight."""


@dataclass(frozen=True)
class Setting:
    """A run like the one that was asked for.

    Attributes:
        candidate: the run with its schedule, which is not planned yet.
        others: all other flags that differ, or may differ; the schedule's flag is not among them.
    """

    candidate: Candidate
    others: str

    @property
    def flags(self) -> str:
        """The flags of the schedule, of the treatment, and of all else that differs."""
        return f"--pipeline-schedule {self.candidate.schedule} {self.others}"

    @property
    def promised(self) -> float:
        """The most microbatches in flight on a rank, as the schedule promises them."""
        request = self.candidate.request
        known = SCHEDULES.get(request.schedule)
        if known is None:
            return request.memory_limit or request.ranks
        chunks = request.chunks or known.chunks
        held = known.promise(request.ranks, request.microbatches, chunks)
        return min(held + request.treatment.delay, request.microbatches)

    @property
    def expected(self) -> float:
        """A guess of the fullest rank's bytes; only the order of the settings depends on it."""
        least = self.candidate.least_memory
        return least.static + max(self.promised, 1.0) * (least.peak - least.static)


def neighbours(config: RunConfig) -> Iterator[Setting]:
    """Yield settings that may hold less than the run.

    Every schedule is yielded with the run's treatment of the vocabulary and with
    ``_LEAST_DELAYED``. The last settings only add the recomputation of logits.
    """
    without = "" if config.parallel.recompute_ahead is None else " without --recompute-ahead"
    treatments = dict.fromkeys((config.parallel.vocab_parallel, _LEAST_DELAYED.name))
    for difference, train in _trainings(config.train):
        for treatment in treatments:
            parallel = replace(
                config.parallel,
                vocab_parallel=treatment,
                memory_limit=None,
                recompute_ahead=None,
                schedule_file=None,
                measured_costs=None,
            )
            shards = parallel.vocab_shards
            padded = -(-parallel.padded_vocab_size // shards) * shards
            parallel = replace(parallel, padded_vocab_size=padded)
            others = f"--vocab-parallel {treatment}{difference}{without}"
            with suppress(ValueError):  # no schedule has stages for the layers
                for candidate in candidates(replace(config, train=train, parallel=parallel)):
                    yield Setting(candidate, others)
    if not config.train.vocab_recompute:  # recomputed logits need no memory between S and T
        train = replace(config.train, vocab_recompute=True)
        for candidate in asked(replace(config, train=train)):
            yield Setting(candidate, "--vocab-recompute")


def _trainings(train: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Yield variants of the training that may hold less, and the flags that make the difference.

    The first variant is the training of the run. Each of the others makes one change: microbatches
    of half the size, or every layer computed again, or no products in 8 bits, which keep tensors of
    their own.
    """
    yield "", train
    batch = train.micro_batch_size
    if batch % 2 == 0:
        yield f" --micro-batch-size {batch // 2}", replace(train, micro_batch_size=batch // 2)
    if not train.recomputation.group:
        yield " " + EVERY_LAYER, replace(train, recomputation=Recomputation(group=1))
    if train.eight_bits is not None:
        yield " without --fp8-format", replace(train, eight_bits=None)
