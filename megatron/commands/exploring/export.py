"""Write the explorer as a folder for any file host: the page, our code in an archive, and Pyodide.

The archive holds the modules that ``interface`` imports, found from their import statements, so it
is complete whatever they will import.
"""

import ast
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

ROOT: Final = Path(__file__).resolve().parents[3]
"""The folder that holds ``megatron``: a checkout, or the folder of an installation."""
PAGE: Final = Path(__file__).resolve().parent / "page"
SHARED: Final = ROOT / "megatron/commands/page"
"""Files that several pages have."""

ENTRY: Final = "megatron.commands.exploring.interface"
OWN: Final = "megatron"
"""The package that goes into the archive; what else is imported is of the standard library."""

PYODIDE: Final = "314.0.7"
"""Version of the npm package: CPython 3.14 for browsers, with the standard library."""
PYODIDE_FILES: Final = (
    *("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip"),
    *("pyodide-lock.json", "package.json"),
)

_EPOCH: Final = (1980, 1, 1, 0, 0, 0)  # so that the same code makes the same archive


def export(folder: Path, pyodide: Path | None = None) -> None:
    """Write the page into ``folder``, which is made if it is missing.

    Args:
        folder: where to.
        pyodide: folder of an unpacked npm package; ``None``: it is fetched by npm.

    Raises:
        ValueError: there is no Pyodide, or npm cannot fetch it; the message says what to do.
        OSError: a file cannot be written.
    """
    (folder / "pyodide").mkdir(parents=True, exist_ok=True)
    if pyodide is None:
        with TemporaryDirectory() as name:
            _take_pyodide(fetch_pyodide(Path(name)), folder / "pyodide")
    else:
        _take_pyodide(pyodide, folder / "pyodide")
    for file in page_files():
        shutil.copyfile(file, folder / file.name)
    (folder / "engine.json").write_text(json.dumps({"engine": "pyodide"}) + "\n")
    write_archive(folder / "python.zip")


def page_files() -> list[Path]:
    """Return the files of the page."""
    return sorted(path for folder in (PAGE, SHARED) for path in folder.iterdir() if path.is_file())


def write_archive(path: Path) -> None:
    """Write the archive of all our modules that the page's Python needs.

    It has entries of folders too, by which Python finds packages without ``__init__.py`` in it.
    """
    files = sorted(file.relative_to(ROOT) for file in modules())
    folders = sorted({folder for file in files for folder in file.parents} - {Path()})
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for folder in folders:
            archive.writestr(ZipInfo(f"{folder.as_posix()}/", _EPOCH), b"")
        for file in files:
            entry = ZipInfo(file.as_posix(), _EPOCH)
            entry.compress_type = ZIP_DEFLATED
            archive.writestr(entry, (ROOT / file).read_bytes())


def modules() -> set[Path]:
    """Return the files of our modules that ``ENTRY`` imports, itself included."""
    found: set[Path] = set()
    waiting = [ENTRY]
    while waiting:
        for file in _files_of(waiting.pop()):
            if file not in found:
                found.add(file)
                waiting += _imported(file)
    return found


def fetch_pyodide(folder: Path) -> Path:
    """Return the folder into which npm's package of Pyodide is unpacked, within ``folder``.

    Raises:
        ValueError: there is no npm, or it cannot fetch the package.
    """
    way_out = "install npm, or unpack the package elsewhere and give --pyodide FOLDER"
    command = ["npm", "pack", f"pyodide@{PYODIDE}", "--silent", "--pack-destination", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    except FileNotFoundError as error:
        raise ValueError(f"fetching Pyodide needs npm: {way_out}") from error
    except subprocess.CalledProcessError as error:
        raise ValueError(f"npm cannot fetch Pyodide ({error.stderr[-200:]}): {way_out}") from error
    with tarfile.open(next(folder.glob("pyodide-*.tgz"))) as packed:
        packed.extractall(folder, filter="data")
    return folder / "package"


def _take_pyodide(source: Path, target: Path) -> None:
    missing = [name for name in PYODIDE_FILES if not (source / name).is_file()]
    if missing:
        raise ValueError(
            f"{source} has no {', '.join(missing)}: give the folder 'package' of npm's "
            f"pyodide@{PYODIDE}"
        )
    for name in PYODIDE_FILES:
        shutil.copyfile(source / name, target / name)


def _files_of(name: str) -> Iterator[Path]:
    """Yield the file of a module, and those of the packages around it."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        path = ROOT.joinpath(*parts[:length])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                yield file


def _imported(file: Path) -> Iterator[str]:
    """Yield the names of our modules that a file imports, and those of what it takes from them."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if name.split(".")[0] == OWN)
