"""Counting leaves PyTorch as it was, and does not depend on packages of this machine."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planning.count.counting import MODEL, counted, run_of
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.planning.count import optimizer
from megatron.planning.count import run as counting_run
from megatron.planning.count.optimizer import StepCount
from megatron.simulator.costs.count import RankCount

ROOT = Path(__file__).parents[3]

WITHOUT_TRITON = "import sys; sys.modules['triton'] = None\n"

COUNT = """
import sys
import torch
from planning.count.counting import LLAMA, MODEL, counted, run_of
from megatron.layers.recompute import Recomputation
from megatron.parallel.settings import TensorRankSettings

torch.manual_seed(7)
before = torch.get_rng_state()
counts = [
    counted(run_of(MODEL, "vocab-2", 2, recomputation=Recomputation(group=2)), [4, 4]),
    counted(run_of(LLAMA, "vocab-1", 2, sizes={"tensor": TensorRankSettings(2)}), [4, 4], "zb-h1"),
    counted(run_of(MODEL), [8]),
]
assert torch.equal(torch.get_rng_state(), before)
assert "torch._dynamo" not in sys.modules
print(counts)
"""

THEN_COMPILE = """
import torch._dynamo
assert torch._dynamo.config.__name__ == "torch._dynamo.config"
assert torch._dynamo.disable(abs)(-3) == 3
"""


def counted_anew() -> tuple[list[RankCount], list[StepCount]]:
    for cached in (counting_run._counted_segment, counting_run._whole_rank, optimizer._count):
        cached.cache_clear()
    narrow = replace(MODEL, seq_length=16), "vocab-2", 2
    run = run_of(*narrow, eight_bits=EightBitSettings("hybrid", fp8_amax_history_len=4))
    return counted(run, [3, 5]), [optimizer.count_step(run, matrix=own) for own in (False, True)]


@pytest.mark.parametrize("mode", [FakeTensorMode, torch.no_grad, torch.inference_mode])
def test_a_count_within_a_mode_is_the_same(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    with mode():
        within = counted_anew()
    assert counted_anew() == within


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(ROOT / 'tests')!r}]\n{script}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_pytorch_stays_as_it_was_and_its_compiler_can_be_imported() -> None:
    done = run(COUNT + THEN_COMPILE)
    assert done.returncode == 0, done.stderr


WHILE_A_COUNT_RUNS = """
import gc, sys
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
import torch
from planning.count.counting import MODEL, plan_of, run_of
from megatron.planning.count import run as counting_run
from megatron.planning.count.apart import apart
from megatron.planning.count.subject import Subject

def compiler():
    import torch._dynamo
    return torch._dynamo.config.__name__, torch._dynamo.disable(abs)(-3)

def count():
    run = run_of(MODEL)
    counting_run._of_rank(Subject.of(run, 1), plan_of(run), [8], 0)
    assert "torch._dynamo" not in sys.modules
    assert "_dynamo" not in vars(torch)
    with ThreadPoolExecutor(1) as other:
        return other.submit(compiler).result()

def marks():
    functions = [own for own in gc.get_objects() if isinstance(own, FunctionType)]
    return [own for own in functions if "__dynamo_disable" in vars(own)]

before = marks()
apart(lambda: torch.empty(3, device="meta") + 1)
assert marks() == before
assert apart(count) == ("torch._dynamo.config", 3)
"""


def test_another_thread_gets_the_true_compiler_while_a_count_runs() -> None:
    done = run(WHILE_A_COUNT_RUNS)
    assert done.returncode == 0, done.stderr


def test_a_machine_without_triton_counts_the_same() -> None:
    pytest.importorskip("triton")
    with_triton, without = run(COUNT), run(WITHOUT_TRITON + COUNT)
    assert without.returncode == 0, without.stderr
    assert without.stdout == with_triton.stdout
    assert len(without.stdout) > 10_000
