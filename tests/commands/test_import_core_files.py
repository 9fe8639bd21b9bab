"""``convert-checkpoint import-core`` reads the flags of files as if they were typed."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.commands import convert_checkpoint


def test_flags_of_a_file_come_to_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = list[Sequence[str]]()
    monkeypatch.setattr(
        convert_checkpoint, "bring_core_in", lambda _, given: taken.append([*given])
    )
    file = tmp_path / "model.flags"
    file.write_text("--num-layers 3  # of a file\n--vocab-size 99\n")
    core, own = str(tmp_path / "core"), str(tmp_path / "own")
    convert_checkpoint.main(["import-core", core, own, f"@{file}", "--num-layers", "2"])
    assert taken == [["--vocab-size", "99", "--num-layers", "2"]]
    told = capsys.readouterr().err.splitlines()
    assert told[1] == (
        f"note: --num-layers 3 ({file}, line 1) changes nothing: --num-layers 2 stands after it"
    )


def test_a_mistake_in_a_file_ends_the_import(tmp_path: Path) -> None:
    file = tmp_path / "model.flags"
    file.write_text("layers 3\n")
    with pytest.raises(SystemExit, match=r"line 1: 'layers' is no flag"):
        convert_checkpoint.main(["import-core", "core", "own", f"@{file}"])
