"""Products of fp32 on GPUs have the precision of the flag, whatever the environment says."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planning.test_dry_run import config

from megatron.planning.run_plan import make_run_plan
from megatron.run.precision import PrecisionSettings
from megatron.training import prepare


@pytest.fixture(autouse=True)
def as_in_nvidias_images() -> Iterator[None]:
    """TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 does this when PyTorch is loaded."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("device", "asked", "found"),
    [("cuda", "highest", "highest"), ("cuda", "medium", "medium"), ("cpu", "highest", "high")],
)
def test_the_flag_decides_on_gpus(
    device: str, asked: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config()
    groups = SimpleNamespace(device=torch.device(device))
    plan = make_run_plan(run)
    seen = []
    monkeypatch.setattr(prepare, "connect", lambda *_: groups)
    monkeypatch.setattr(prepare, "record_memory", lambda *_: None)
    monkeypatch.setattr(
        prepare, "build_train_state", lambda *_: seen.append(torch.get_float32_matmul_precision())
    )
    train = replace(run.train, precision=PrecisionSettings(fp32_matmul_precision=asked))
    run = replace(run, train=train)
    prepared = prepare.Prepared(run, run, run.parallel.grid, plan, None, {})  # type: ignore[arg-type]
    prepare.set_up(prepared, None, 0)  # type: ignore[arg-type]  # nobody meets here
    assert seen == [found]
