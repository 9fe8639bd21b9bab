"""What disks, copies and people do to checkpoints, drawn by a seed.

A mutation that edits a file may also correct its digest in the manifest, as somebody would who
wants the edited file to be loaded.
"""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.checkpoint import folder
from megatron.checkpoint.common import COMMON
from megatron.checkpoint.digests import digest_of
from megatron.checkpoint.metadata import METADATA

Mutation = Callable[[Path, random.Random], None]
"""Changes something in the folder of all checkpoints."""


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Have the folder made."""
        return os.mkdir, (self._path,)


def trap_of(root: Path) -> Path:
    """Return the folder that exists once something from ``root`` was executed."""
    return root.with_name(root.name + ".executed")


def _newest(root: Path, draw: random.Random) -> Path:
    """Return the folder of the checkpoint that is loaded first."""
    return folder.folder_of(root, folder.candidates(root)[0])


def _file(root: Path, draw: random.Random) -> Path:
    return draw.choice([path for path in sorted(_newest(root, draw).iterdir()) if path.is_file()])


def _edited(change: Callable[[bytearray, random.Random], None]) -> Mutation:
    def mutate(root: Path, draw: random.Random) -> None:
        path = _file(root, draw)
        content = bytearray(path.read_bytes())
        change(content, draw)
        path.write_bytes(bytes(content))

    return mutate


def _flip(content: bytearray, draw: random.Random) -> None:
    for _ in range(draw.randint(1, 8)):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def _truncate(content: bytearray, draw: random.Random) -> None:
    del content[draw.randrange(len(content)) :]


def _zero(content: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(content))
    content[at : at + 4096] = bytes(len(content[at : at + 4096]))


def _extend(content: bytearray, draw: random.Random) -> None:
    content += draw.randbytes(draw.randint(1, 100))


def _garble(content: bytearray, draw: random.Random) -> None:
    content[:] = draw.randbytes(len(content))


def _remove(root: Path, draw: random.Random) -> None:
    _file(root, draw).unlink()


def _folder_instead(root: Path, draw: random.Random) -> None:
    path = _file(root, draw)
    path.unlink()
    path.mkdir()


def _pipe_instead(root: Path, draw: random.Random) -> None:
    path = _file(root, draw)
    path.unlink()
    os.mkfifo(path)


def _link_to_itself(root: Path, draw: random.Random) -> None:
    path = _file(root, draw)
    path.unlink()
    path.symlink_to(path.name)


def _swap_files(root: Path, draw: random.Random) -> None:
    one, other = draw.sample(folder.complete(root), 2)
    name = draw.choice(sorted(path.name for path in _newest(root, draw).iterdir()))
    _swap(folder.folder_of(root, one) / name, folder.folder_of(root, other) / name)


def _swap_ranks(root: Path, draw: random.Random) -> None:
    _swap(*sorted(_newest(root, draw).glob("*.distcp"))[:2])


def _swap_folders(root: Path, draw: random.Random) -> None:
    _swap(*(folder.folder_of(root, number) for number in draw.sample(folder.complete(root), 2)))


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _foreign(root: Path, draw: random.Random) -> None:
    where = draw.choice([root, _newest(root, draw)])
    for name in draw.sample(["__9_0.distcp", "model.safetensors", ".nfs0001", "notes", "x.tmp"], 3):
        (where / name).write_bytes(draw.randbytes(50))
    (where / "iter_0000099").mkdir()
    (where / "iter_0000005.partial").write_text("no folder")


def _foreign_checkpoint(root: Path, draw: random.Random) -> None:
    """A folder of Megatron's own, to which the pointer leads."""
    where = root / "iter_0001000" / "mp_rank_00"
    where.mkdir(parents=True)
    (where / "model_optim_rng.pt").write_bytes(pickle.dumps(Trap(trap_of(root))))
    (root / folder.POINTER).write_text("1000")


def _manifest(change: Callable[[Any, random.Random], object]) -> Mutation:
    def mutate(root: Path, draw: random.Random) -> None:
        path = _newest(root, draw) / folder.MANIFEST
        content = json.loads(path.read_text())
        changed = change(content, draw)
        path.write_text(json.dumps(content if changed is None else changed))

    return mutate


def _drop_entry(content: Any, draw: random.Random) -> None:
    del content["files"][draw.choice(sorted(content["files"]))]


def _wrong_entry(content: Any, draw: random.Random) -> None:
    entry = content["files"][draw.choice(sorted(content["files"]))]
    key = draw.choice(["size", "blake3", "part"])
    entry[key] = draw.choice([None, -1, "", "0" * 64, 10**30, [], {}])


def _more_entries(content: Any, draw: random.Random) -> None:
    name = draw.choice(["../x", "/etc/passwd", "", "..", "no.distcp", "a\0b", "é" * 300])
    content["files"][name] = {"size": 1, "blake3": "0" * 64}


def _other_header(content: Any, draw: random.Random) -> None:
    key = draw.choice(["format", "iteration", "files"])
    if draw.random() < 0.3:
        del content[key]
    else:
        content[key] = draw.choice([None, 2, "1", [], 4, 1.5, True, {}])


def _other_document(content: Any, draw: random.Random) -> object:
    return draw.choice([[], {}, "manifest", 1, {"files": []}, [content]])


def _pointer(root: Path, draw: random.Random) -> None:
    path, kind = root / folder.POINTER, draw.randrange(4)
    path.unlink()
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        words = ["2", "4", "5", "999", "-2", "", "six", "9" * 5000, "4.0", "6\n4", "\0", "release"]
        path.write_text(draw.choice(words))


def _correct_digest(path: Path) -> None:
    manifest = path.parent / folder.MANIFEST
    content = json.loads(manifest.read_text())
    content["files"][path.name] = vars(digest_of(path))
    manifest.write_text(json.dumps(content))


def _corrected(change: Mutation, name: str) -> Mutation:
    """Return a mutation of one file of the newest checkpoint, after which its digest is right."""

    def mutate(root: Path, draw: random.Random) -> None:
        path = _newest(root, draw) / name
        change(path, draw)
        _correct_digest(path)

    return mutate


def _edit_common(path: Path, draw: random.Random) -> None:
    content = json.loads(path.read_text())
    facts = ["iteration", "consumed_samples", "optimizer_steps", "has_optimizer", "model"]
    key = draw.choice([*facts, "optimizer"])
    if draw.random() < 0.3:
        content.pop(key)
    elif key in ("model", "optimizer") and draw.random() < 0.5:
        content[key][draw.choice(sorted(content[key]))] = "other"
    else:
        content[key] = draw.choice([None, -1, "6", [], 1.5, 10**30, "", [[]]])
    path.write_text(json.dumps(content))


def _swap_common(root: Path, draw: random.Random) -> None:
    """The file of another iteration, in which every value is sound."""
    where = _newest(root, draw)
    others = [number for number in folder.complete(root) if folder.folder_of(root, number) != where]
    shutil.copy(folder.folder_of(root, draw.choice(others)) / COMMON, where / COMMON)
    _correct_digest(where / COMMON)


def _garble_file(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    draw.choice([_garble, _truncate, _extend])(content, draw)
    path.write_bytes(bytes(content))


def _set_trap(path: Path, draw: random.Random) -> None:
    size = path.stat().st_size
    path.write_bytes(pickle.dumps(Trap(trap_of(path.parents[1]))).ljust(size, b"."))


def _edit_metadata(path: Path, draw: random.Random) -> None:
    """Take from, or add to, what the metadata say of one tensor."""
    found: Any = pickle.loads(path.read_bytes())
    name = draw.choice(sorted(found.state_dict_metadata))
    saved = found.state_dict_metadata[name]
    place = found.storage_data[MetadataIndex(name, saved.chunks[-1].offsets)]
    kind = draw.randrange(6)
    if kind == 0:
        saved.chunks.pop()
    elif kind == 1:
        del found.state_dict_metadata[name]
    elif kind == 2:
        place.relative_path = draw.choice(["../x", "/etc/passwd", "__9_0.distcp", ""])
    elif kind == 3:
        place.offset += draw.choice([-(10**9), 10**9])
    elif kind == 4:
        found.storage_data.clear()
    else:
        saved.properties = None
        found.state_dict_metadata = draw.choice([None, [], {name: None}])
    path.write_bytes(pickle.dumps(found))


def _trap_without_digest(root: Path, draw: random.Random) -> None:
    """Set a trap in a file, and have nobody compare that file with the manifest."""
    where = _newest(root, draw)
    name = draw.choice([METADATA, "__0_0.distcp", "__1_0.distcp"])
    _set_trap(where / name, draw)
    _manifest(lambda content, _: content["files"].pop(name) and None)(root, draw)


def _everywhere(change: Mutation) -> Mutation:
    """Return a mutation of every checkpoint there is, the newest first."""

    def mutate(root: Path, draw: random.Random) -> None:
        for iteration in folder.complete(root)[::-1]:
            (root / folder.POINTER).write_text(str(iteration))
            change(root, draw)
        (root / folder.POINTER).write_text("6")

    return mutate


MUTATIONS: Final[dict[str, Mutation]] = {
    "flipped": _edited(_flip),
    "truncated": _edited(_truncate),
    "zeros": _edited(_zero),
    "longer": _edited(_extend),
    "garbled": _edited(_garble),
    "missing": _remove,
    "folder instead": _folder_instead,
    "pipe instead": _pipe_instead,
    "link to itself": _link_to_itself,
    "files swapped": _swap_files,
    "ranks swapped": _swap_ranks,
    "folders swapped": _swap_folders,
    "foreign files": _foreign,
    "foreign checkpoint": _foreign_checkpoint,
    "manifest: entry dropped": _manifest(_drop_entry),
    "manifest: entry wrong": _manifest(_wrong_entry),
    "manifest: entries more": _manifest(_more_entries),
    "manifest: header": _manifest(_other_header),
    "manifest: other document": _manifest(_other_document),
    "pointer": _pointer,
    "common corrected": _corrected(_edit_common, COMMON),
    "common garbled, corrected": _corrected(_garble_file, COMMON),
    "common of another, corrected": _swap_common,
    "metadata corrected": _corrected(_edit_metadata, METADATA),
    "metadata garbled, corrected": _corrected(_garble_file, METADATA),
    "trap in metadata": lambda root, draw: _set_trap(_newest(root, draw) / METADATA, draw),
    "trap in metadata, corrected": _corrected(_set_trap, METADATA),
    "trap in tensors, corrected": _corrected(_set_trap, "__1_0.distcp"),
    "trap without digest": _trap_without_digest,
    "all flipped": _everywhere(_edited(_flip)),
    "all missing": _everywhere(_remove),
    "all manifests": _everywhere(_manifest(_other_document)),
}
"""Name -> mutation."""


def mutate(root: Path, seed: int) -> str:
    """Mutate the checkpoints in ``root``; return by which mutation."""
    name = list(MUTATIONS)[seed % len(MUTATIONS)]
    MUTATIONS[name](root, random.Random(seed))
    return name
