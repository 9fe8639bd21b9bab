"""Text to token ids and back. The types carry Megatron-LM's names and number ids as it does."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from sentencepiece import SentencePieceProcessor

_SPECIAL_TOKENS = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class Tokenizer(Protocol):
    """The interface of a tokenizer for data preparation and training."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end-of-document token included."""
        ...

    @property
    def eod(self) -> int:
        """Id of the end-of-document token."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, without an end-of-document token."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids that `tokenize` made."""
        ...


class GPTSentencePieceTokenizer:
    """A sentencepiece model as it is; a document ends with the model's ``</s>``.

    Args:
        model: the ``.model`` file.

    Attributes:
        processor: the loaded model, for callers that encode in bulk.

    Raises:
        ValueError: the file is missing, damaged or has no ``</s>``.
    """

    def __init__(self, model: Path) -> None:
        self.processor = _load(model)
        if self.processor.eos_id() < 0:
            raise ValueError(
                f"--tokenizer-model {model} has no </s> to end documents with; "
                "use --tokenizer-type SentencePieceTokenizer, which adds a token for it"
            )

    @property
    def vocab_size(self) -> int:
        """Pieces of the model."""
        return int(self.processor.vocab_size())

    @property
    def eod(self) -> int:
        """Id of ``</s>``."""
        return int(self.processor.eos_id())

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens written out in it are encoded as ordinary text."""
        return list(self.processor.encode(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; control tokens such as ``</s>`` leave no trace."""
        return str(self.processor.decode(list(ids)))


class SentencePieceTokenizer:
    """A sentencepiece model with BERT-style special tokens appended where it has none.

    Megatron-LM's numbering: ``<CLS> <SEP> <EOD> <MASK>``, then ``<PAD> <BOS> <EOS>`` for those the
    model lacks, each taking the next free id; the vocabulary grows accordingly. A document ends
    with ``<EOD>``.

    Args:
        model: the ``.model`` file.

    Raises:
        ValueError: the file is missing or damaged.
    """

    def __init__(self, model: Path) -> None:
        self._processor = _load(model)
        pieces = self._processor.vocab_size()
        known = {self._processor.id_to_piece(index) for index in range(pieces)}
        wanted = list(_SPECIAL_TOKENS)
        for name in ("pad", "bos", "eos"):
            if getattr(self._processor, f"{name}_id")() < 0:
                wanted.append(f"<{name.upper()}>")
        added = [token for token in wanted if token not in known]
        self._special = {token: pieces + index for index, token in enumerate(added)}
        self._vocab_size = pieces + len(added)

    @property
    def vocab_size(self) -> int:
        """Pieces of the model and the special tokens added to it."""
        return self._vocab_size

    @property
    def eod(self) -> int:
        """Id of ``<EOD>``."""
        return self._special.get("<EOD>", int(self._processor.piece_to_id("<EOD>")))

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens written out in it are encoded as ordinary text."""
        return list(self._processor.encode(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; special tokens leave no trace."""
        pieces = self._processor.vocab_size()
        return str(self._processor.decode([index for index in ids if index < pieces]))


class NullTokenizer:
    """Text that already is ids: decimal numbers separated by blanks.

    Args:
        vocab_size: ids below it are tokens; it is itself the end-of-document token.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        """The given size, and one for the end-of-document token."""
        return self._vocab_size + 1

    @property
    def eod(self) -> int:
        """The id after the last token."""
        return self._vocab_size

    def tokenize(self, text: str) -> list[int]:
        """The numbers in ``text``."""
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The numbers, separated by blanks."""
        return " ".join(str(index) for index in ids)


def build_tokenizer(
    tokenizer_type: str, tokenizer_model: Path | None, vocab_size: int | None
) -> Tokenizer:
    """Makes the tokenizer that the flags describe.

    Args:
        tokenizer_type: ``--tokenizer-type``.
        tokenizer_model: ``--tokenizer-model``; needed by the sentencepiece types.
        vocab_size: ``--vocab-size``; needed by ``NullTokenizer``. With a model it may only
            be larger than the tokenizer, never smaller.

    Returns:
        The tokenizer; its ``vocab_size`` is its own, whatever was asked for.

    Raises:
        ValueError: a flag is missing, unknown or at odds with the model.
    """
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None or vocab_size < 1:
            raise ValueError(
                f"--vocab-size {vocab_size}: --tokenizer-type NullTokenizer needs a positive "
                "size, as it has no model to read it from"
            )
        return NullTokenizer(vocab_size)
    models: dict[str, Callable[[Path], Tokenizer]] = {
        "GPTSentencePieceTokenizer": GPTSentencePieceTokenizer,
        "SentencePieceTokenizer": SentencePieceTokenizer,
    }
    if tokenizer_type not in models:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type} is not available; choose one of "
            f"{', '.join([*models, 'NullTokenizer'])}"
        )
    if tokenizer_model is None:
        raise ValueError(
            f"--tokenizer-model is missing: --tokenizer-type {tokenizer_type} needs a "
            "sentencepiece .model file; tools/sample_data.py makes one"
        )
    tokenizer = models[tokenizer_type](Path(tokenizer_model))
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size} is smaller than the {tokenizer.vocab_size} entries of "
            f"--tokenizer-model {tokenizer_model}; leave the flag out or raise it"
        )
    return tokenizer


def _load(model: Path) -> SentencePieceProcessor:
    remedy = "give a sentencepiece .model file; tools/sample_data.py makes one"
    if not model.is_file():
        raise ValueError(f"--tokenizer-model {model} is not a file; {remedy}")
    try:
        processor = SentencePieceProcessor()
        processor.load_from_serialized_proto(model.read_bytes())
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"--tokenizer-model {model} cannot be read as a sentencepiece model ({error}); {remedy}"
        ) from error
    return processor
