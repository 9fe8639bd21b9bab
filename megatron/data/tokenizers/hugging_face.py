"""Tokenizers that Hugging Face's libraries have saved, from a folder of this machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.data.tokenizers.files import library, package_errors, read_json
from megatron.data.tokenizers.interface import Tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.native.files import read_text

_PROBE = "The quick brown fox jumps over the lazy dog 0123456789"
_PROBED = 100
"""Tokens of a vocabulary that a sample text has, in case the vocabulary is of another alphabet."""

_WHAT = "a folder that save_pretrained has written, with tokenizer.json and tokenizer_config.json"


class PackageTokenizer(Tokenizer):
    """A tokenizer whose work the package ``tokenizers`` does, in ``_backend``."""

    _backend: Any
    _adds_special = False

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``."""
        with package_errors("tokenizers"):
            return list(self._backend.encode(text, add_special_tokens=self._adds_special).ids)

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of every text."""
        special = self._adds_special
        with package_errors("tokenizers"):
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=special)
        return [encoding.ids for encoding in found]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; special tokens are written out, invalid UTF-8 becomes U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))


class HuggingFaceTokenizer(PackageTokenizer):
    """``tokenizer.json`` of a folder; the folder's ``eos_token`` ends a document.

    Only the package ``tokenizers`` is needed. A special token that is written out in a text becomes
    the token itself, as in Hugging Face's libraries.

    Args:
        config: with ``tokenizer_model``, the folder, or the file ``tokenizer.json`` in it.

    Raises:
        ValueError: a file is missing or damaged, or names no ``eos_token``; or there is no package
            ``tokenizers``.
    """

    def __init__(self, config: TokenizerSettings) -> None:
        asker = f"--tokenizer-type {config.tokenizer_type}"
        tokenizers = library("tokenizers", asker)
        if config.tokenizer_model is None:
            raise ValueError(f"--tokenizer-model is missing: {asker} needs {_WHAT}")
        given = config.tokenizer_model
        path = given / "tokenizer.json" if given.is_dir() else given
        if not path.is_file():
            raise ValueError(
                f"--tokenizer-model {given}: {path} is not a file; give {_WHAT} (nothing is "
                "downloaded; AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) makes one)"
            )
        try:
            self._backend = tokenizers.Tokenizer.from_str(read_text(path))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(
                f"--tokenizer-model {path} cannot be read as a tokenizer ({error}); give {_WHAT}"
            ) from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._adds_special = config.tokenizer_hf_include_special_tokens
        self.eod = self._id_of_end(path.parent)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        # Added tokens may leave gaps between ids, so the largest id counts.
        self.vocab_size = max(vocabulary.values()) + 1
        self._check_text_is_kept(path, " ".join([_PROBE, *sorted(vocabulary)[:_PROBED]]))

    def _check_text_is_kept(self, path: Path, text: str) -> None:
        """Refuse a post-processor that leaves out the tokens of the text.

        ``text`` is encoded with the post-processor and without it.

        Raises:
            ValueError: no token of the text is left.
        """
        with package_errors("tokenizers", f"--tokenizer-model {path}: a sample text "):
            made = self._backend.encode(text, add_special_tokens=self._adds_special)
            processor, self._backend.post_processor = self._backend.post_processor, None
            plain = self._backend.encode(text, add_special_tokens=False)
        self._backend.post_processor = processor
        if plain.ids and all(made.special_tokens_mask):
            raise ValueError(
                f"--tokenizer-model {path}: its post_processor names no sequence ($A), so that "
                f"every text loses its tokens; mend it, or give {_WHAT}"
            )

    def _id_of_end(self, folder: Path) -> int:
        name = _end_of_text(folder)
        found = self._backend.token_to_id(name) if name else None
        if found is None:
            raise ValueError(
                f"--tokenizer-model {folder}: "
                f"{f'its eos_token {name!r} is no token' if name else 'it names no eos_token'}, so "
                "no document could end; name one in its tokenizer_config.json"
            )
        return int(found)


def _end_of_text(folder: Path) -> str | None:
    """Return the ``eos_token`` that a folder's files name; ``None``: they name none."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            content = read_json("--tokenizer-model", folder / name, _WHAT)
            token = content.get("eos_token") if isinstance(content, dict) else None
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                return text
    return None
