"""The tokenizer's options of the tools are read and judged as training's flags are."""

from pathlib import Path

import pytest

from megatron.config.tokenizer import TokenizerFlags, tokenizer_config, tokenizer_of
from megatron.config.topics import DECLARED
from megatron.config.words import sort_words
from megatron.data.tokenizers.interface import TokenizerConfig
from megatron.flags.command import found_in
from megatron.flags.groups import filled


def read(words: str) -> TokenizerConfig | None:
    found = found_in(words.split(), (TokenizerFlags,))
    assert found.mistakes == []
    return tokenizer_of(found.flags[TokenizerFlags])


def test_options_are_those_of_training() -> None:
    words = (
        "--tokenizer-type TikTokenizer --tokenizer-model a/b.json --tiktoken-pattern v1 "
        "--vocab-size 70 --tiktoken-num-special-tokens 9 --tokenizer-special-tokens <s> </s>"
    )
    given = sort_words(words.split(), DECLARED).given
    flags = filled((TokenizerFlags,), given)[TokenizerFlags]
    assert read(words) == tokenizer_config(flags, "TikTokenizer")
    assert flags.tokenizer_model == Path("a/b.json")
    assert flags.tokenizer_special_tokens == ("<s>", "</s>")
    assert read("") is None


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--vocab-size many", "--vocab-size many: must be a whole number"),
        ("--vocab-size 0", "--vocab-size 0: must be at least 1 and at most 2,147,483,647"),
        ("--tokenizer-type Other", "--tokenizer-type Other: choose one of "),
    ],
)
def test_mistakes_are_told_in_the_words_of_training(words: str, fault: str) -> None:
    (told,) = found_in(words.split(), (TokenizerFlags,)).mistakes
    assert told.startswith(fault)
    assert sort_words(words.split(), DECLARED).mistakes in ([], [told])
