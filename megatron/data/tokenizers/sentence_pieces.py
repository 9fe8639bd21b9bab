"""sentencepiece models: as they are, as Llama 2 reads them, and with BERT's special tokens."""

from collections.abc import Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from megatron.data.tokenizers.files import needed
from megatron.data.tokenizers.interface import Tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.native.files import read_bytes

_SPECIAL_TOKENS = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")
_WHAT = "a sentencepiece .model file; tools/sample_data.py makes one"


class _SentencePieces(Tokenizer):
    """A sentencepiece model as it is.

    Attributes:
        processor: the loaded model, for callers that encode in bulk.

    Raises:
        ValueError: the ``.model`` file is missing or damaged.
    """

    def __init__(self, model: Path) -> None:
        self.processor = _load(model)
        self.vocab_size, self.eod = self.processor.vocab_size(), self.processor.eos_id()

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens written out in it are encoded as ordinary text."""
        return list(self.processor.encode(text))

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of every text."""
        return list(self.processor.encode(list(texts), num_threads=1))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; special tokens are left out."""
        pieces = self.processor.vocab_size()
        return str(self.processor.decode([index for index in ids if index < pieces]))


class GPTSentencePieceTokenizer(_SentencePieces):
    """A sentencepiece model as it is; a document ends with the model's ``</s>``.

    Raises:
        ValueError: the ``.model`` file is missing, damaged or has no ``</s>``.
    """

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        if self.eod < 0:
            raise ValueError(
                f"--tokenizer-model {model} has no </s> to end documents with; "
                "use --tokenizer-type SentencePieceTokenizer, which adds a token for it"
            )


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """A sentencepiece model as Llama 2 was trained with it: every text begins with ``<s>``.

    Megatron-LM added ``<s>`` too, until its tokenizers moved into Megatron-Core. Megatron-Core's
    type of this name adds nothing, like ``GPTSentencePieceTokenizer`` here.

    Raises:
        ValueError: the ``.model`` file is missing, damaged or has no ``<s>`` or ``</s>``.
    """

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self._begin = int(self.processor.bos_id())
        if self._begin < 0:
            raise ValueError(
                f"--tokenizer-model {model} has no <s> to begin a text with; use "
                "--tokenizer-type GPTSentencePieceTokenizer, which adds nothing to a text"
            )

    def tokenize(self, text: str) -> list[int]:
        """Id of ``<s>``, then the ids of ``text``."""
        return [self._begin, *super().tokenize(text)]

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of every text."""
        return [[self._begin, *ids] for ids in super().tokenize_all(texts)]


class SentencePieceTokenizer(_SentencePieces):
    """A sentencepiece model to which missing BERT-style special tokens are appended.

    The order is Megatron-LM's: ``<CLS> <SEP> <EOD> <MASK>``, then ``<PAD> <BOS> <EOS>``, then
    ``extra_ids`` tokens ``<extra_id_N>``. Each token that the model lacks takes the next free id,
    and the vocabulary grows by these tokens. A document ends with ``<EOD>``.
    """

    def __init__(self, model: Path, extra_ids: int = 0) -> None:
        super().__init__(model)
        pieces = self.vocab_size
        known = {self.processor.id_to_piece(index) for index in range(pieces)}
        wanted = list(_SPECIAL_TOKENS)
        for name in ("pad", "bos", "eos"):
            if getattr(self.processor, f"{name}_id")() < 0:
                wanted.append(f"<{name.upper()}>")
        wanted += [f"<extra_id_{index}>" for index in range(extra_ids)]
        added = [token for token in wanted if token not in known]
        self.vocab_size = pieces + len(added)
        own = self.processor.piece_to_id("<EOD>")
        self.eod = pieces + added.index("<EOD>") if "<EOD>" in added else own


def model_file(config: TokenizerSettings) -> Path:
    """Return the model file of a tokenizer type that needs a model.

    Raises:
        ValueError: no model is given, or the file does not exist.
    """
    return needed("--tokenizer-model", config.tokenizer_model, config.tokenizer_type, _WHAT)


def _load(model: Path) -> SentencePieceProcessor:
    try:
        processor = SentencePieceProcessor()
        processor.load_from_serialized_proto(read_bytes(model))
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"--tokenizer-model {model} cannot be read as a sentencepiece model ({error}); "
            f"give {_WHAT}"
        ) from error
    return processor
