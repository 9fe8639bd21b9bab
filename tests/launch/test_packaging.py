"""The package as users get it: what the wheel holds, its commands, and ``megatron.core`` beside it.

Megatron-LM's ``megatron.core`` is played by a folder of that name. Python runs without its own
site-packages, so that only what a test installs is found.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from harness.marks import full

from megatron.commands.exploring.export import PYODIDE_FILES
from megatron.native.extensions import EXTENSIONS

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE", "pretrain_gpt.py")
PAGES: Final = (".css", ".html", ".js", ".svg")
SHIPPED: Final = (".py", ".cpp", ".txt", ".typed", ".flags", *PAGES)
WRITES_NOTHING: Final = 'for word; do [ "$last" != -o ] || : >"$word"; last=$word; done'
"""A compiler whose output is empty."""

OURS, THEIRS = "megatron.schedules.plan", "megatron.core"


def pip(*words: str, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    environment = os.environ | variables
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def compiler(folder: Path, script: str) -> dict[str, str]:
    """Return the variables that make ``script`` the compiler."""
    file = folder / "c++"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return {"CC": str(file), "CXX": str(file)}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with what an older checkout may have left behind."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron", folder / "megatron", ignore=ignored)
    (folder / "megatron/left_over/__pycache__").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel whose extensions are empty files: each installation compiles them in earnest."""
    folder, tools = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("tools")
    nothing = compiler(tools, WRITES_NOTHING)
    options = ("--no-deps", "--no-build-isolation", "-w", str(folder))
    pip("wheel", *options, str(checkout), **nothing)
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages with the wheel installed in it."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages that points to the sources; nothing in it is compiled."""
    folder, tools = tmp_path_factory.mktemp("editable"), tmp_path_factory.mktemp("tools")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--target", str(folder))
    pip("install", *options, "-e", str(checkout), **compiler(tools, "exit 1"))
    return folder


def add_core(folder: Path) -> None:
    """Put a ``megatron.core`` into ``folder``, as Megatron-LM's distribution would."""
    (folder / "megatron/core").mkdir(parents=True, exist_ok=True)
    (folder / "megatron/core/__init__.py").touch()


def files_of_package() -> set[str]:
    """Return the files of megatron/ that a user needs."""
    return {
        str(file.relative_to(ROOT))
        for file in (ROOT / "megatron").rglob("*")
        if file.suffix in SHIPPED
    }


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in no checkout, with these variables instead of those that tests have."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd="/", env=kept | variables
    )


@pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)], ids=" then ".join)
@pytest.mark.parametrize("way", ["source", full("installed"), "editable"])
def test_megatron_core_can_be_imported_beside_ours(
    way: str, order: tuple[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Installed, both lie in one site-packages; a source tree has a folder of its own."""
    folders = [tmp_path, ROOT]
    if way != "source":
        folders = [request.getfixturevalue(way)]
    add_core(folders[0])
    for path in folders, folders[::-1]:
        lines = ["import site", *(f"site.addsitedir({str(folder)!r})" for folder in path)]
        done = run("-I", "-S", "-c", "\n".join([*lines, *(f"import {name}" for name in order)]))
        assert done.returncode == 0, done.stderr


def test_the_wheel_holds_what_the_package_holds_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {name for name in names if ".dist-info/" not in name}
    assert {name for name in shipped if name.endswith(SHIPPED)} == {
        *files_of_package(),
        "pretrain_gpt.py",
    }
    assert {Path(name).suffix for name in shipped} <= {*SHIPPED, ".so"}
    built = {Path(name).name.split(".")[0] for name in shipped if name.endswith(".so")}
    assert built == {e.name(options) for e in EXTENSIONS for options in e.options}


def test_every_part_says_that_it_is_typed() -> None:
    """A namespace package cannot say so for its parts (PEP 561)."""
    parts = {file.parent for file in (ROOT / "megatron").glob("*/__init__.py")}
    assert {file.parent for file in (ROOT / "megatron").rglob("py.typed")} == parts
    assert not (ROOT / "megatron/__init__.py").exists()


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("simulate-schedule", ("-p", "2", "-m", "2", "--text"), "1f1b, vocabulary none, p = 2"),
        ("draw-schedule", ("--help",), "--timeline"),
        ("explore-schedules", ("--help",), "--candidates"),
    ],
)
def test_an_installed_command_needs_the_standard_library_only(
    command: str, arguments: tuple[str, ...], expected: str, installed: Path
) -> None:
    script = str(installed / "bin" / command)
    done = run("-S", script, *arguments, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_installed_recipes_are_found_from_any_folder(installed: Path) -> None:
    command = ("-S", "-m", "megatron.run.flag_files", "@recipes/llama3-8b-128k.8xH100")
    done = run(*command, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert "--num-layers 32" in done.stdout
    assert "--vocab-parallel vocab-2" in done.stdout


def test_an_installed_draw_schedule_is_told_where_to_draw(installed: Path) -> None:
    script = str(installed / "bin/draw-schedule")
    done = run("-S", script, PYTHONPATH=str(installed))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: nothing to draw: give --into FOLDER or --timeline FILE")


def test_an_installed_explorer_writes_its_page(installed: Path, tmp_path: Path) -> None:
    """It is whole: the page's Python answers from the archive alone."""
    for name in PYODIDE_FILES:
        (tmp_path / name).write_text(name)
    words = ("--export", str(tmp_path / "site"), "--pyodide", str(tmp_path))
    done = run("-S", str(installed / "bin/explore-schedules"), *words, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    asks = [
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site/python.zip')!r})",
        "from megatron.commands.exploring.interface import answer",
        "from megatron.commands.exploring.simulated import Simulations",
        """print(answer('{"action": "facts"}', Simulations()))""",
    ]
    done = run("-I", "-S", "-c", "\n".join(asks))
    assert done.returncode == 0, done.stderr
    assert "zb-v" in done.stdout
    assert (tmp_path / "site/index.html").is_file()


def test_an_installed_search_finds_a_line(installed: Path) -> None:
    """From a recipe's model and GPUs to the line that the installed command of training reads."""
    words = ("@llama3-8b", "--gpus", "8xH100", "--global-batch-tokens", "128k", "--seq-length")
    named = (
        "--pipeline-schedule",
        "1f1b",
        "--tensor-model-parallel-size",
        "1",
        "--micro-batch-size",
    )
    script = str(installed / "bin/plan-pretraining")
    done = run(script, *words, "8192", *named, "1", PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    assert "torchrun --standalone --nproc-per-node 8 -m pretrain_gpt " in done.stdout


def test_installed_commands_make_data_convert_a_model_and_generate(
    installed: Path, tmp_path: Path
) -> None:
    """From text to token files, from a model to a checkpoint to its words, and back again."""
    pytest.importorskip("transformers")
    from safetensors.torch import load_file

    from tools.conversions_table import random_model

    def command(name: str, *words: str) -> str:
        done = run(str(installed / "bin" / name), *words, PYTHONPATH=str(installed))
        assert done.returncode == 0, done.stderr
        return done.stdout

    text, theirs, ours = tmp_path / "in.jsonl", tmp_path / "theirs", tmp_path / "ours"
    text.write_text('{"text": "5 17 33"}\n' * 3)
    tokenizer = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")
    corpus = tmp_path / "corpus"
    words = ("--input", str(text), "--output-prefix", str(corpus), "--workers", "2", *tokenizer)
    assert command("preprocess-data", *words) == f"DATA_PATH={corpus}_text_document\n"
    assert np.fromfile(f"{corpus}_text_document.bin", np.uint16).tolist() == [5, 17, 33] * 3

    random_model("gpt2").save_pretrained(theirs)
    command("convert-checkpoint", "import", str(theirs), str(ours))
    asked = ("--ids", "--prompt", "5 17 33", "--max-new-tokens", "4", "--end", "0")
    assert command("generate-text", str(ours), *asked).startswith("5 17 33 ")
    command("convert-checkpoint", "export", str(ours), str(tmp_path / "again"))
    first, again = (load_file(tmp_path / f / "model.safetensors") for f in ("theirs", "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


def test_an_installed_page_of_runs_is_whole(installed: Path, tmp_path: Path) -> None:
    records = tmp_path / "run.jsonl"
    records.write_text('{"event": "start", "run": "a", "iteration": 0}\n')
    words = (str(records), "-o", str(tmp_path / "run.html"))
    done = run(str(installed / "bin/watch-run"), *words, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert "class ChartView" in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_the_installed_training_lists_its_flags(installed: Path) -> None:
    done = run(str(installed / "bin/pretrain-gpt"), "--help", PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert "--pipeline-model-parallel-size" in done.stdout
