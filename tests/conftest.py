"""What every test may use: the ranks of a distributed test, and settings for slow machines."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from harness.rank_pool import RankPool

# Before torch reads it: the tests' tensors are small, and ranks share the cores as it is.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before Triton reads it: without a GPU its programs run in its interpreter, on tensors of the CPU.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A deadline would make a property fail because the machine is busy.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="session")
def ranks() -> "Iterator[RankPool]":
    """Four processes for the whole test run; ``ranks.run(fn, world_size, **kwargs)`` uses them.

    ``fn(rank, world_size, **kwargs)`` is a module-level function of the test module; it runs with
    ``torch.distributed`` initialised (gloo), and its results come back as a list by rank.
    """
    from harness.rank_pool import RankPool  # torch: not for those who only test schedules

    with RankPool(size=4) as pool:
        yield pool
