"""Extensions are compiled once, found where they were installed, and never loaded when stale."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.native.build import build
from megatron.native.extensions import EXTENSIONS, Extension, load_extension

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = """#include <pybind11/pybind11.h>
PYBIND11_MODULE(MODULE_NAME, module) { module.def("answer", [] { return 42; }); }
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Extension, Path]:
    """A small extension, and the one file that compiling it makes."""
    folder = tmp_path_factory.mktemp("extension")
    source = folder / "small.cpp"
    source.write_text(SOURCE)
    extension = Extension("nowhere", source, (("-no-such-option",), ("-O0",)))
    assert load_extension(extension, folder / "cache").answer() == 42  # by the second options
    (library,) = (folder / "cache").glob("small_*.so")
    return extension, library


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")


@pytest.mark.usefixtures("no_compiler")
def test_what_is_compiled_is_found_again(compiled: tuple[Extension, Path]) -> None:
    extension, library = compiled
    assert load_extension(extension, library.parent).answer() == 42


def installed(compiled: tuple[Extension, Path], folder: Path) -> Extension:
    """The extension with its module beside the source, as ``setup.py`` leaves it."""
    extension, library = compiled
    shutil.copy(library, folder)
    return replace(extension, source=Path(shutil.copy(extension.source, folder)))


@pytest.mark.usefixtures("no_compiler")
def test_what_is_installed_needs_no_compiler(
    compiled: tuple[Extension, Path], tmp_path: Path
) -> None:
    extension = installed(compiled, tmp_path)
    assert load_extension(extension, tmp_path / "cache").answer() == 42


@pytest.mark.usefixtures("no_compiler")
def test_what_was_installed_for_another_source_is_not_loaded(
    compiled: tuple[Extension, Path], tmp_path: Path
) -> None:
    extension = installed(compiled, tmp_path)
    extension.source.write_text(SOURCE.replace("42", "43"))
    with pytest.raises(FileNotFoundError, match="nonexistent"):
        load_extension(extension, tmp_path / "cache")


def test_only_what_is_made_for_one_processor_bears_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = [(extension, options) for extension in EXTENSIONS for options in extension.options]
    here = [extension.name(options) for extension, options in every]
    monkeypatch.setattr("megatron.native.extensions.processor", lambda: "another")
    there = [extension.name(options) for extension, options in every]
    changed = [a != b for a, b in zip(here, there, strict=True)]
    assert changed == ["-march=native" in options for _, options in every]
    assert any(changed)


def test_of_racing_processes_one_compiles(compiled: tuple[Extension, Path], tmp_path: Path) -> None:
    """The compiler is a stand-in that takes its time, keeps count and copies a real result."""
    extension, library = compiled
    calls = tmp_path / "calls"
    compiler = tmp_path / "slow"
    compiler.write_text(
        f'#!/bin/sh\necho call >> {calls}\nsleep 0.5\nfor last; do :; done\ncp {library} "$last"\n'
    )
    compiler.chmod(0o755)
    program = (
        "import sys; from pathlib import Path\n"
        "from megatron.native.extensions import Extension, load_extension\n"
        "small = Extension('nowhere', Path(sys.argv[1]), (('-O0',),))\n"
        "module = load_extension(small, Path(sys.argv[2]))\n"
        "print(module.answer(), module.__name__)\n"
    )
    command = [sys.executable, "-c", program, str(extension.source), str(tmp_path / "cache")]
    environment = {**os.environ, "CXX": str(compiler), "PYTHONPATH": str(REPOSITORY)}
    racing = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = {process.communicate(timeout=60)[0].strip() for process in racing}
    assert answers == {f"42 {library.name.split('.')[0]}"}
    assert calls.read_text().count("call") == 1


def test_a_checkout_is_compiled_beside_its_sources(
    compiled: tuple[Extension, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    extension, _ = compiled
    own = replace(extension, source=Path(shutil.copy(extension.source, tmp_path)))
    assert build([own], tell_every=0.01)
    assert "compiling small.cpp, once per machine: 0 s so far" in capfd.readouterr().err
    (library,) = tmp_path.glob("small_*.so")
    before = library.stat().st_mtime_ns
    assert build([own])
    assert library.stat().st_mtime_ns == before
    assert capfd.readouterr().err == ""
    assert load_extension(own, tmp_path / "no cache").answer() == 42


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_build_says_what_takes_its_place(
    compiled: tuple[Extension, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    extension, _ = compiled
    own = replace(extension, source=Path(shutil.copy(extension.source, tmp_path)))
    assert not build([own])
    assert "small.cpp is not compiled, slower code takes its place: " in capfd.readouterr().err
