#!/usr/bin/env python3
"""Look into checkpoints, check them, compare two, and write one anew.

python tools/checkpoint.py ls CHECKPOINTS
python tools/checkpoint.py show CHECKPOINTS --step 1000
python tools/checkpoint.py show CHECKPOINTS --plan > my.plan
python tools/checkpoint.py verify CHECKPOINTS
python tools/checkpoint.py diff CHECKPOINTS OTHER --step 1000 --other-step 2000
python tools/checkpoint.py reshard CHECKPOINTS TARGET --files 8 --no-optim

CHECKPOINTS is the folder of --save, and OTHER may be the same. Without --step, the last checkpoint
is meant, and if that is damaged the command ends: training would go on from an older one, but here
--step must name it. Any job loads any checkpoint, so training never needs resharding: it makes
other files of the same tensors.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from megatron.checkpoint import folder, storage
    from megatron.checkpoint.boxed import BoxedTensor
    from megatron.checkpoint.choose import choose
    from megatron.checkpoint.common import read_common
    from megatron.checkpoint.digests import threads_of_rank
    from megatron.checkpoint.folder import DamagedError
    from megatron.checkpoint.metadata import read_metadata
    from megatron.checkpoint.saved_tokenizer import SavedTokenizer
    from megatron.checkpoint.storage import SaveError
    from megatron.checkpoint.train_tensors import WEIGHT
    from megatron.commands.progress import shown, under_way
    from megatron.commands.whole_process import reader_may_stop_early
    from megatron.flags.command import read_command
    from megatron.flags.declare import flag, positional
    from megatron.flags.ranges import COUNT, NOT_NEGATIVE
    from megatron.flags.readable import told_as_error
    from megatron.parallel.box import whole
    from megatron.parallel.groups import ConnectedAxis
    from megatron.schedules.counted import counted

ALONE = ConnectedAxis("world", 0, (0,))
PLAN_LINES, PLAN_WIDTH = 12, 100
"""Lines of a plan that are shown, and characters of each line."""
AT_ONCE = 1 << 30
"""Most bytes of tensors in memory at once, where the work can be done in batches."""


def list_all(root: Path) -> None:
    """Print a line for every complete checkpoint."""
    found, pointer = folder.complete(root), folder.pointed_to(root)
    if not found:
        raise DamagedError(f"{root} has no complete checkpoint")
    print(f"{'iteration':>10}{'files':>7}{'GB':>9}  ")
    for iteration in found:
        files = folder.read_manifest(folder.folder_of(root, iteration))
        size = sum(entry.size for entry in files.values())
        last = "  <- last" if iteration == pointer else ""
        print(f"{iteration:>10}{len(files):>7}{size / 1e9:>9.3f}{last}")
    for line in dict.fromkeys(_tokenizers(root, found)):
        print(line)


def _tokenizers(root: Path, iterations: Sequence[int]) -> Iterator[str]:
    """Yield a line about the tokenizer of each checkpoint that remembers one with files."""
    for iteration in iterations:
        try:
            saved = SavedTokenizer.read(folder.folder_of(root, iteration))
        except DamagedError as error:
            yield str(error)
            continue
        if saved is not None and saved.files:
            place = saved.folder(root).name if saved.is_copied else "no copy, as it is large"
            files = counted(len(saved.files), "file")
            size = f"{saved.size / 1e9:.3f} GB"
            yield f"tokenizer: {place}: {saved.settings.tokenizer_type}, {files}, {size}"


def show(where: Path, *, plan_alone: bool = False) -> None:
    """Print the content of a checkpoint, or only its plan, as ``--schedule-file`` reads it."""
    common = read_common(where)
    if plan_alone:
        print(common["plan"], end="")
        return
    for name, value in common.items():
        if name not in ("model", "plan"):
            print(f"{name:24}{value}")
    print("model")
    for name, value in common.get("model", {}).items():
        print(f"  {name:26}{value}")
    print("plan")
    for line in beginning(common["plan"]):
        print(f"  {line}")
    print("tensors")
    for name, saved in tensors(where).items():
        kind = str(saved.properties.dtype).removeprefix("torch.")
        print(
            f"  {name:72}{list(saved.size)!s:>18} {kind}, in {counted(len(saved.chunks), 'part')}"
        )


def beginning(plan: str) -> Iterator[str]:
    """Yield the first lines of a plan, cut off, and a line about the rest."""
    lines = plan.splitlines()
    for line in lines[:PLAN_LINES]:
        yield line if len(line) <= PLAN_WIDTH else line[:PLAN_WIDTH].rsplit(" ", 1)[0] + " ..."
    if len(lines) > PLAN_LINES or any(len(line) > PLAN_WIDTH for line in lines):
        yield f"(the beginning of {counted(len(lines), 'line')}; show --plan prints all of it)"


def verify(where: Path) -> bool:
    """Compare every file with the manifest; return whether all files agree."""
    right = True
    manifest, threads = folder.read_manifest(where), threads_of_rank()
    for name in shown(sorted(manifest), f"comparing {where.name}"):
        for problem in folder.problems(where, [name], manifest=manifest, threads=threads):
            print(problem)
            right = False
    for problem in _problems_of_tokenizer(where):
        print(problem)
        right = False
    print(f"{where}: {'every file is as written' if right else 'damaged'}")
    return right


def _problems_of_tokenizer(where: Path) -> Iterator[str]:
    """Yield the faults of the files of a checkpoint's tokenizer, which stand beside it."""
    try:
        saved = SavedTokenizer.read(where)
        yield from saved.problems(where.parent) if saved is not None else ()
    except DamagedError as error:
        yield str(error)


@dataclass(frozen=True)
class Difference:
    """A tensor in which two checkpoints differ.

    Attributes:
        name: name of the tensor.
        fault: kind of the difference, in words that are the same for all tensors.
        told: the difference in words about this tensor.
        size: largest difference between two values.
    """

    name: str
    fault: str
    told: str
    size: float = 0.0

    @property
    def kind(self) -> str:
        """The role of the tensor for its parameter: weight, or one of the moments."""
        return self.name.split(".")[0]


def difference(one: Path, other: Path, *, every: bool = False) -> bool:
    """Print how two checkpoints differ; return whether they are the same.

    Tensors of a kind with the same fault share a line; with ``every`` each tensor has a line.
    """
    lines = [*_other_facts(read_common(one), read_common(other))]
    groups: dict[object, list[Difference]] = {}
    for found in differences(one, other):
        groups.setdefault(found if every else (found.fault, found.kind), []).append(found)
    lines += map(_told, groups.values())
    print("\n".join(lines) if lines else "the same, to the last bit")
    return not lines


def differences(one: Path, other: Path) -> Iterator[Difference]:
    """Yield the tensors in which two checkpoints differ."""
    mine, theirs = tensors(one), tensors(other)
    for name in sorted(mine.keys() ^ theirs.keys()):
        place = f"only in {one if name in mine else other}"
        yield Difference(name, place, place)
    both = {name: saved for name, saved in mine.items() if name in theirs}
    for name in [name for name, saved in both.items() if saved.size != theirs[name].size]:
        shapes = f"{list(both[name].size)} and {list(theirs[name].size)}"
        yield Difference(name, "of two shapes", shapes)
        del both[name]
    for names in shown(list(batches(both)), "reading tensors"):
        for name, a, b in _pairs(one, other, {name: both[name] for name in names}):
            if not torch.equal(a, b):
                size = float((a.double() - b.double()).abs().max())
                yield Difference(name, "with other values", f"differs by up to {size:.3g}", size)


def _told(group: Sequence[Difference]) -> str:
    """Return the line about tensors of a kind with the same fault."""
    most = max(group, key=lambda found: (isnan(found.size), found.size))
    if len(group) == 1:
        return f"{most.name}: {most.told}"
    return (
        f"{most.kind}: {counted(len(group), 'tensor')} {most.fault} (--all names them), first of "
        f"all {most.name}: {most.told}"
    )


def reshard(where: Path, target: Path, files: int, *, optimizer: bool) -> None:
    """Write the tensors of a checkpoint to another folder, in ``files`` files.

    Raises:
        DamagedError: the folder already has this checkpoint, or there are fewer tensors than files.
    """
    common = read_common(where)
    iteration = int(common["iteration"])
    if folder.folder_of(target, iteration).exists():
        raise DamagedError(
            f"{target} has a checkpoint of iteration {iteration} already: name another folder"
        )
    keep = {n: s for n, s in tensors(where).items() if optimizer or n.startswith(f"{WEIGHT}.")}
    if files > len(keep):
        raise DamagedError(f"--files {files}: {where} has {counted(len(keep), 'tensor')} to write")
    with under_way("reading tensors"):
        content = _read(where, keep)
    common["has_optimizer"] = common["has_optimizer"] and optimizer
    with under_way(f"writing {target}"):
        written = storage.write(target, iteration, content, common, ALONE, files)
    _copy_tokenizer(where, target)
    print(f"{written}: {counted(len(content), 'tensor')} of {where}")


def _copy_tokenizer(where: Path, target: Path) -> None:
    """Copy the files of a checkpoint's tokenizer; if that fails, say so."""
    try:
        saved = SavedTokenizer.read(where)
        if saved is not None and saved.is_copied:
            saved.copy(target, saved.placed(where.parent))
    except (DamagedError, OSError) as error:
        print(f"the tokenizer's files are not copied: {error}")


def tensors(where: Path) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of every tensor, by name; the files must have been checked."""
    known = read_metadata(where).state_dict_metadata
    return {
        name: saved
        for name, saved in sorted(known.items())
        if isinstance(saved, TensorStorageMetadata)
    }


def batches(sizes: Mapping[str, TensorStorageMetadata]) -> Iterator[list[str]]:
    """Yield batches of names of tensors: at most ``AT_ONCE`` bytes, or one larger tensor."""
    batch: list[str] = []
    total = 0
    for name, saved in sizes.items():
        size = saved.size.numel() * saved.properties.dtype.itemsize
        if batch and total + size > AT_ONCE:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += size
    if batch:
        yield batch


def _read(where: Path, sizes: Mapping[str, TensorStorageMetadata]) -> dict[str, BoxedTensor]:
    made = {
        name: BoxedTensor(
            torch.empty(saved.size, dtype=saved.properties.dtype), saved.size, whole(saved.size)
        )
        for name, saved in sizes.items()
    }
    storage.read(where, made, ALONE)
    return made


def _pairs(
    one: Path, other: Path, sizes: Mapping[str, TensorStorageMetadata]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    mine, theirs = _read(one, sizes), _read(other, sizes)
    for name in sizes:
        yield name, mine[name].as_subclass(torch.Tensor), theirs[name].as_subclass(torch.Tensor)


def _other_facts(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*one, *other} - {"plan", "model"}):
        if one.get(name) != other.get(name):
            yield f"{name}: {one.get(name)} and {other.get(name)}"
    models = one.get("model", {}), other.get("model", {})
    for name in sorted({*models[0], *models[1]}):
        if models[0].get(name) != models[1].get(name):
            yield f"model.{name}: {models[0].get(name)} and {models[1].get(name)}"


@dataclass(frozen=True, kw_only=True)
class ListFlags:
    """List the complete checkpoints."""

    root: Path = positional("Folder of --save.", "CHECKPOINTS")


@dataclass(frozen=True, kw_only=True)
class VerifyFlags(ListFlags):
    """Compare every file with the manifest."""

    step: int | None = flag(None, "Iteration.", NOT_NEGATIVE, unset="the last")


@dataclass(frozen=True, kw_only=True)
class ShowFlags(VerifyFlags):
    """Print what a checkpoint holds."""

    plan: bool = flag(False, "Print the plan alone, whole.")


@dataclass(frozen=True, kw_only=True)
class DiffFlags(VerifyFlags):
    """Compare two checkpoints."""

    other: Path = positional("Folder of the other one.", "OTHER")
    other_step: int | None = flag(None, "Its iteration.", NOT_NEGATIVE, unset="--step")
    all: bool = flag(False, "Name every tensor.")


@dataclass(frozen=True, kw_only=True)
class ReshardFlags(VerifyFlags):
    """Write the tensors to other files."""

    target: Path = positional("Folder of the new checkpoint.", "TARGET")
    files: int = flag(1, "To write.", COUNT)
    no_optim: bool = flag(False, "Only the weights.")


COMMANDS = {
    "ls": ListFlags,
    "show": ShowFlags,
    "verify": VerifyFlags,
    "diff": DiffFlags,
    "reshard": ReshardFlags,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    with reader_may_stop_early():
        flags = read_command(arguments, __doc__, COMMANDS)
        with told_as_error(DamagedError, SaveError):
            right = _run(flags)
    sys.exit(0 if right else 1)


def _run(flags: ListFlags) -> bool:
    """Run the command of the command line; return whether it found no fault."""
    match flags:
        case ShowFlags():
            show(choose(flags.root, flags.step, each=shown), plan_alone=flags.plan)
        case DiffFlags():
            step = flags.step if flags.other_step is None else flags.other_step
            one = choose(flags.root, flags.step, each=shown)
            other = choose(flags.other, step, each=shown)
            return difference(one, other, every=flags.all)
        case ReshardFlags():
            where = choose(flags.root, flags.step, each=shown)
            reshard(where, flags.target, flags.files, optimizer=not flags.no_optim)
        case VerifyFlags():
            return verify(choose(flags.root, flags.step, checked=False))
        case _:
            list_all(flags.root)
    return True


if __name__ == "__main__":
    main()
