"""The forecast of a recipe: a dry run of its flags, as data."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron.model.flops import iteration_flops
from megatron.planning.plan_report import in_words
from megatron.planning.run_plan import asked
from megatron.planning.where_time_goes import where_time_goes
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.gpus import GPUS
from tools.recipes.recipe import Recipe


class Part(NamedTuple):
    """A part of the seconds of an iteration: its reason in words, and its seconds."""

    reason: str
    seconds: float


class RecipeForecast(NamedTuple):
    """The forecast of a recipe.

    Attributes:
        layout: its ranks, as ``t 2, p 4, d 8``.
        is_split: whether ranks of the pipeline share the vocabulary layers.
        samples: of an iteration.
        seq_length: tokens of a sample.
        seconds: of an iteration.
        tokens_per_gpu: tokens a second on each GPU.
        mfu: FLOPs of the model as a share of the peak of all GPUs.
        peak: bytes of the fullest rank.
        room: bytes that tensors can use there.
        fits: whether every rank has enough memory.
        spent: where the seconds go, the most first.
    """

    layout: str
    is_split: bool
    samples: int
    seq_length: int
    seconds: float
    tokens_per_gpu: float
    mfu: float
    peak: float
    room: float
    fits: bool
    spent: list[Part]


def run_of(recipe: Recipe, words: Sequence[str] = ()) -> RunConfig:
    """Return the run of a recipe's dry run, with further flags that replace flags of it."""
    return parse([f"@{recipe.path}", *words, *recipe.predicting], 1)


def forecast_of(recipe: Recipe, words: Sequence[str] = ()) -> RecipeForecast:
    """Return the forecast of a recipe, with further flags that replace flags of it."""
    gpu = GPUS[recipe.gpu]
    config = run_of(recipe, words).on(gpu)
    found = asked(config)[0].forecast
    assert found is not None, "a dry run asks about a GPU"
    seconds, samples = found.outcome.seconds, config.train.global_batch_size
    tokens = samples * config.model.seq_length / seconds
    peak_flops = 1e12 * gpu.peak_tflops * recipe.gpus
    return RecipeForecast(
        _layout(config, recipe.gpus),
        config.parallel.pipeline.size > 1 and TREATMENTS[config.parallel.vocab_parallel].is_sharded,
        samples,
        config.model.seq_length,
        seconds,
        tokens / recipe.gpus,
        iteration_flops(config.model, samples) / (peak_flops * seconds),
        found.fullest.peak,
        found.fullest.room(gpu),
        found.fits,
        [Part(*own) for own in in_words(where_time_goes(found))],
    )


def _layout(config: RunConfig, gpus: int) -> str:
    """Return the ranks of a layout by their letters; sizes of 1 are left out."""
    parallel = config.parallel
    sizes = {"t": parallel.tensor.size, "p": parallel.pipeline.size, "c": parallel.context.size}
    sizes["d"] = gpus // (sizes["t"] * sizes["p"] * sizes["c"])
    if config.model.experts.num_experts:
        sizes["e"] = parallel.experts.expert_model_parallel_size
    return ", ".join(f"{letter} {size}" for letter, size in sizes.items() if size > 1)
