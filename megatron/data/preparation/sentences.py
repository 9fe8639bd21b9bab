"""Cuts text into sentences with NLTK's Punkt, as Megatron-LM's tool does."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron.data.tokenizers.files import library

_PIECE = 1_000_000  # characters; Punkt slows down on longer text, and Megatron-LM cuts here too

Splitter = Callable[[str], list[str]]
"""Takes a text; returns its sentences."""


@dataclass(frozen=True)
class SentenceConfig:
    """How text is cut into sentences.

    Attributes:
        language: language of the Punkt data.
        keep_newlines: whether the white space behind a sentence stays with it.
    """

    language: str = "english"
    keep_newlines: bool = False


def splitter(config: SentenceConfig) -> Splitter:
    """Return the function that cuts a text into sentences.

    Raises:
        ValueError: NLTK or its data for the language is not installed.
    """
    library("nltk", "--split-sentences")
    punkt = library("nltk.tokenize.punkt", "--split-sentences")
    try:
        model = punkt.PunktTokenizer(config.language)
    except (LookupError, OSError, ValueError) as error:
        raise ValueError(
            f"--split-sentences finds no data of NLTK's Punkt for --lang {config.language}: "
            "python -m nltk.downloader punkt_tab fetches it, and NLTK_DATA names its folder"
        ) from error

    def split(piece: str) -> list[str]:
        spans = list(model.span_tokenize(piece))
        if not config.keep_newlines:
            return [piece[start:end] for start, end in spans]
        ends = [*(start for start, _ in spans[1:]), len(piece)]
        return [piece[start:end] for (start, _), end in zip(spans, ends, strict=True)]

    def split_all(text: str) -> list[str]:
        pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
        return [sentence for piece in pieces for sentence in split(piece)]

    return split_all
