"""Processes with pretended GPUs, for all tests of the folder."""

from collections.abc import Iterator

import pytest
from pretended_gpu.pool import GpuPool, gpu_pool

pytest.register_assert_rewrite("pretended_gpu.sound")


@pytest.fixture(scope="session")
def gpus() -> Iterator[GpuPool]:
    with gpu_pool() as pool:
        yield pool
