#!/usr/bin/env python3
"""Look into checkpoints, check them, compare two, and write one anew.

python tools/checkpoint.py ls CHECKPOINTS
python tools/checkpoint.py show CHECKPOINTS --step 1000
python tools/checkpoint.py verify CHECKPOINTS
python tools/checkpoint.py diff CHECKPOINTS CHECKPOINTS --step 1000 --other-step 2000
python tools/checkpoint.py reshard CHECKPOINTS WEIGHTS --files 8 --no-optim

CHECKPOINTS is the folder of --save. Without --step, the last good checkpoint is meant. Any job
loads any checkpoint, so training never needs resharding: it makes other files of the same tensors.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.progress import track
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.checkpoint import folder, storage
from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.folder import DamagedError
from megatron.checkpoint.metadata import read_metadata
from megatron.checkpoint.storage import SaveError
from megatron.checkpoint.train_tensors import WEIGHT
from megatron.parallel.box import whole
from megatron.parallel.groups import ConnectedAxis

ALONE = ConnectedAxis("world", 0, (0,))
AT_ONCE = 1 << 30
"""Bytes of tensors that are in memory at once, where they need not all be."""


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


def show(where: Path) -> None:
    """Print what a checkpoint holds."""
    common = storage.read_common(where)
    for name, value in common.items():
        if name not in ("model", "plan"):
            print(f"{name:24}{value}")
    print("model")
    for name, value in common.get("model", {}).items():
        print(f"  {name:26}{value}")
    print("tensors")
    for name, saved in tensors(where).items():
        kind = str(saved.properties.dtype).removeprefix("torch.")
        print(f"  {name:72}{list(saved.size)!s:>18} {kind}, in {len(saved.chunks)} parts")


def verify(where: Path) -> bool:
    """Compare every file with the manifest; return whether all are as written."""
    right = True
    for name in track(sorted(folder.read_manifest(where)), f"{where.name}", transient=True):
        for problem in folder.problems(where, [name]):
            print(problem)
            right = False
    print(f"{where}: {'every file is as written' if right else 'damaged'}")
    return right


def difference(one: Path, other: Path) -> bool:
    """Print in what two checkpoints differ; return whether they are the same."""
    lines = [*_other_facts(storage.read_common(one), storage.read_common(other))]
    mine, theirs = tensors(one), tensors(other)
    for name in sorted(mine.keys() ^ theirs.keys()):
        lines.append(f"{name}: only in {one if name in mine else other}")
    both = {name: saved for name, saved in mine.items() if name in theirs}
    for name in [name for name, saved in both.items() if saved.size != theirs[name].size]:
        lines.append(f"{name}: {list(both[name].size)} and {list(theirs[name].size)}")
        del both[name]
    for names in batches(both):
        for name, a, b in _pairs(one, other, {name: both[name] for name in names}):
            if not torch.equal(a, b):
                distance = float((a.double() - b.double()).abs().max())
                lines.append(f"{name}: differs by up to {distance:.3g}")
    print("\n".join(lines) if lines else "the same, to the last bit")
    return not lines


def reshard(where: Path, target: Path, files: int, *, optimizer: bool) -> None:
    """Write the tensors of a checkpoint to another folder, in so many files."""
    common = storage.read_common(where)
    keep = {n: s for n, s in tensors(where).items() if optimizer or n.startswith(f"{WEIGHT}.")}
    content = _read(where, keep)
    common["has_optimizer"] = common["has_optimizer"] and optimizer
    written = storage.write(target, int(common["iteration"]), content, common, ALONE, files)
    print(f"{written}: {len(content)} tensors")


def tensors(where: Path) -> dict[str, TensorStorageMetadata]:
    """Return what is known of every tensor, by name; the files must have been checked."""
    known = read_metadata(where).state_dict_metadata
    return {
        name: saved
        for name, saved in sorted(known.items())
        if isinstance(saved, TensorStorageMetadata)
    }


def batches(sizes: Mapping[str, TensorStorageMetadata]) -> Iterator[list[str]]:
    """Yield names of tensors that together have at most ``AT_ONCE`` bytes, or are one."""
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


def choose(root: Path, step: int | None, *, checked: bool = True) -> Path:
    """Return the folder of a checkpoint, with its files compared with the manifest.

    Args:
        root: of the checkpoints.
        step: iteration; ``None``: the last good one.
        checked: whether to compare at all.

    Raises:
        DamagedError: it is not there, or damaged.
    """
    found = folder.candidates(root)
    if not found:
        raise DamagedError(f"{root} has no complete checkpoint")
    if step is not None and step not in found:
        raise DamagedError(f"{root} has no checkpoint of iteration {step}, but of {sorted(found)}")
    if step is not None or not checked:
        where = folder.folder_of(root, found[0] if step is None else step)
        if checked:
            folder.verify(where)
        return where
    for iteration in found:
        where = folder.folder_of(root, iteration)
        problem = folder.problem_of(where)
        if problem is None:
            return where
        print(f"{problem}: an older checkpoint is tried", file=sys.stderr)
    raise DamagedError(f"every checkpoint in {root} is damaged")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = _parse(arguments)
    right = True
    try:
        match args.command:
            case "ls":
                list_all(args.root)
            case "show":
                show(choose(args.root, args.step))
            case "verify":
                right = verify(choose(args.root, args.step, checked=False))
            case "diff":
                step = args.step if args.other_step is None else args.other_step
                right = difference(choose(args.root, args.step), choose(args.other, step))
            case "reshard":
                where = choose(args.root, args.step)
                reshard(where, args.target, args.files, optimizer=not args.no_optim)
    except (DamagedError, SaveError) as error:
        sys.exit(f"error: {error}")
    sys.exit(0 if right else 1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("ls", "list the complete checkpoints"),
        ("show", "print what a checkpoint holds"),
        ("verify", "compare every file with the manifest"),
        ("diff", "compare two checkpoints"),
        ("reshard", "write the tensors to other files"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("root", type=Path, metavar="CHECKPOINTS")
        if name == "diff":
            command.add_argument("other", type=Path, metavar="CHECKPOINTS")
            command.add_argument("--other-step", type=int, help="default: --step")
        if name == "reshard":
            command.add_argument("target", type=Path, help="folder of the new checkpoint")
            command.add_argument("--files", type=int, default=1, help="to write (default: 1)")
            command.add_argument("--no-optim", action="store_true", help="only the weights")
        if name != "ls":
            command.add_argument("--step", type=int, help="iteration (default: the last good one)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
