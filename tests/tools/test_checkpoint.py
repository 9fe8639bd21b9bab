"""The command shows, checks, compares and rewrites checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import folder, storage
from megatron.checkpoint.boxed import BoxedTensor
from megatron.parallel.box import whole
from tools.checkpoint import ALONE, main


def save(root: Path, iteration: int, **changed: torch.Tensor) -> None:
    """Save three tensors of which some are given."""
    tensors = {
        "weight.a": torch.arange(12.0).view(4, 3),
        "exp_avg.a": torch.ones(4, 3),
        "weight.b": torch.full((5,), 2.0),
    } | {name.replace("_of_", "."): value for name, value in changed.items()}
    boxed = {
        name: BoxedTensor(value, tuple(value.shape), whole(value.shape))
        for name, value in tensors.items()
    }
    common: dict[str, Any] = {
        "iteration": iteration,
        "has_optimizer": True,
        "model": {"hidden_size": 3},
        "plan": "F0 B0",
    }
    storage.write(root, iteration, boxed, common, ALONE)


def call(*arguments: object) -> int:
    """Run the command; return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    code = ended.value.code
    if isinstance(code, str):
        print(code)
        return 1
    return int(code or 0)


def test_it_lists_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    assert call("ls", tmp_path) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], row[1], row[3:]) for row in rows] == [
        ("10", "3", []),
        ("20", "3", ["<-", "last"]),
    ]
    assert call("show", tmp_path, "--step", 10) == 0
    shown = capsys.readouterr().out
    assert "hidden_size" in shown
    assert any(line.split()[:3] == ["weight.a", "[4,", "3]"] for line in shown.splitlines())


def test_it_finds_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 10)
    assert call("verify", tmp_path) == 0
    path = folder.folder_of(tmp_path, 10) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert call("verify", tmp_path) == 1
    assert "__0_0.distcp is not what was written" in capsys.readouterr().out
    assert call("show", tmp_path) == 1
    assert "damaged" in capsys.readouterr().out
    assert call("show", tmp_path, "--step", 30) == 1
    assert "[10]" in capsys.readouterr().out
    assert call("ls", tmp_path / "none") == 1


def test_it_tells_two_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "one", 10)
    save(tmp_path / "same", 10)
    assert call("diff", tmp_path / "one", tmp_path / "same") == 0
    assert "the same, to the last bit" in capsys.readouterr().out
    changed = torch.full((5,), 2.0)
    changed[3] = 2.25
    save(
        tmp_path / "other",
        20,
        weight_of_b=changed,
        weight_of_c=torch.ones(2),
        exp_avg_of_a=torch.ones(4, 4),
    )
    assert call("diff", tmp_path / "one", tmp_path / "other") == 1
    assert capsys.readouterr().out.splitlines() == [
        "iteration: 10 and 20",
        f"weight.c: only in {tmp_path / 'other' / 'iter_0000020'}",
        "exp_avg.a: [4, 3] and [4, 4]",
        "weight.b: differs by up to 0.25",
    ]


def test_it_writes_the_same_tensors_to_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "one", 10)
    assert call("reshard", tmp_path / "one", tmp_path / "two", "--files", 2) == 0
    assert call("diff", tmp_path / "one", tmp_path / "two") == 0
    names = folder.read_manifest(folder.folder_of(tmp_path / "two", 10))
    assert sum(name.endswith(".distcp") for name in names) == 2
    assert call("reshard", tmp_path / "one", tmp_path / "weights", "--no-optim") == 0
    capsys.readouterr()
    assert call("diff", tmp_path / "one", tmp_path / "weights") == 1
    assert "exp_avg.a: only in" in capsys.readouterr().out
