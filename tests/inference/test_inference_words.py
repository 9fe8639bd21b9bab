"""Text of tokens, whatever a model answers."""

from pathlib import Path

import pytest
from harness.small_vocabularies import gpt2_files, sentencepiece_model, tiktoken_file

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.inference.words import Words

KINDS = ["GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer", "GPT2BPETokenizer"]


def settings_of(kind: str, folder: Path) -> TokenizerSettings:
    if kind == "GPT2BPETokenizer":
        return gpt2_files(folder)
    if kind == "TikTokenizer":
        return TokenizerSettings(kind, tiktoken_file(folder / "tik.json"))
    return TokenizerSettings(kind, sentencepiece_model(folder / "x.model"))


@pytest.mark.parametrize("kind", KINDS)
def test_entries_that_the_tokenizer_lacks_become_replacement_characters(
    kind: str, tmp_path: Path
) -> None:
    """The vocabulary of a model may be larger, and a model that has learnt little answers any."""
    settings = settings_of(kind, tmp_path)
    size, known = build_tokenizer(settings).vocab_size, build_tokenizer(settings).tokenize("the")
    words = Words.of(settings, None, size + 9)
    of_known = words.text(known)
    assert words.text([size, *known, words.tokenizer.eod, size + 8, size + 1]) == (
        f"\ufffd{of_known}\ufffd\ufffd"
    )
    assert all(isinstance(words.text([token]), str) for token in range(size))
