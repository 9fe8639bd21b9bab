"""How many transformer layers every stage of the pipeline has.

``LayerDistribution`` holds the user's choice. ``distribute`` turns it into a number for every
stage, in the order in which the data flows. ``redis`` and ``cost`` need the times of layers, which
only the planner knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

DistributionKind = Literal["even", "remainder", "cost", "redis", "explicit"]


@dataclass(frozen=True)
class LayerDistribution:
    """How transformer layers are spread over the stages.

    Attributes:
        kind: ``even``: equally many layers on every stage, refused if the number does not divide;
            ``remainder``: if the number does not divide, the first stages take one more layer each;
            ``cost``: the layers of the slowest rank take as little time as possible; ``redis``:
            the same with the vocabulary layers included; ``explicit``: the numbers in ``counts``.
        first: layers of the first stage, if the user has given them, for ``even``.
        last: layers of the last stage, if the user has given them, for ``even`` and ``redis``.
        embedding_counts: the embedding counts as a layer of the first stage, for ``even``.
        loss_counts: the output layer counts as a layer of the last stage, for ``even``.
        counts: layers of every stage, for ``explicit``.
        written: the flag, with its value, that gave ``counts``; empty: --layer-distribution.
        further_stage: stage with the layers that predict further tokens, if ``written`` names it;
            ``None``: the last stage.
    """

    kind: DistributionKind = "even"
    first: int | None = None
    last: int | None = None
    embedding_counts: bool = False
    loss_counts: bool = False
    counts: tuple[int, ...] = ()
    written: str = ""
    further_stage: int | None = None

    @property
    def needs_times(self) -> bool:
        """Whether the layers of the stages depend on the times of layers."""
        return self.kind in ("cost", "redis")


def distribute(distribution: LayerDistribution, num_layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of every stage.

    Args:
        distribution: of a kind that needs no times.
        num_layers: layers of the whole model.
        stages: stages of the pipeline, all chunks of all ranks.

    Raises:
        ValueError: the layers cannot be spread in this way; the message names the flags and a way
            out.
    """
    assert not distribution.needs_times, distribution.kind
    if distribution.kind == "explicit":
        return _explicit(distribution, num_layers, stages)
    if distribution.kind == "remainder":
        each, more = divmod(num_layers, stages)
        return tuple(each + (stage < more) for stage in range(stages))
    return _even(distribution, num_layers, stages)


def check_no_rank_is_empty(
    distribution: LayerDistribution,
    stages: Sequence[tuple[int, int]],
    layers: Sequence[int],
    further_stage: int | None = None,
) -> None:
    """Refuse a distribution that leaves a rank nothing to train.

    This check is for runs whose vocabulary is not split over all ranks.

    Args:
        distribution: the distribution from which ``layers`` was made.
        stages: (rank, chunk) of every stage, in the order in which the data flows.
        layers: layers of every stage.
        further_stage: stage with the layers that predict further tokens; ``None``: there are none.

    Raises:
        ValueError: a rank has nothing to train; the message names the flags, the ranks and the ways
            out.
    """
    further = () if further_stage is None else (stages[further_stage],)
    busy = {rank for rank, _ in (stages[0], stages[-1], *further)}
    busy |= {rank for (rank, _), count in zip(stages, layers, strict=True) if count}
    empty = sorted({rank for rank, _ in stages} - busy)
    if empty:
        raise ValueError(
            f"--num-layers {sum(layers)} with {', '.join(_given(distribution))} leaves rank "
            f"{', '.join(map(str, empty))} without a layer, and nothing else to train: give every "
            "rank but those of the first and the last stage one, start fewer ranks "
            "(--pipeline-model-parallel-size), or split the vocabulary over all "
            "(--enable-vocab-parallel)"
        )


def _explicit(distribution: LayerDistribution, num_layers: int, stages: int) -> tuple[int, ...]:
    [given], counts = _given(distribution), distribution.counts
    if len(counts) != stages:
        raise ValueError(
            f"{given} names {len(counts)} stages, and this pipeline has {stages}: give the layers "
            "of every one, in the order in which the data flows"
        )
    if sum(counts) != num_layers:
        raise ValueError(
            f"{given} adds up to {sum(counts)}, not to --num-layers {num_layers}: change one of "
            "them"
        )
    return counts


def _even(distribution: LayerDistribution, num_layers: int, stages: int) -> tuple[int, ...]:
    """Spread the layers evenly over the stages without given counts.

    Vocabulary layers may count as layers.
    """
    ends = {0: distribution.first, stages - 1: distribution.last}
    decided = {stage: count for stage, count in ends.items() if count is not None}
    counted = distribution.embedding_counts + distribution.loss_counts
    left, free = num_layers + counted - sum(decided.values()), stages - len(decided)
    one_too_many = stages == 1 and distribution.first not in (None, num_layers)
    if left < 0 or one_too_many or (left % free if free else left):
        raise ValueError(_uneven(distribution, num_layers, stages, free))
    layers = [decided.get(stage, left // max(free, 1)) for stage in range(stages)]
    layers[0] -= distribution.embedding_counts
    layers[-1] -= distribution.loss_counts
    return tuple(layers)


_REMAINDER: Final = "--layer-distribution remainder"


def _uneven(distribution: LayerDistribution, num_layers: int, stages: int, free: int) -> str:
    """Return the error message for layers that do not divide, with the ways out."""
    besides = _given(distribution)
    if besides:
        return (
            f"--num-layers {num_layers} with {', '.join(besides)} cannot be spread evenly over "
            f"{stages} stages: give {_REMAINDER} in their place, or change one of them"
        )
    near = sorted({num_layers // free * free, num_layers // free * free + free} - {0})
    fault = (
        f"--num-layers {num_layers} is not divisible by the {stages} stages of the pipeline, and "
        "every stage takes as many"
    )
    numbers = " or ".join(map(str, near))
    if num_layers < stages:
        return f"{fault}: use {numbers}, or give {_REMAINDER}, which leaves stages without a layer"
    return f"{fault}: give {_REMAINDER}, or another number of layers: {numbers}"


def _given(distribution: LayerDistribution) -> list[str]:
    """Return the flags that ask for a distribution, with their values."""
    if distribution.written:
        return [distribution.written]
    named = ",".join(map(str, distribution.counts)) or distribution.kind
    redis = distribution.kind == "redis"
    last = "--final-stage-num-layers" if redis else "--decoder-last-pipeline-num-layers"
    flags = (
        ("--layer-distribution", None if distribution.kind == "even" else named),
        ("--decoder-first-pipeline-num-layers", distribution.first),
        (last, distribution.last),
        (
            "--account-for-embedding-in-pipeline-split",
            "" if distribution.embedding_counts else None,
        ),
        ("--account-for-loss-in-pipeline-split", "" if distribution.loss_counts else None),
    )
    return [f"{flag} {value}".rstrip() for flag, value in flags if value is not None]
