"""vocabulary_runs.py: passes of the vocabulary, and the memory of the paper's runs."""

import pytest

from megatron.schedules.treatments import TREATMENTS
from tools.predictions.counted_layer import Shape
from tools.predictions.vocabulary_memory import parameters, peak
from tools.predictions.vocabulary_runs import VocabularyRun, vocabulary_passes

GPT = Shape(3072, 24, 2048, 256_000, dropout=True)


@pytest.mark.parametrize("name", ["vocab-1", "vocab-2", "interlaced"])
def test_passes_have_the_products_of_their_treatment(name: str) -> None:
    treatment = TREATMENTS[name]
    passes = vocabulary_passes(GPT, 8, treatment)
    one = 2 * GPT.tokens * GPT.hidden_size * GPT.vocab_size // 8
    for kind, products in treatment.products.items():
        if kind in passes:
            assert passes[kind].flops == products * one


def test_memory_by_hand() -> None:
    """One rank and one microbatch: a layer, the whole vocabulary, and B at work."""
    run = VocabularyRun(GPT, 1, 1, 1, "1f1b", "none", shortened=False)
    u, logits = GPT.activation, GPT.tokens * GPT.vocab_size
    both = 2 * GPT.vocab_size * GPT.hidden_size
    static = 16 * (GPT.parameters + GPT.seq_length * GPT.hidden_size + both)
    kept = GPT.kept + 2 * u + 4 * logits
    assert parameters(run) == [static // 16]
    assert peak(run) == static + kept + max(9 * u + 2 * logits, both - kept)


def test_a_split_vocabulary_levels_memory() -> None:
    runs = [VocabularyRun(GPT, 8, 4, 8, "1f1b", name, False) for name in ("none", "vocab-2")]
    whole, split = map(parameters, runs)
    assert sum(whole) == sum(split)
    assert max(split) - min(split) == GPT.seq_length * GPT.hidden_size
    assert peak(runs[1]) < peak(runs[0])
