"""Text of prompts and answers, and their tokens."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Final

from megatron.checkpoint.saved_tokenizer import tokenizer_of
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.interface import Tokenizer
from megatron.data.tokenizers.null import NullTokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.flags.readable import readable

_UNKNOWN: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Words:
    """Turns text to tokens and back.

    Attributes:
        tokenizer: of the model.
        end: token that ends an answer; ``None``: no token does.
        are_ids: whether a text is a row of token ids with blanks between them.
    """

    tokenizer: Tokenizer
    end: int | None
    are_ids: bool = False

    @classmethod
    def ids(cls, vocab_size: int, end: int | None = None) -> "Words":
        """Return an object whose texts are token ids, for a model without a tokenizer."""
        return cls(NullTokenizer(vocab_size), end, are_ids=True)

    @classmethod
    def of_checkpoint(
        cls,
        where: Path,
        given: TokenizerSettings,
        end: int | None,
        vocab_size: int,
        *,
        speak: bool,
    ) -> "Words | None":
        """Return an object for the tokenizer of flags, or else for the one of a checkpoint.

        Args:
            where: folder of the checkpoint.
            given: the flags; without ``tokenizer_type`` only ``vocab_size`` counts.
            end: as in ``of``.
            vocab_size: as in ``of``.
            speak: whether notes are printed on the error output.

        Returns:
            The object; ``None``: neither of them names a tokenizer.

        Raises:
            ValueError: as in ``of``; or the checkpoint's copy of the tokenizer is damaged.
        """
        plain = TokenizerSettings()
        named = vars(given) if given.tokenizer_type is not None else ("vocab_size",)
        names = {name for name in named if getattr(given, name) != getattr(plain, name)}
        own = replace(plain, **{name: getattr(given, name) for name in names})
        found, notes = tokenizer_of(where, own, names)
        if found.tokenizer_type is None:
            return None
        for note in notes if speak else ():
            print(f"note: {readable(note)}", file=sys.stderr, flush=True)
        return cls.of(found, end, vocab_size)

    @classmethod
    def of(cls, config: TokenizerSettings, end: int | None, vocab_size: int) -> "Words":
        """Return an object for the tokenizer of a model with ``vocab_size`` entries.

        An answer ends with the token ``end``; ``None``: with the tokenizer's end of a document.

        Raises:
            ValueError: there is no such tokenizer, or it has more tokens than the model.
        """
        tokenizer = build_tokenizer(config)
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, and the model {vocab_size}: "
                "give the tokenizer that it was trained with"
            )
        return cls(tokenizer, tokenizer.eod if end is None else end)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
            ValueError: the text should be token ids, but holds other words.
        """
        try:
            return self.tokenizer.tokenize(text)
        except ValueError as error:
            raise ValueError(f"{text[:40]!r} does not hold token ids ({error})") from error

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, without the token that ends it.

        A model may have more entries than its tokenizer. Each such entry becomes a replacement
        character.
        """
        size = self.tokenizer.vocab_size
        kept = (token for token in tokens if token != self.end)
        return "".join(
            self.tokenizer.detokenize(list(own)) if is_known else _UNKNOWN * len(list(own))
            for is_known, own in groupby(kept, lambda token: token < size)
        )
