"""The prompts from which a model goes on during training, in the words of the run's tokenizer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from megatron.flags.declare import cut
from megatron.inference.generate import check_prompts
from megatron.inference.words import Words
from megatron.native.files import read_text
from megatron.run.generate import GenerateSettings
from megatron.run.run_config import RunConfig

MOST_PROMPTS: Final = 1000
"""Prompts of a run: their texts are held and recorded at once, and every rank waits for them."""


class _Found(NamedTuple):
    """A prompt, and the words with which an error names its place."""

    place: str
    text: str


@dataclass(frozen=True)
class Prompts:
    """Prompts, in the order of their numbers.

    Attributes:
        words: turns tokens to text.
        texts: the prompts; empty where a text begins behind the end of a document.
        tokens: of every prompt.
    """

    words: Words
    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]


def open_prompts(config: RunConfig) -> Prompts | None:
    """Return the prompts of a run; ``None``: the run writes no text.

    Raises:
        ValueError: the file of prompts cannot be read or is no text, there are too many prompts, or
            a prompt has no tokens, tokens that the model does not know, or too many tokens; the
            message names the flag, the line of the file, and the way out.
    """
    own = config.log.generate
    if own.generate_interval is None or config.train.skip_train:
        return None
    words = _words(config)
    found = _found(own)
    if not found:
        return Prompts(words, ("",), ((words.tokenizer.eod,),))
    tokens = tuple(_tokens(own, words) for own in found)
    for number, ((place, text), prompt) in enumerate(zip(found, tokens, strict=True), 1):
        _check(place, number, text, prompt, config)
    return Prompts(words, tuple(own.text for own in found), tokens)


def _words(config: RunConfig) -> Words:
    """Return the words of the run's tokenizer; without one, words are token ids."""
    tokenizer, vocab_size = config.data.tokenizer, config.model.vocab_size
    if tokenizer.tokenizer_type is None:
        return Words.ids(vocab_size - 1)
    return Words.of(tokenizer, None, vocab_size)


def _found(own: GenerateSettings) -> list[_Found]:
    """Return the prompts of flags, and behind them those of the file."""
    found = [_Found("--generate-prompt", text) for text in own.generate_prompt]
    if own.generate_prompts_file is not None:
        found += _lines(own.generate_prompts_file)
    if len(found) > MOST_PROMPTS:
        raise ValueError(
            f"{_flags(own)}: {len(found):,} prompts, and a run takes {MOST_PROMPTS:,} at most: "
            "give fewer, and let tools/generate.py go on from the others with a checkpoint"
        )
    return found


def _flags(own: GenerateSettings) -> str:
    """Return the flags that give prompts."""
    if own.generate_prompts_file is None:
        return "--generate-prompt"
    named = f"--generate-prompts-file {own.generate_prompts_file}"
    return f"{named} and --generate-prompt" if own.generate_prompt else named


def _lines(path: Path) -> Iterator[_Found]:
    """Yield the lines of a file that are not blank."""
    named = f"--generate-prompts-file {path}"
    try:
        text = read_text(path)
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"{named} cannot be read ({why}): give another file") from error
    except ValueError as error:
        raise ValueError(f"{named} {error} (a file of prompts is UTF-8)") from error
    if not text.strip():
        raise ValueError(f"{named}: there is no prompt in it; give another file")
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _Found(f"{named}, line {number}", line.removesuffix("\r"))


def _tokens(own: _Found, words: Words) -> tuple[int, ...]:
    try:
        return tuple(words.tokens(own.text))
    except ValueError as error:
        raise ValueError(f"{own.place}: {error}") from error


def _check(place: str, number: int, text: str, prompt: Sequence[int], config: RunConfig) -> None:
    """Check that the model can go on from a prompt within a sample."""
    new, most = config.log.generate.generate_max_new_tokens, config.model.seq_length
    try:
        check_prompts([prompt], config.model.vocab_size, number - 1)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    if len(prompt) + new > most:
        raise ValueError(
            f"{place}: prompt {number}, {cut(text)!r}, has {len(prompt)} tokens, and with "
            f"--generate-max-new-tokens {new} more than the {most} of --seq-length: shorten the "
            "prompt, or lower --generate-max-new-tokens"
        )
