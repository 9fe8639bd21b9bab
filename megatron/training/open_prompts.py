"""The prompts from which a model goes on during training, in the words of the run's tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.flags.declare import cut
from megatron.inference.generate import check_prompts
from megatron.inference.words import Words
from megatron.native.files import read_text
from megatron.run.generate import GenerateSettings
from megatron.run.run_config import RunConfig


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
        ValueError: the file of prompts is no text, or a prompt has no tokens, tokens that the model
            does not know, or too many tokens; the message names the flag and the way out.
        OSError: the file of prompts cannot be read.
    """
    own, vocab_size = config.log.generate, config.model.vocab_size
    if own.generate_interval is None or config.train.skip_train:
        return None
    words = _words(config)
    texts = _texts(own)
    found = [_tokens(text, words) for text in texts]
    if not texts:
        eod = words.tokenizer.eod if words.end is None else words.end
        texts, found = ("",), [(min(eod, vocab_size - 1),)]
    _check(own, texts, found, vocab_size, config.model.seq_length)
    return Prompts(words, texts, tuple(found))


def _words(config: RunConfig) -> Words:
    """Return the words of the run's tokenizer; without one, words are token ids."""
    tokenizer, vocab_size = config.data.tokenizer, config.model.vocab_size
    if tokenizer.tokenizer_type is None:
        return Words.ids(vocab_size - 1)
    return Words.of(tokenizer, None, vocab_size)


def _texts(own: GenerateSettings) -> tuple[str, ...]:
    if own.generate_prompts_file is None:
        return own.generate_prompt
    lines = _lines(own.generate_prompts_file)
    return (*own.generate_prompt, *lines)


def _lines(path: Path) -> list[str]:
    """Return the lines of a file that are not empty."""
    named = f"--generate-prompts-file {path}"
    try:
        text = read_text(path)
    except ValueError as error:
        raise ValueError(f"{named} {error}") from error
    found = [line for line in text.splitlines() if line.strip()]
    if not found:
        raise ValueError(f"{named}: there is no prompt in it; give another file")
    return found


def _tokens(text: str, words: Words) -> tuple[int, ...]:
    try:
        return tuple(words.tokens(text))
    except ValueError as error:
        raise ValueError(f"--generate-prompt: {error}") from error


def _check(
    own: GenerateSettings,
    texts: Sequence[str],
    tokens: Sequence[Sequence[int]],
    vocab_size: int,
    most: int,
) -> None:
    """Check that the model can go on from prompts in samples of ``most`` tokens."""
    try:
        check_prompts(tokens, vocab_size)
    except ValueError as error:
        raise ValueError(f"--generate-prompt: {error}") from error
    new = own.generate_max_new_tokens
    for number, (text, prompt) in enumerate(zip(texts, tokens, strict=True), 1):
        if len(prompt) + new > most:
            raise ValueError(
                f"--generate-prompt: prompt {number}, {cut(text)!r}, has {len(prompt)} tokens, and "
                f"with --generate-max-new-tokens {new} more than the {most} of --seq-length: "
                "shorten the prompt, or lower --generate-max-new-tokens"
            )
