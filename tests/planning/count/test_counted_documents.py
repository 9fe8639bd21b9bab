"""Documents that are kept apart count as whole samples, by the kernels that keep them apart."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from planning.count.counting import LLAMA, MODEL, counted, run_of

from megatron.model.settings import ModelSettings
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.settings import TensorRankSettings
from megatron.planning.dry_run import dry_run
from megatron.run.run_config import RunConfig
from megatron.schedules.passes import PassKind
from megatron.simulator.costs.count import Launch, RankCount
from megatron.simulator.costs.gpus import gpu

FLASH = "_scaled_dot_product_flash_attention"
SAMPLES, GRANULE = 64, 512
KEPT = LLAMA.replaced(num_layers=4, attention_dropout=0.0)
"""A model without dropout in its attention."""


def run_with(
    model: ModelSettings = KEPT, sizes: dict[str, Any] | None = None, **documents: Any
) -> RunConfig:
    run = run_of(model, "vocab-2", 2, SAMPLES, sizes=sizes)
    apart = replace(run.data.resets, **documents)
    return replace(run, data=replace(run.data, resets=apart))


def first_rank(run: RunConfig) -> RankCount:
    return counted(run, [run.model.num_layers // 2] * 2)[0]


def launches(count: RankCount, kind: PassKind = "F") -> Counter[str]:
    """Return the kernels of a pass by name."""
    found: Counter[str] = Counter()
    for work, times in count.passes[kind, 0].parts:
        for step in work.steps:
            if isinstance(step, Launch):
                found[step.name] += times
    return found


@pytest.mark.parametrize("sizes", [{}, {"tensor": TensorRankSettings(2, True)}], ids=str)
def test_a_kernel_that_packs_documents_does_the_work_of_whole_samples(
    sizes: dict[str, Any],
) -> None:
    plain = first_rank(run_with(sizes=sizes))
    apart = first_rank(run_with(sizes=sizes, reset_attention_mask=True))
    assert apart.passes == plain.passes
    assert launches(apart)[FLASH] == 2
    first_bs, bounds_k = 8 * SAMPLES * 32, GRANULE
    assert apart.held - plain.held == first_bs + bounds_k


@pytest.mark.parametrize(
    ("model", "sizes"),
    [(KEPT.replaced(attention_dropout=0.1), {}), (KEPT, {"context": ContextRankSettings(2)})],
    ids=["dropout", "ranks that share samples"],
)
def test_without_such_a_kernel_attention_goes_block_by_block(
    model: ModelSettings, sizes: dict[str, Any]
) -> None:
    """Its probabilities are in memory, and formed again in the backward."""
    plain = first_rank(run_with(model, sizes))
    apart = first_rank(run_with(model, sizes, reset_attention_mask=True))
    assert launches(plain)[FLASH] > 0 == launches(apart)[FLASH]
    assert launches(apart)["_softmax"] > 0
    kind: PassKind
    for kind in ("F", "B"):
        assert launches(apart, kind).total() > launches(plain, kind).total()
    assert apart.passes["B", 0].peak > plain.passes["B", 0].peak
    assert not launches(apart)["min"], "the host reads its own numbers"


def test_positions_that_begin_anew_are_looked_up() -> None:
    """Of the tables of cosines and sines, once for the layers of a pass that share them."""
    plain, anew = first_rank(run_with()), first_rank(run_with(reset_position_ids=True))
    assert launches(anew) - launches(plain) == Counter({"index": 2})
    assert anew.held - plain.held == 8 * SAMPLES * 32


def test_learned_positions_that_begin_anew_are_those_of_every_token() -> None:
    anew = first_rank(run_with(MODEL, reset_position_ids=True))
    assert launches(anew)["embedding"] == 1


@pytest.mark.parametrize("apart", [False, True])
def test_a_dry_run_says_how_documents_count(apart: bool) -> None:
    told = "\n".join(dry_run(run_with(reset_attention_mask=apart), gpu("A100")))
    said = "--reset-attention-mask: every sample counts as one document, the most work"
    assert (said in told) == apart
