"""The page about GPUs names every kernel that there is, and none that is not."""

import re
from importlib import import_module
from pathlib import Path

import torch

import_module("megatron.kernels.cuda.kernels")  # defines all of them

PAGE = Path(__file__).parents[2] / "docs" / "gpus.md"


def test_kernels_are_those_that_there_are() -> None:
    own = {
        name.removeprefix("megatron_kernels::").rstrip("_")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("megatron_kernels::")
        and not name.startswith("megatron_kernels::_")  # of a count, in place of PyTorch's own
    }
    page = PAGE.read_text()
    cells = re.findall(r"^\|[^|]*\|([^|]*)\|", page, re.MULTILINE)
    in_tables = {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}
    assert in_tables <= own <= set(re.findall(r"`([a-z_]+)`", page))
