"""vocabulary_runs.py: passes of the vocabulary, and the memory of the paper's runs."""

from dataclasses import replace

import pytest

from megatron.schedules.check import check
from megatron.schedules.lower import lower
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.peak_bytes import Sizes, peak_bytes
from tools.predictions.counted_layer import Shape
from tools.predictions.megatron_lm import WAIT
from tools.predictions.vocabulary_memory import parameters, peak, sizes
from tools.predictions.vocabulary_runs import (
    VocabularyRun,
    vocabulary_passes,
    with_prompt_gradients,
)

GPT = Shape(3072, 24, 2048, 256_000, dropout=True)


@pytest.mark.parametrize("name", ["vocab-1", "vocab-2", "interlaced"])
def test_passes_have_the_products_of_their_treatment(name: str) -> None:
    treatment = TREATMENTS[name]
    passes = vocabulary_passes(GPT, 8, treatment)
    one = 2 * GPT.tokens * GPT.hidden_size * GPT.vocab_size // 8
    for kind, products in treatment.products.items():
        if kind in passes:
            assert passes[kind].flops == products * one


@pytest.mark.parametrize(("seq_length", "in_step"), [(2048, True), (8192, False)])
def test_memory_by_hand(seq_length: int, in_step: bool) -> None:
    """One rank and one microbatch: a layer, the whole vocabulary, and B or the step at work."""
    gpt = replace(GPT, seq_length=seq_length)
    run = VocabularyRun(gpt, 1, 1, 1, "1f1b", "none", shortened=False)
    u, logits = gpt.activation, gpt.tokens * gpt.vocab_size
    both = 2 * gpt.vocab_size * gpt.hidden_size
    count = gpt.parameters + gpt.seq_length * gpt.hidden_size + both
    kept = gpt.kept + 2 * u + 4 * logits
    in_backward = 16 * count + kept + max(9 * u + 2 * logits, both - kept)
    assert parameters(run) == [count]
    assert (20 * count > in_backward) == in_step
    assert peak(run) == (20 * count if in_step else in_backward)


def test_a_dense_gradient_comes_beside_what_waits_for_w() -> None:
    """A B without W has let go of the layer when it forms the input layer's gradient."""
    dense = 2 * GPT.vocab_size * GPT.hidden_size
    for schedule, layers, freed in (("1f1b", 2, GPT.kept), ("v-half", 4, 0)):
        run = VocabularyRun(GPT, layers, 2, 4, schedule, "none", shortened=False)
        working = sizes(run).working["B"]
        assert isinstance(working, list)
        assert working[0][0] == dense - freed


@pytest.mark.parametrize(("seq_length", "sums"), [(3072, 0), (4096, 409 + 4096)])
def test_more_than_3072_tokens_are_sorted_and_summed_beside_the_dense_gradient(
    seq_length: int, sums: int
) -> None:
    gpt = replace(GPT, seq_length=seq_length)
    whole = sizes(VocabularyRun(gpt, 4, 2, 4, "v-half", "none", shortened=False)).working["B"]
    assert isinstance(whole, list)
    assert whole[0][0] == (2 * gpt.vocab_size + 4 * sums) * gpt.hidden_size

    few = replace(gpt, vocab_size=8000)
    split = sizes(VocabularyRun(few, 4, 4, 4, "1f1b", "vocab-1", shortened=False)).working["IB"]
    sums = min(sums, 409 + 2000)  # a shard has 2000 rows
    assert split == (2 * 2000 + 4 * sums) * few.hidden_size


def test_a_split_vocabulary_levels_memory() -> None:
    runs = [VocabularyRun(GPT, 8, 4, 8, "1f1b", name, False) for name in ("none", "vocab-2")]
    whole, split = map(parameters, runs)
    assert sum(whole) == sum(split)
    assert max(split) - min(split) == GPT.seq_length * GPT.hidden_size
    assert peak(runs[1]) < peak(runs[0])


def test_passes_of_v_half_do_not_wait_for_transfers() -> None:
    """Its messages pass beside its passes; those of Megatron-LM's 1F1B make both sides wait."""
    longer = {}
    for schedule, chunks in (("1f1b", 1), ("v-half", 2)):
        run = VocabularyRun(GPT, 4 * chunks, 4, 4, schedule, "vocab-1", shortened=False)
        # Layers of the last stage: nobody receives its output.
        inner, last = run.costs.time("F", 1), run.costs.time("F", *run.stages[-1])
        longer[schedule] = inner - last
        message = run.cluster.message(GPT.activation, crossing=False)
        beside = run.costs.comms.get("X", [0.0])
        assert isinstance(beside, list)
        assert beside[0] == (message if schedule == "v-half" else 0)
    assert longer == {"1f1b": pytest.approx(WAIT + message), "v-half": 0}


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("v-half", 2)])
def test_gradients_of_embeddings_do_not_wait_for_idle_time(schedule: str, chunks: int) -> None:
    """A plan whose IB all come last holds the gradients of all microbatches, and is mended."""
    run = VocabularyRun(GPT, 4 * chunks, 4, 12, schedule, "vocab-1", shortened=False)
    rows = tuple(
        tuple(sorted(row, key=lambda item: item.kind == "IB")) for row in run.program.plan.rows
    )
    late = lower(replace(run.program.plan, rows=rows), run.costs)
    prompt = with_prompt_gradients(late, run.costs)
    check(prompt)
    others = [[item for item in row if item.kind != "IB"] for row in prompt.rows]
    assert others == [list(row[:-12]) for row in rows]
    assert [sorted(row) for row in prompt.rows] == [sorted(row) for row in rows]
    gradients = Sizes(embedding_gradient=1.0)
    assert max(peak_bytes(late, gradients)) == 12
    assert max(peak_bytes(lower(prompt, run.costs), gradients)) <= 3
