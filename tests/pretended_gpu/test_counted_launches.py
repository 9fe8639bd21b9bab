"""The kernels of a count launch on ``meta`` what a pretended GPU launches, in the same order."""

import pytest
from cuda_path import needs_pretended_gpus
from pretended_gpu.counted import CASES, OUTPUTS, Launches, launches
from pretended_gpu.pool import GpuPool

pytestmark = needs_pretended_gpus

Found = dict[str, dict[str, Launches]]


@pytest.fixture(scope="module")
def both(gpus: GpuPool) -> tuple[Found, Found]:
    [pretended] = gpus.map(launches, "pretended GPU", ranks=1)
    [counted] = gpus.map(launches, "meta", ranks=1)
    return pretended, counted


@pytest.mark.parametrize("case", [*CASES, *OUTPUTS, "input layer"])
def test_launches_are_those_of_a_pretended_gpu(case: str, both: tuple[Found, Found]) -> None:
    pretended, counted = (found[case] for found in both)
    assert counted.keys() == pretended.keys()
    for part, of_gpu in pretended.items():
        assert counted[part] == of_gpu, part
    assert pretended.get("split W") != []
