"""Hashes files while they are written.

Reading a file again for its digest would make a save much longer. Large pieces are hashed on
another thread while they are written, because neither hashing nor writing needs Python's global
lock.
"""

import io
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.serialization import get_crc32_options, set_crc32_options

from megatron.checkpoint.digests import FileDigest, RunningDigest

_ASIDE: Final = 1 << 20
"""A piece of at least this many bytes is hashed on another thread."""


class HashedStream(io.RawIOBase):
    """Writes bytes to a file and hashes them; the stream cannot seek.

    Args:
        file: the file, which is closed with the stream.

    Attributes:
        failed: the first error of a write; ``None``: there was none.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self.failed: Exception | None = None
        self._digest = RunningDigest()
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="digest")

    def writable(self) -> bool:
        """Return true: the stream can be written to."""
        return True

    def write(self, data: Any) -> int:
        """Write and hash all bytes of ``data``; return their number."""
        try:
            return self._write(memoryview(data).cast("B"))
        except Exception as error:
            self.failed = self.failed or error
            raise

    def _write(self, view: memoryview) -> int:
        if len(view) < _ASIDE:
            self._digest.update(view)
            return self._file.write(view)
        hashed = self._aside.submit(self._digest.update, view)
        try:
            return self._file.write(view)
        finally:
            hashed.result()  # after the return the caller may change the memory

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._digest.size

    def flush(self) -> None:
        """Hand all written bytes to the operating system."""
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        """Return the descriptor of the file, for ``fsync``."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file."""
        self._aside.shutdown()
        self._file.close()
        super().close()

    @property
    def digest(self) -> FileDigest:
        """Size and digest of the bytes written so far."""
        return self._digest.digest


class HashedFiles(FileSystem):
    """PyTorch's file system for checkpoints, which also collects the digests of written files.

    Attributes:
        digests: digest of every file that was written and closed, by name.
        failed: the first error of a write; ``None``: there was none.
    """

    def __init__(self) -> None:
        self.digests: dict[str, FileDigest] = {}
        self.failed: Exception | None = None

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open a new file for writing; meanwhile ``torch.save`` computes no CRC on this thread.

        The CRC would take longer than the digest and detects less. If a piece cannot be written,
        ``torch.save`` says only that its archive cannot be ended. Its cause is raised instead.
        """
        assert mode == "wb", f"{path} is opened to be written, and once"
        before = get_crc32_options()  # a setting of this thread
        set_crc32_options(False)
        try:
            with HashedStream(Path(path).open("wb")) as stream:
                try:
                    yield stream
                except Exception as error:
                    raise stream.failed or error from None
        except Exception as error:
            self.failed = self.failed or error
            raise
        finally:
            set_crc32_options(before)
        self.digests[Path(path).name] = stream.digest

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that was written."""
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class HashedWriter(dcp.FileSystemWriter):
    """PyTorch's writer of checkpoints, which also collects the digests of its files.

    Args:
        path: folder to write to.
        files: number of files of tensors, each written by a thread.
        copy_ahead: bytes that are copied from a GPU while other bytes are written.
        file_each: give every tensor a file. PyTorch keeps the tensors of a file in memory until
            the file is complete, so this leaves only one tensor per thread in memory.
    """

    def __init__(self, path: Path, files: int, copy_ahead: int, *, file_each: bool = False) -> None:
        super().__init__(
            path,
            single_file_per_rank=not file_each,
            sync_files=True,
            thread_count=files,
            per_thread_copy_ahead=copy_ahead,
        )
        self.fs: HashedFiles = HashedFiles()

    @property
    def digests(self) -> dict[str, FileDigest]:
        """The digests of the files of this rank, by name."""
        return self.fs.digests

    @property
    def failed(self) -> Exception | None:
        """The first error of a write; ``None``: there was none."""
        return self.fs.failed
