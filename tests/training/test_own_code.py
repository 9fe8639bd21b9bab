"""Ranks whose sources or packages differ are refused, by the name of the rank and of the file."""

import ast
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local

import pytest
import torch
import torch.distributed as dist

from megatron.training import agreement, own_code
from megatron.training.agreement import check_agreement, disagreement
from megatron.training.own_code import code_digests, digests_of_files, unlike_files
from megatron.training.rendezvous import Rendezvous, UserError

PACKAGE = Path(own_code.__file__).parents[1]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Another copy of two rooms, beside a room of another package."""
    for room in ("layers", "kernels"):
        shutil.copytree(PACKAGE / room, tmp_path / "megatron" / room)
    (tmp_path / "megatron" / "core").mkdir()
    (tmp_path / "megatron" / "core" / "other.py").write_text("1")
    return tmp_path / "megatron"


def test_a_norm_times_another_number_is_another_file(copy: Path) -> None:
    before = digests_of_files(copy)
    here = digests_of_files()
    assert {name: here[name] for name in before} == before
    assert {"megatron/layers/norm.py", "megatron/kernels/cpu/cpu_kernels.cpp"} <= before.keys()
    assert not any(name.startswith("megatron/core") for name in before)
    assert not any("cache" in name for name in before)
    norm = copy / "layers" / "norm.py"
    norm.write_text(norm.read_text().replace("return ", "return 1.01 * ", 1))
    after = digests_of_files(copy)
    assert {name for name in after if after[name] != before[name]} == {"megatron/layers/norm.py"}
    (copy / "layers" / "more.py").write_text("")
    assert unlike_files([before, before, digests_of_files(copy)]) == (
        "rank 2 has another megatron/layers/more.py and 1 other files"
    )


def test_only_files_of_the_package_count(copy: Path) -> None:
    """What editors and users leave in a room is no other code, and is no fault."""
    before = digests_of_files(copy)
    layers = copy / "layers"
    (layers / ".#norm.py").symlink_to("user@machine.4711:1700000000")
    (layers / "gone.py").symlink_to(layers / "nowhere.py")
    (layers / ".norm.py").write_text("1")
    (layers / "notes.txt").write_text("1")
    for folder in ("x.txt", "x.py", ".ipynb_checkpoints"):
        (layers / folder).mkdir()
    (layers / ".ipynb_checkpoints" / "norm-checkpoint.py").write_text("1")
    assert digests_of_files(copy) == before
    (layers / "x.py" / "more.py").write_text("1")
    assert digests_of_files(copy).keys() - before.keys() == {"megatron/layers/x.py/more.py"}


def test_a_file_that_vanishes_does_not_count(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, own_read = digests_of_files(copy), Path.read_bytes

    def read(path: Path) -> bytes:
        if path.name == "norm.py":
            raise FileNotFoundError(path)
        return own_read(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    assert before.keys() - digests_of_files(copy).keys() == {"megatron/layers/norm.py"}


def test_every_file_that_a_wheel_brings_counts() -> None:
    """The data of packages, by the one statement in setup.py; rooms are marked by py.typed.

    Pages are for browsers, and the flags of recipes are compared as those of a command line.
    """
    nodes = list(ast.walk(ast.parse((PACKAGE.parent / "setup.py").read_text())))
    named = [node for node in nodes if isinstance(node, ast.keyword)]
    [data] = [node.value for node in named if node.arg == "package_data"]
    patterns = {"*.py", *ast.literal_eval(data)[""]} - {"py.typed", "page/*", "*.flags"}
    rooms = [path.parent for path in PACKAGE.glob("*/py.typed")]
    files = {
        str(path.relative_to(PACKAGE.parent))
        for room in rooms
        for pattern in patterns
        for path in room.rglob(pattern)
        if path.is_file() and not path.name.startswith(".")
    }
    assert {name for name in digests_of_files() if name.startswith("megatron/")} == files
    assert "megatron/run/foreign/table.txt" in files


def test_versions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    own = code_digests()
    assert own["version of torch"] in (torch.__version__, torch.__version__.split("+")[0])
    assert own["version of flash-attn"] == "none" or own["version of flash-attn"][0].isdigit()
    other = {**own, "version of torch": "1.0", "version of python": "3.99.0"}
    assert disagreement([own, own]) is None
    message = disagreement([own, other])
    assert message is not None
    assert message.startswith("version of python (3.99.0), version of torch (1.0) of rank 1 differ")
    assert "install the same versions" in message


@pytest.mark.parametrize("odd", [None, 0, 1, 2])
def test_every_rank_names_the_file_that_differs(
    odd: int | None, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digest of everything tells that sources differ; then the ranks send their lists."""
    store, of_thread = dist.HashStore(), local()
    same = digests_of_files(copy)
    other = {**same, "megatron/layers/norm.py": "another"}
    monkeypatch.setattr(
        agreement, "digests_of_files", lambda: other if of_thread.rank == odd else same
    )

    def verdict(rank: int) -> str:
        of_thread.rank = rank
        own = {"sources": "x" if rank == odd else "y", "plan": "x" if rank == odd else "y"}
        try:
            check_agreement(Rendezvous(store, rank, 3), own)
        except UserError as error:
            return str(error)
        return "agreed"

    with ThreadPoolExecutor(3) as threads:
        [said] = set(threads.map(verdict, range(3)))
    if odd is None:
        assert said == "agreed"
        return
    named = "rank 1" if odd == 0 else f"rank {odd}"
    assert said.startswith(f"{named} has another megatron/layers/norm.py"), said
    assert "install the same version" in said
