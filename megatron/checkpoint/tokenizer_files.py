"""The files that a tokenizer is read from, and how their copies beside checkpoints are called."""

from pathlib import Path
from typing import Final

from megatron.checkpoint.digests import FileDigest, digest_of
from megatron.data.tokenizers.settings import TokenizerSettings

LARGEST: Final = 64 << 20
"""Bytes of all files of a tokenizer together, up to which they are copied."""

PATHS: Final = ("tokenizer_model", "vocab_file", "merge_file")
"""Settings that name files."""

MODEL: Final = ("tokenizer.model",)
"""The copy of most kinds of tokenizers, which read one file."""

GPT2: Final = {"vocab.json": "vocab_file", "merges.txt": "merge_file"}
"""The copies of GPT-2's files, each with the setting that names its file."""

_NO_FILES: Final = (None, "NullTokenizer")
_HUGGING_FACE: Final = "tokenizer.json"
_BESIDE: Final = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside ``tokenizer.json`` that are read if they are there."""


def sources(used: TokenizerSettings) -> dict[str, Path]:
    """Return the files that a tokenizer is read from, by the names of their copies.

    A file whose flag is not given is left out.
    """
    kind, model = used.tokenizer_type, used.tokenizer_model
    if kind == "GPT2BPETokenizer":
        named = {name: getattr(used, setting) for name, setting in GPT2.items()}
        return {name: path for name, path in named.items() if path is not None}
    if kind in _NO_FILES or model is None:
        return {}
    if kind != "HuggingFaceTokenizer":
        return {MODEL[0]: model}
    main = model / _HUGGING_FACE if model.is_dir() else model
    beside = {name: main.parent / name for name in _BESIDE if (main.parent / name).is_file()}
    return {_HUGGING_FACE: main} | beside


def names(kind: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the copies that a kind of tokenizer has, and the copies that the kind may have."""
    if kind in _NO_FILES:
        return (), ()
    if kind == "GPT2BPETokenizer":
        return tuple(GPT2), ()
    return ((_HUGGING_FACE,), _BESIDE) if kind == "HuggingFaceTokenizer" else (MODEL, ())


def fault_of(path: Path, expected: FileDigest) -> str | None:
    """Return the reason why a copy is not the saved file; ``None``: the copy is right."""
    if path.is_symlink() or path.parent.is_symlink():
        return f"{path} is a link, or its folder is: a copy of a tokenizer's file stands there"
    try:
        size = path.stat().st_size
        if size > LARGEST:
            return f"{path} has {size:,} bytes, and {expected.size:,} were written"
        found = digest_of(path)
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read ({error})"
    if found == expected:
        return None
    return (
        f"{path} is not what was written: its BLAKE3 digest is {found.blake3}, and that of the "
        f"run's tokenizer {expected.blake3}"
    )
