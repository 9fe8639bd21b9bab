"""A run as its plan has decided it, where the flags of the run leave something to its plan."""

from collections.abc import Iterator
from dataclasses import replace

from megatron.planning.memory_limit import limit_in_words
from megatron.planning.planned_run import RunPlan
from megatron.run.run_config import RunConfig
from megatron.schedules.catalogue import PAIRED_SCHEDULES


def settled(config: RunConfig, run_plan: RunPlan) -> RunConfig:
    """Return the run with the alternative for which its plan was made, and notes on that.

    If the run has no such alternative, its ranks have different command lines. Then the run stays
    as it is, and differs from that of other ranks when digests are compared.
    """
    taken = next((own for own in config.alternatives if own.taken == run_plan.taken), None)
    run = config if taken is None else config.taking(taken)
    return replace(run, notes=(*run.notes, *_notes(config, run, run_plan)))


def _notes(config: RunConfig, run: RunConfig, run_plan: RunPlan) -> Iterator[str]:
    """Yield the notes on ``run``, which is what the plan has made of ``config``."""
    if (limit := limit_in_words(run, run_plan)) is not None:
        yield limit
    pairs = config.parallel.pairs
    if pairs.joins and not run_plan.plan.pairs:
        flag = "--overlap-moe-expert-parallel-comm"
        if not pairs.overlap_moe_expert_parallel_comm:
            flag = "--tp-comm-overlap"
        yield (
            f"{flag} joins nothing: by the costs of the plan each pair "
            f"would make an iteration of {run_plan.schedule} longer; --pipeline-schedule "
            f"{' or '.join(PAIRED_SCHEDULES)} is made for pairs, others hide more if "
            "--zero-bubble-max-pending-backward allows more microbatches in flight, and all need a "
            "known GPU to tell what pairs hide"
        )
    if run is config:
        return
    note = f"auto takes {', '.join(run_plan.taken)}"
    known = config.parallel.gpu is not None and config.train.dtype.itemsize == 2
    if not known and any(own.changes for own in config.alternatives):
        note += "; to compare more than treatments of the vocabulary, it needs a known GPU and 16 "
        note += "bits"
    yield note
