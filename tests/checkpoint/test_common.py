"""The values of a checkpoint that are not tensors: sound ones are read, all others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import folder
from megatron.checkpoint.common import COMMON, read_checked_common
from megatron.checkpoint.folder import DamagedError

SOUND: dict[str, Any] = {
    "iteration": 3,
    "consumed_samples": 12,
    "optimizer_steps": 2,
    "has_optimizer": True,
    "model": {},
}
SCALE = {"scale": 0.5, "good_steps": 1, "tolerance": 2, "samples_without_step": 4}


def read(root: Path, **values: Any) -> dict[str, Any]:
    where = folder.folder_of(root, 3)
    where.mkdir()
    (where / COMMON).write_text(json.dumps(SOUND | values))
    return read_checked_common(where)


@pytest.mark.parametrize("values", [None, {"samples_without_step": 4}, SCALE])
def test_a_loss_scale_is_read(values: Any, tmp_path: Path) -> None:
    """Earlier versions counted no samples without fp16."""
    assert read(tmp_path, loss_scale=values)["loss_scale"] == values


@pytest.mark.parametrize(
    "values",
    ["", [], 4, {}, {"samples_without_step": -1}, SCALE | {"scale": "1"}, SCALE | {"scale": None}],
)
def test_a_loss_scale_that_no_run_saves_is_refused(values: Any, tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="loss_scale is not the numbers of a loss scale by name"):
        read(tmp_path, loss_scale=values)
