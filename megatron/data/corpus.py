"""Text to train on: Python's standard library, or the user's own files."""

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_DOCUMENT_BYTES = 64 * 1024


@dataclass(frozen=True)
class Corpus:
    """Text files and how they become documents.

    Attributes:
        name: identifies the text; another text has another name.
        paths: files in the order they are read.
        num_bytes: size of all files.
        document_bytes: a document ends at the first blank line after this many bytes; ``None``:
            each file is one document.
    """

    name: str
    paths: tuple[Path, ...]
    num_bytes: int
    document_bytes: int | None = None

    def documents(self) -> Iterator[str]:
        """Yields the text, document by document, with every line end as it stands in the file.

        Bytes that are not UTF-8 become U+FFFD.
        """
        for path in self.paths:
            with path.open(encoding="utf-8", errors="replace", newline="") as file:
                if self.document_bytes is None:
                    yield file.read()
                else:
                    yield from _cut(file, self.document_bytes)


def standard_library() -> Corpus:
    """Every ``.py`` file of the running Python's standard library, one document each.

    About 31 MB with CPython's own tests; some Linux distributions package the tests separately.

    Raises:
        ValueError: this Python came without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    foreign = {"site-packages", "dist-packages"}
    relative = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
    paths = tuple(root / path for path in sorted(relative) if foreign.isdisjoint(path.parts))
    if not paths:
        raise ValueError(f"no .py files under {root}; give your own text with --text FILE...")
    version = sysconfig.get_config_var("py_version")
    return Corpus(f"python-{version}", paths, sum(path.stat().st_size for path in paths))


def text_files(paths: Sequence[Path]) -> Corpus:
    """The user's own text files, in UTF-8.

    Each file is cut into documents at the first blank line after every 64 KiB, so that even one
    large file has documents to divide among train, validation and test. The name is a hash of the
    files' paths, sizes and modification times.

    Raises:
        ValueError: a path is no file, or all of them are empty.
    """
    for path in paths:
        if not path.is_file():
            raise ValueError(f"--text {path} is not a file; give text files, not folders")
    resolved = tuple(path.resolve() for path in paths)
    stats = [path.stat() for path in resolved]
    identity = [
        f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}"
        for path, stat in zip(resolved, stats, strict=True)
    ]
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:12]
    num_bytes = sum(stat.st_size for stat in stats)
    if num_bytes == 0:
        raise ValueError(f"--text {' '.join(map(str, paths))}: there is no text in it")
    return Corpus(f"text-{digest}", resolved, num_bytes, _DOCUMENT_BYTES)


def _cut(lines: Iterator[str], document_bytes: int) -> Iterator[str]:
    document: list[str] = []
    size = 0
    for line in lines:
        document.append(line)
        size += len(line.encode())
        if size >= document_bytes and not line.strip():
            yield "".join(document)
            document, size = [], 0
    if document:
        yield "".join(document)
