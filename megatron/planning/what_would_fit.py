"""For a run that does not fit, names similar runs that fit, the fastest first.

The search of ``plan-pretraining`` finds these runs. The ranks, the batch and the model stay as they
are, and all else may change (``search/nearby.py``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from megatron.model.flops import iteration_flops
from megatron.planning.run_memory import Fullest
from megatron.planning.search.nearby import Nearby
from megatron.planning.search.runs import Runs
from megatron.planning.search.search import Search
from megatron.planning.search.ways import Found, Way, varied
from megatron.run.precision import NARROW_SUMS
from megatron.run.run_config import RunConfig
from megatron.schedules.counted import counted
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import GPUS, Gpu
from megatron.simulator.units import MEMORY, percent

ALTERNATIVES: Final = 5
"""Runs that are named if the run of the command line does not fit."""


def what_would_fit(
    config: RunConfig,
    gpu: Gpu,
    own: Fullest,
    watch: Watch,
    more: str = "--advice-seconds N gives more time",
) -> str:
    """Return the fastest similar runs that fit, or the reason why none does.

    Args:
        config: the run.
        gpu: the GPU of every rank.
        own: the fullest rank of the run itself.
        watch: limits the work of the search; a bound or plan that was begun is still finished.
        more: tells the user how to have more runs tried.
    """
    if not config.given:
        return "a run without a command line has no flags that could change"
    advice = _Advice(config, gpu, own, Nearby.of(config))
    search = Search(gpu, advice.nearby.dimensions, watch=watch, runs=Runs(gpu, watch))
    try:
        found = search.look(advice.nearby.line, ALTERNATIVES)
    except ValueError:  # rules or the time have left nothing to look at
        found = Found()
    watch.close("the runs that were tried are named")
    lines = [*(advice.named(found) if found.ways else advice.nothing_fits(found, watch))]
    if watch.was_cut:
        lines.append(
            f"the search ended after {watch.limit}, with {counted(_looked_at(found), 'plan')} of "
            f"{found.combinations:,} combinations ({more})"
        )
    return "\n".join(lines)


def _looked_at(found: Found) -> int:
    return len(found.ways) + len(found.too_large)


@dataclass(frozen=True)
class _Advice:
    """A run that does not fit, and its GPU.

    Attributes:
        config: the run.
        gpu: the GPU of every rank.
        own: the fullest rank of the run.
        nearby: the run's line, to compare other lines with.
    """

    config: RunConfig
    gpu: Gpu
    own: Fullest
    nearby: Nearby

    def named(self, found: Found) -> Iterator[str]:
        """Yield the runs that fit, and how far their figures can be trusted."""
        yield "what would fit, the fastest first:"
        shown = [(self.nearby.words(way.line), way) for way in varied(found.ways, ALTERNATIVES)]
        flops = iteration_flops(self.config.model, self.config.train.global_batch_size)
        peak = 1e12 * self.gpu.peak_tflops * self.config.parallel.grid.world_size
        for words, way in shown:
            seconds = way.known.seconds
            yield (
                f"  {words}: {MEMORY.write(way.known.held.peak)}, "
                f"{self.config.train.global_batch_size / seconds:.3g} samples/s, "
                f"MFU {percent(flops / (peak * seconds))}"
            )
        planned = ((way.known.planned, self._microbatches(way)) for _, way in shown)
        few = {number for number, whole in planned if number < whole}
        if few:
            yield (
                f"plans have {' or '.join(map(str, sorted(few)))} microbatches: the interval of "
                "their steady state extends their times to those of all"
            )
        if any(NARROW_SUMS in words for words, _ in shown):
            yield (
                "--main-grads-dtype bf16 rounds every sum of gradients to the 8 bits of a bf16 "
                "number"
            )
        if any("--cpu-offload" in words for words, _ in shown):
            yield "--cpu-offload counts on a bandwidth to the host that no GPU has measured"

    def nothing_fits(self, found: Found, watch: Watch) -> Iterator[str]:
        """Yield that no similar run fits, the memory that is too large, and the way out."""
        if not found.too_large:
            least, holder = self.own, "the run itself holds"
        else:
            smallest = min(found.too_large, key=lambda way: way.known.held.peak)
            least = smallest.known.held
            tried = counted(_looked_at(found), "plan")
            holder = f"the smallest of {tried} is {self.nearby.words(smallest.line)}: it holds"
        said = (
            f"{holder} {MEMORY.write(least.peak)} on rank {least.rank}, "
            f"{MEMORY.write(least.static)} of which are there all the time, and "
            f"{least.room_in_words(self.gpu)}"
        )
        if least.fits(self.gpu):
            yield f"no run that fits the hosts (--host-memory) was found: {said}"
        elif watch.was_cut:
            yield f"no run that fits was found in {watch.limit}: {said}"
        else:
            larger = " or ".join(known.name for known in GPUS.values() if least.fits(known))
            yield (
                f"nothing nearby fits either: {said}: take "
                + (f"GPUs with that much memory ({larger}), " if larger else "")
                + "more ranks (--pipeline-model-parallel-size, --tensor-model-parallel-size), or a "
                "smaller model"
            )

    def _microbatches(self, way: Way) -> int:
        """Return the microbatches of a way's iteration."""
        return way.line.run(self.gpu).train.num_microbatches
