"""Byte-pair encodings over bytes: GPT-2's two files, and the vocabularies that tiktoken reads.

Both encode special tokens that are written out in a text as ordinary text. So a text never yields
the end-of-document token.
"""

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from megatron.data.tokenizers.files import library, needed, package_errors, read_json
from megatron.data.tokenizers.hugging_face import PackageTokenizer
from megatron.data.tokenizers.interface import Tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings

END_OF_TEXT: Final = "<|endoftext|>"
"""The end of a document in GPT-2's vocabulary."""

PATTERNS: Final = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""``--tiktoken-pattern``: regular expressions that cut text into words, by Megatron-LM's names."""

_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_NEEDED_SPECIAL_TOKENS = _SPECIAL_TOKENS[:3]
_TIKTOKEN_VOCABULARY = 1 << 17  # Megatron-LM's default for --vocab-size
_BYTES = 256


class GPT2BPETokenizer(PackageTokenizer):
    """GPT-2's byte-pair encoding; a document ends with ``<|endoftext|>``.

    GPT-2's regular expression cuts the text into words, and ``vocab.json`` gives the ids. The
    package ``tokenizers`` does the work.

    Args:
        config: with ``vocab_file`` and ``merge_file``.

    Raises:
        ValueError: a file is missing or damaged, or lacks a byte or ``<|endoftext|>``; or there is
            no package ``tokenizers``.
    """

    def __init__(self, config: TokenizerSettings) -> None:
        kind = config.tokenizer_type
        tokenizers = library("tokenizers", f"--tokenizer-type {kind}")
        what = "GPT-2's vocab.json, one entry with its id for every token"
        vocab = needed("--vocab-file", config.vocab_file, kind, what)
        merges = needed("--merge-file", config.merge_file, kind, "GPT-2's merges.txt")
        pre_tokenizers = tokenizers.pre_tokenizers
        ids = _checked_ids(read_json("--vocab-file", vocab, what), vocab, pre_tokenizers, what)
        try:
            model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(
                f"--merge-file {merges} cannot be read beside --vocab-file {vocab} ({error}); give "
                "two files that belong together"
            ) from error
        self.vocab_size, self.eod = len(ids), ids[END_OF_TEXT]
        self._backend = tokenizers.Tokenizer(model)
        self._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._backend.decoder = tokenizers.decoders.ByteLevel()


def _checked_ids(content: Any, path: Path, pre_tokenizers: Any, what: str) -> dict[str, int]:
    """Return the content of ``vocab.json``; its ids and bytes must be complete."""
    if not isinstance(content, dict) or set(map(type, content.values())) - {int}:
        raise ValueError(f"--vocab-file {path} does not give tokens ids; give {what}")
    if sorted(content.values()) != list(range(len(content))):
        raise ValueError(
            f"--vocab-file {path}: its {len(content)} ids are not 0 to {len(content) - 1}, each "
            f"once; give {what}"
        )
    lacking = {END_OF_TEXT, *pre_tokenizers.ByteLevel.alphabet()} - content.keys()
    if lacking:
        raise ValueError(
            f"--vocab-file {path} lacks {len(lacking)} of the 256 bytes and {END_OF_TEXT}, for "
            f"example {min(lacking)!r}; give {what}"
        )
    return content


class TikTokenizer(Tokenizer):
    """A vocabulary of the package tiktoken in Megatron-LM's (and Mistral's) JSON form.

    The file is a list of ``{"rank": N, "token_bytes": base64, "token_str": text}``. Its first 256
    entries are the single bytes. The first ids are special tokens; the entry of rank N has the id N
    plus their number. A document ends with ``</s>``.

    Args:
        config: with ``tokenizer_model``. The first entries of this file are read, as many as
            ``vocab_size`` has room for beside the special tokens.

    Raises:
        ValueError: the file is missing or damaged, the special tokens do not fit, or there is no
            package ``tiktoken``.
    """

    def __init__(self, config: TokenizerSettings) -> None:
        kind = config.tokenizer_type
        tiktoken = library("tiktoken", f"--tokenizer-type {kind}")
        what = "a tiktoken vocabulary in JSON: a list of objects with rank and token_bytes"
        path = needed("--tokenizer-model", config.tokenizer_model, kind, what)
        special = _special_tokens(config)
        room = (config.vocab_size or _TIKTOKEN_VOCABULARY) - len(special)
        if room < _BYTES:
            raise ValueError(
                f"--vocab-size {config.vocab_size or _TIKTOKEN_VOCABULARY} leaves no room for 256 "
                f"bytes beside --tiktoken-num-special-tokens {len(special)}; change one of them"
            )
        if config.tiktoken_pattern not in PATTERNS:
            raise ValueError(
                f"--tiktoken-pattern {config.tiktoken_pattern}: choose one of {', '.join(PATTERNS)}"
            )
        content = read_json("--tokenizer-model", path, what)
        ranks = _ranks(content, path, what, room, len(special))
        self.vocab_size, self.eod = len(ranks) + len(special), special.index("</s>")
        self._backend = tiktoken.Encoding(
            name=path.stem,
            pat_str=PATTERNS[config.tiktoken_pattern],
            mergeable_ranks=ranks,
            special_tokens={token: index for index, token in enumerate(special)},
        )

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens written out in it are encoded as ordinary text."""
        with package_errors("tiktoken"):
            return list(self._backend.encode_ordinary(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids)))


def _special_tokens(config: TokenizerSettings) -> list[str]:
    """Return the names of all special tokens: the given names, then numbered names."""
    count = config.tiktoken_num_special_tokens
    named = list(config.tokenizer_special_tokens or _SPECIAL_TOKENS[:count])
    lacking = [token for token in _NEEDED_SPECIAL_TOKENS if token not in named]
    if lacking or len(set(named)) < len(named):
        raise ValueError(
            f"--tokenizer-special-tokens {' '.join(named)}: "
            f"{f'{lacking[0]} is missing' if lacking else 'a token stands there twice'}; give each "
            f"once, {', '.join(_NEEDED_SPECIAL_TOKENS)} among them"
        )
    if len(named) > count:
        raise ValueError(
            f"--tiktoken-num-special-tokens {count} is fewer than the {len(named)} special tokens "
            "that are named; raise it"
        )
    return [*named, *(f"<SPECIAL_{index}>" for index in range(len(named), count))]


def _ranks(content: Any, path: Path, what: str, most: int, first: int) -> dict[bytes, int]:
    """Return ids by token bytes: the first ``most`` entries, numbered from ``first`` on."""
    if not isinstance(content, list) or len(content) < _BYTES:
        raise ValueError(f"--tokenizer-model {path} holds no list of 256 and more; give {what}")
    ranks: dict[bytes, int] = {}
    for rank, entry in enumerate(content[:most]):
        try:
            token = base64.b64decode(entry["token_bytes"], validate=True)
            right = entry["rank"] == rank and (rank >= _BYTES or token == bytes([rank]))
        except (TypeError, KeyError, ValueError, binascii.Error):
            right, token = False, b""
        if not right or not token or token in ranks:
            raise ValueError(
                f"--tokenizer-model {path}: its entry {rank} is not that of rank {rank} with "
                f"token_bytes of its own (the first 256 are the bytes in order); give {what}"
            )
        ranks[token] = rank + first
    return ranks
