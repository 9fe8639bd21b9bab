"""tools/predictions/kept.py: a prediction is made once by the same code."""

from pathlib import Path

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

    assert kept(folder, "8 | 1, 2", predict) == [1, 0.5]
    assert kept(folder, "8 | 1, 2", predict) == [1, 0.5]
    assert kept(folder, "8 | 1, 3", predict) == [2, 0.5]
    monkeypatch.setattr(module, "_digest_of_code", lambda: "other")
    assert kept(folder, "8 | 1, 2", predict) == [3, 0.5]
    assert sorted(file.suffix for file in folder.iterdir()) == [".json", ".json"]


def test_nothing_is_kept_without_a_folder() -> None:
    made = iter((1, 2))
    assert [kept(None, "same", lambda: next(made)) for _ in range(2)] == [1, 2]
