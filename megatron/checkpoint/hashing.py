"""Files whose digest is known when they are written.

To read a file again for its digest would make a save much longer. Large pieces are hashed on
another thread while they are written: neither needs Python's lock.
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
"""Bytes from which on a piece is worth handing to another thread."""


class HashedStream(io.RawIOBase):
    """Writes to a file, and hashes what it writes. There is no way back in it.

    Args:
        file: is closed with the stream.

    Attributes:
        failed: why the first piece that could not be written was not.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self.failed: Exception | None = None
        self._digest = RunningDigest()
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="digest")

    def writable(self) -> bool:
        """Return that it can be written to."""
        return True

    def write(self, data: Any) -> int:
        """Write and hash bytes; return how many, which is all of them."""
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
            hashed.result()  # the memory is the caller's, who may change it

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._digest.size

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        """Return the number of the file, for ``fsync``."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file."""
        self._aside.shutdown()
        self._file.close()
        super().close()

    @property
    def digest(self) -> FileDigest:
        """Size and digest of what was written so far."""
        return self._digest.digest


class HashedFiles(FileSystem):
    """The file system as PyTorch's checkpoints use it, with the digests of the files written.

    Attributes:
        digests: of every file that was written and closed, by name.
        failed: why the first file that could not be written was not.
    """

    def __init__(self) -> None:
        self.digests: dict[str, FileDigest] = {}
        self.failed: Exception | None = None

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open a new file to write to; this thread's ``torch.save`` forms no CRC meanwhile.

        The CRC would take longer than the digest, which tells more. Of a piece that cannot be
        written ``torch.save`` says only that its archive cannot be ended: the reason is raised.
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
    """PyTorch's writer of checkpoints, which also tells the digests of its files.

    Args:
        path: folder to write to.
        files: of tensors, each written by a thread.
        copy_ahead: bytes that are copied from a GPU while others are written.
        file_each: give every tensor a file. PyTorch keeps what it writes to a file until the file
            is complete, so this is what keeps one tensor a thread in memory.
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
        """Why a file could not be written, if one could not."""
        return self.fs.failed
