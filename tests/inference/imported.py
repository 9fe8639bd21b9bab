"""Checkpoints of small random models of ``transformers``, opened by the ranks of a test."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron.inference.model import InferenceModel
from megatron.parallel.grid import Grid
from megatron.parallel.groups import make_groups
from tools.convert import main as convert

PATIENCE = timedelta(seconds=60)


def imported(theirs: Any, folder: Path) -> Path:
    """Import a model of ``transformers``; return the folder of its one checkpoint."""
    theirs.save_pretrained(folder / "theirs")
    convert(["import", str(folder / "theirs"), str(folder / "ours")])
    return folder / "ours" / "iter_0000000"


def opened(where: Path, ranks: int = 1, longest: int = 60) -> InferenceModel:
    """This rank's part of a model in fp32."""
    groups = make_groups(Grid(pipeline_size=ranks), torch.device("cpu"), PATIENCE, (0, 0))
    return InferenceModel(where, groups, torch.float32, longest)
