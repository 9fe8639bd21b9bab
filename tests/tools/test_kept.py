"""tools/predictions/kept.py: a prediction is made once by the same code."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tools.predictions import kept as module
from tools.predictions.kept import kept


def test_a_prediction_is_made_once_and_anew_by_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, made = tmp_path / "rows", list[str]()

    def predict() -> list[float]:
        made.append("x")
        return [len(made), 0.5]

    assert kept(folder, "8 | 1, 2", list[float], predict) == [1, 0.5]
    assert kept(folder, "8 | 1, 2", list[float], predict) == [1, 0.5]
    assert kept(folder, "8 | 1, 3", list[float], predict) == [2, 0.5]
    monkeypatch.setattr(module, "_digest_of_code", lambda: "other")
    assert kept(folder, "8 | 1, 2", list[float], predict) == [3, 0.5]
    assert sorted(file.suffix for file in folder.iterdir()) == [".json", ".json"]


def test_nothing_is_kept_without_a_folder() -> None:
    made = iter((1, 2))
    assert [kept(None, "same", int, lambda: next(made)) for _ in range(2)] == [1, 2]


class Inner(NamedTuple):
    shares: dict[str, float | None]


class Outer(NamedTuple):
    name: str
    inner: Inner | None
    several: list[Inner]


def test_what_was_kept_has_its_types_again(tmp_path: Path) -> None:
    one = Inner({"a": 0.5, "b": None})
    made = {"x": Outer("x", one, [one, one]), "y": Outer("y", None, []), "z": None}
    for predict in (lambda: made, lambda: pytest.fail("it was kept")):
        found = kept(tmp_path, "all", dict[str, Outer | None], predict)
        assert found == made
        assert isinstance(found["x"].several[1], Inner)
