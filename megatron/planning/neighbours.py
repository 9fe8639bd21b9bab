"""Settings similar to the settings of a run that does not fit.

They differ in the schedule, the treatment of the vocabulary, the size of microbatches, the slices
of microbatches, the activations that are kept, on the GPU or on its host, or the types of sums
(``holding_less.py``). A setting is counted when its candidate is first asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Final

from megatron.config.offload import ALL_CHUNKS, OFFLOAD
from megatron.config.parallel_config import ParallelConfig
from megatron.config.recompute import EVERY_LAYER
from megatron.config.run_config import RunConfig
from megatron.config.train import TrainConfig
from megatron.layers.recompute import Recomputation
from megatron.parallel.context import CONTEXT_EXCHANGES, ContextExchange
from megatron.planning.candidate import Candidate
from megatron.planning.holding_less import holding_less
from megatron.planning.run_plan import asked, candidates, schedules_with_stages
from megatron.schedules.catalogue import OF_EVERY_SHAPE, PAIRED_SCHEDULES, SCHEDULES, TRAITS
from megatron.schedules.from_block import promised
from megatron.schedules.treatments import TREATMENTS

_LEAST_DELAYED: Final = min(
    (known for known in TREATMENTS.values() if known.is_sharded and not known.synchronous),
    key=lambda known: known.delay,
)
"""The sharded treatment, with overlapped barriers, that adds the fewest microbatches in flight."""


_ON_ONE_RANK: Final = OF_EVERY_SHAPE[0]
"""The only schedule worth a look on one pipeline rank: a chunk for each rank, the least held."""


@dataclass(frozen=True)
class Setting:
    """A run like the one that was asked for.

    Attributes:
        schedule: its schedule; empty if the run has the same and no other is worth a look.
        others: all other flags that differ, or may differ.
        make: returns its candidate, whose work has to be counted for that.
    """

    schedule: str
    others: str
    make: Callable[[], Candidate] = field(repr=False, compare=False)

    @cached_property
    def candidate(self) -> Candidate:
        """The run with its schedule, which is not planned yet.

        Raises:
            ValueError: the schedule cannot train the model, which only the count has shown.
        """
        return self.make()

    @property
    def flags(self) -> str:
        """The flags of the schedule, of the treatment, and of all else that differs."""
        named = [f"--pipeline-schedule {self.schedule}"] * bool(self.schedule)
        return " ".join([*named, *[self.others] * bool(self.others)])

    @property
    def promised(self) -> float:
        """The most microbatches in flight on a rank, as the schedule promises them."""
        request = self.candidate.request
        known = SCHEDULES.get(request.schedule)
        if known is None:
            return request.memory_limit or request.ranks
        return min(promised(request, known), request.microbatches)

    @property
    def expected(self) -> float:
        """A guess of the fullest rank's bytes; only the order of the settings depends on it."""
        least = self.candidate.least_memory
        return least.static + max(self.promised, 1.0) * (least.peak - least.static)


def neighbours(config: RunConfig) -> Iterator[Setting]:
    """Yield settings that may hold less than the run.

    The run's own schedule comes first, with the changes of ``holding_less``. Then comes every
    schedule with the run's treatment of the vocabulary and with ``_LEAST_DELAYED``. Settings with
    slices or with activations on the host come last, because they take longest to count, and the
    time to look at settings is limited.

    On one pipeline rank no schedule idles, 1F1B holds one microbatch, the least, and no treatment
    splits the vocabulary further. So only 1F1B with the run's treatment is yielded.
    """
    if config.parallel.pipeline_size == 1:
        yield from _on_one_rank(config)
        return
    yield from _holding_less(config)
    treatments = dict.fromkeys((config.parallel.vocab_parallel, _LEAST_DELAYED.name))
    spread = list[tuple[str, str]]()
    for difference, train in _trainings(config.train):
        for treatment in treatments:
            run = replace(config, train=train, parallel=_under(config.parallel, treatment))
            for schedule in schedules_with_stages(run):
                others = _words(config, treatment, difference)
                yield Setting(schedule, others, partial(_candidate, run, schedule))
                spread += [] if difference else [(schedule, treatment)]
    tried = {config.parallel.pipeline_schedule, *OF_EVERY_SHAPE}.difference(PAIRED_SCHEDULES)
    for difference, variant in _layouts(config):
        for schedule, treatment in spread:
            if schedule in tried:
                run = replace(variant, parallel=_under(variant.parallel, treatment))
                yield from _moved(run, schedule, _words(config, treatment, difference))


def _on_one_rank(config: RunConfig) -> Iterator[Setting]:
    """Yield the settings of a run on one pipeline rank; ``neighbours`` has the reason."""
    own = config.parallel
    named = "" if own.pipeline_schedule == _ON_ONE_RANK else _ON_ONE_RANK
    variants = [(words, replace(config, train=train)) for words, train in _trainings(config.train)]
    for difference, run in (*variants, *holding_less(config), *_layouts(config)):
        if named or difference:  # the others are the run itself
            one = replace(run, parallel=_under(run.parallel, own.vocab_parallel))
            yield Setting(named, difference.strip(), partial(_candidate, one, _ON_ONE_RANK))


def _candidate(run: RunConfig, schedule: str) -> Candidate:
    [found] = candidates(run, names=(schedule,))
    return found


def _holding_less(config: RunConfig) -> Iterator[Setting]:
    """Yield the run, or all runs that its ``auto`` compares, with changes that hold less."""
    for own in [config.taking(own) for own in config.alternatives] or [config]:
        for words, run in holding_less(own):
            named = run.parallel.pipeline_schedule
            if TRAITS[named].compares:
                for schedule in schedules_with_stages(run):
                    yield Setting(schedule, words, partial(_candidate, run, schedule))
            else:
                yield Setting(named, words, partial(_only, run))


def _only(run: RunConfig) -> Candidate:
    [found] = asked(run)
    return found


def _under(parallel: ParallelConfig, treatment: str) -> ParallelConfig:
    """Return the layout under a treatment of the vocabulary, without limits and files of plans."""
    parallel = replace(
        parallel,
        vocab_parallel=treatment,
        memory_limit=None,
        recompute_ahead=None,
        schedule_file=None,
        measured_costs=None,
    )
    shards = parallel.vocab_shards
    return replace(parallel, padded_vocab_size=-(-parallel.padded_vocab_size // shards) * shards)


def _words(config: RunConfig, treatment: str, difference: str) -> str:
    """Return all flags of a setting but that of its schedule."""
    without = "" if config.parallel.recompute_ahead is None else " without --recompute-ahead"
    return f"--vocab-parallel {treatment}{difference}{without}"


def _layouts(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield runs with other slices, or with activations on the host, and the flags that differ.

    Each is yielded with layers as in the run, and with layers that are computed again.
    """
    own = config.parallel
    if own.offloaded is not None:  # slices beside it are not tried
        return
    layouts = list[tuple[str, ParallelConfig]]()
    for slices, strategy, exchanges in config.could_slice:
        if slices != own.num_seq_splits:
            words = f" --num-seq-splits {slices}"
            if (strategy, own.seq_split_strategy) != ("uniform", "uniform"):
                words += f" --seq-split-strategy {strategy}"
            cut = replace(own, num_seq_splits=slices, seq_split_strategy=strategy)
            layouts += _exchanging(words, cut, exchanges)
    if config.could_offload:
        layouts.append((f" {OFFLOAD}", replace(own, offloaded=ALL_CHUNKS)))
    for words, parallel in layouts:
        yield words, replace(config, parallel=parallel)
        if not config.train.recomputation.group:
            train = replace(config.train, recomputation=Recomputation(group=1))
            yield f"{words} {EVERY_LAYER}", replace(config, parallel=parallel, train=train)


def _exchanging(
    words: str, cut: ParallelConfig, exchanges: Sequence[ContextExchange]
) -> Iterator[tuple[str, ParallelConfig]]:
    """Yield a layout with slices; if its ranks make a ring, with each exchange that is no ring."""
    if cut.context_size == 1 or not CONTEXT_EXCHANGES[cut.context_exchange].has_ring:
        yield words, cut
        return
    for exchange in exchanges:
        other = replace(cut, context_exchange=exchange, context_heads_size=1)
        yield f"{words} --cp-comm-type {exchange}", other


def _moved(run: RunConfig, schedule: str, others: str) -> Iterator[Setting]:
    """Yield a setting; if it moves activations of all chunks, also one that moves half of them."""
    yield Setting(schedule, others, partial(_candidate, run, schedule))
    given = run.parallel.virtual_stages if TRAITS[schedule].takes_chunks else None
    half = (given or SCHEDULES[schedule].chunks) // 2
    if run.parallel.offloaded is not None and half:
        fewer = replace(run, parallel=replace(run.parallel, offloaded=half))
        flags = others.replace(OFFLOAD, f"{OFFLOAD} --offload-chunk-num {half}")
        yield Setting(schedule, flags, partial(_candidate, fewer, schedule))


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
