"""Chooses the checkpoint of a folder that a command works on, and reads which model it holds."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from megatron.checkpoint import folder, saved_model
from megatron.checkpoint.common import read_checked_common
from megatron.checkpoint.digests import threads_of_rank
from megatron.checkpoint.folder import DamagedError
from megatron.model.settings import ModelSettings

Each: TypeAlias = Callable[[Sequence[str], str], Iterable[str]]


def choose(
    root: Path, step: int | None, *, checked: bool = True, each: Each = lambda names, _: names
) -> Path:
    """Return the folder of a checkpoint, after its files were compared with the manifest.

    Args:
        root: folder of all checkpoints.
        step: iteration of the checkpoint; ``None``: the last checkpoint.
        checked: whether to compare the files.
        each: yields its file names one by one while the files are compared, and may show the
            progress; its second argument describes the work.

    Raises:
        DamagedError: the checkpoint is missing or damaged.
    """
    found = folder.candidates(root)
    if not found:
        raise DamagedError(f"{root} has no complete checkpoint")
    if step is not None and step not in found:
        raise DamagedError(f"{root} has no checkpoint of iteration {step}, but of {sorted(found)}")
    where = folder.folder_of(root, found[0] if step is None else step)
    problem = _problem_of(where, each) if checked else None
    if problem is not None:
        others = [iteration for iteration in found if folder.folder_of(root, iteration) != where]
        way_out = f"--step takes another one: {others}" if others else "there is no other one"
        raise DamagedError(f"{where.name} is damaged: {problem}; {way_out}")
    return where


def _problem_of(where: Path, each: Each) -> str | None:
    """Return the first fault of a checkpoint; ``None``: there is no fault."""
    try:
        manifest = folder.read_manifest(where)
    except DamagedError as error:
        return str(error)
    names = each(sorted(manifest), f"comparing {where.name}")
    return folder.problem_of(where, names, manifest=manifest, threads=threads_of_rank())


def read_model(where: Path) -> ModelSettings:
    """Return the model whose weights a checkpoint holds.

    A field that the checkpoint lacks has its default, as in the version that wrote the checkpoint.

    Raises:
        DamagedError: the checkpoint describes no model, or a model that this version does not know.
    """
    try:
        return saved_model.read_model(read_checked_common(where)["model"])
    except ValueError as error:
        raise DamagedError(f"{where} {error}") from error
    except TypeError as error:
        raise DamagedError(f"{where} does not tell its whole model ({error})") from error
