"""Merges the token files of several prefixes into one pair, sequence for sequence."""

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.data.index_file import read_index, write_index
from megatron.data.indexed import IndexedDataset, bin_path, idx_path, put_in_place
from megatron.native.files import temporary_name

_COPIED_BYTES = 1 << 24


def prefixes_of(folder: Path) -> list[Path]:
    """Return the prefixes of all pairs in a folder, sorted by name as Megatron-LM's tool does.

    Raises:
        ValueError: the folder has no pair.
    """
    found = {path.name[:-4] for path in folder.iterdir() if path.suffix in (".bin", ".idx")}
    if not found:
        raise ValueError(f"--input {folder}: there are no .bin and .idx files in it")
    return [folder / name for name in sorted(found)]


def merge(prefixes: Sequence[Path], output_prefix: Path) -> tuple[int, int]:
    """Write the sequences of all prefixes, in order, to a pair that is complete or absent.

    Every pair is checked before anything is written. Tokens are copied in pieces and indices are
    mapped, so memory stays small.

    Returns:
        The numbers of sequences and of tokens written.

    Raises:
        ValueError: a pair is missing or damaged, has ids of another dtype, or is the output; or
            there is no room.
    """
    _check(prefixes, output_prefix)
    new_tokens = temporary_name(bin_path(output_prefix))
    new_index = temporary_name(idx_path(output_prefix))
    indices = [read_index(idx_path(prefix)) for prefix in prefixes]
    parts = [found.sequences for found in indices]
    try:
        with new_tokens.open("wb") as file:
            for prefix in prefixes:
                with bin_path(prefix).open("rb") as source:
                    shutil.copyfileobj(source, file, _COPIED_BYTES)
        write_index(new_index, indices[0].dtype, parts)
        size = new_tokens.stat().st_size // indices[0].dtype.itemsize
        put_in_place(new_tokens, new_index, output_prefix)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ValueError(
            f"--output-prefix {output_prefix} cannot be written ({error}): "
            f"{'make room, or ' if full else ''}give another one; nothing was kept"
        ) from error
    finally:
        new_tokens.unlink(missing_ok=True)
        new_index.unlink(missing_ok=True)
    return sum(len(part.lengths) for part in parts), size


def _check(prefixes: Sequence[Path], output_prefix: Path) -> None:
    if not output_prefix.absolute().parent.is_dir():
        raise ValueError(
            f"--output-prefix {output_prefix}: its folder does not exist; make it, or give another"
        )
    dtypes: dict[np.dtype[np.integer], Path] = {}
    for prefix in prefixes:
        try:
            dataset = IndexedDataset(prefix)
        except (ValueError, OSError) as error:
            fault = str(error).removeprefix("--data-path: ")
            raise ValueError(f"--input {prefix}: {fault}") from error
        dtypes[dataset.dtype] = prefix
        if prefix.resolve() == output_prefix.resolve():
            raise ValueError(f"--output-prefix {output_prefix} is one of the --input: give another")
    if len(dtypes) > 1:
        (first, one), (second, other), *_ = dtypes.items()
        raise ValueError(
            f"--input {one} holds ids of {first} and {other} of {second}, so they come from "
            "different tokenizers: merge only what one tokenizer has made"
        )
