"""The command shows, checks, compares and rewrites checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import folder, storage
from megatron.checkpoint.boxed import BoxedTensor
from megatron.parallel.box import whole
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan_file import load_any_plan
from tools.checkpoint import ALONE, PLAN_LINES, PLAN_WIDTH, main


def save(root: Path, iteration: int, plan: str = "F0 B0", **changed: torch.Tensor) -> None:
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
        "plan": plan,
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


def test_it_shows_the_beginning_of_a_plan_and_all_of_it_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan("1f1b", "vocab-2", 16, 40).to_text()
    save(tmp_path, 10, plan=plan)
    assert call("show", tmp_path) == 0
    shown = capsys.readouterr().out.split("plan\n")[1].split("tensors\n")[0].splitlines()
    assert len(shown) == PLAN_LINES + 1
    assert all(len(line) < PLAN_WIDTH + 10 for line in shown)
    for line, row in zip(shown[:-1], plan.splitlines(), strict=False):
        assert row.startswith(line.strip().removesuffix(" ..."))
    assert f"the beginning of {len(plan.splitlines())} lines; show --plan" in shown[-1]
    assert call("show", tmp_path, "--plan") == 0
    assert capsys.readouterr().out == plan
    (tmp_path / "my.plan").write_text(plan)
    assert load_any_plan(tmp_path / "my.plan").ranks == 16


def test_it_groups_what_differs_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight weights and eight moments differ, some of them more than others."""
    one, other = (
        dict[str, Any](
            {
                f"{kind}_of_layers_of_{i}_of_w": torch.full((3,), step * (i + 1.0))
                for kind in ("weight", "exp_avg")
                for i in range(8)
            }
        )
        for step in (0.0, 0.5)
    )
    save(tmp_path / "one", 10, **one)
    save(tmp_path / "other", 10, **other)
    assert call("diff", tmp_path / "one", tmp_path / "other") == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{kind}: 8 tensors with other values (--all names them), first of all "
        f"{kind}.layers.7.w: differs by up to 4"
        for kind in ("exp_avg", "weight")
    ]
    assert call("diff", tmp_path / "one", tmp_path / "other", "--all") == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{kind}.layers.{i}.w: differs by up to {0.5 * (i + 1):.3g}"
        for kind in ("exp_avg", "weight")
        for i in range(8)
    ]


def damage(where: Path) -> None:
    path = where / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "words", [("show",), ("reshard", "TARGET"), ("diff", "OTHER")], ids=lambda words: words[0]
)
def test_it_never_takes_an_older_checkpoint_by_itself(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for iteration in (10, 20):
        save(tmp_path / "root", iteration)
    save(tmp_path / "other", 10)
    damage(folder.folder_of(tmp_path / "root", 20))
    target = tmp_path / "target"
    given = {"TARGET": target, "OTHER": tmp_path / "other"}
    command, *others = (given.get(word, word) for word in words)
    assert call(command, tmp_path / "root", *others) == 1
    said = capsys.readouterr().out
    assert "iter_0000020 is damaged: " in said
    assert "--step takes another one: [10]" in said
    assert not target.exists()
    assert call(command, tmp_path / "root", *others, "--step", 10) == 0


def test_it_overwrites_no_checkpoint_and_writes_no_empty_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 10)
    before = {path.name: path.read_bytes() for path in folder.folder_of(tmp_path, 10).iterdir()}
    assert call("reshard", tmp_path, tmp_path, "--no-optim") == 1
    assert "has a checkpoint of iteration 10 already: name another" in capsys.readouterr().out
    after = {path.name: path.read_bytes() for path in folder.folder_of(tmp_path, 10).iterdir()}
    assert after == before
    for files, said in ((4, "--files 4: "), (2, "--files 2: ")):
        kept = ["--no-optim"] if files == 2 else []
        expected = 1 if files == 4 else 0
        assert call("reshard", tmp_path, tmp_path / "new", "--files", files, *kept) == expected
        assert (said in capsys.readouterr().out) is bool(expected)


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
