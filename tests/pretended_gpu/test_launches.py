"""What a GPU is asked to do: no more than the products of each part, and little beside them."""

from pathlib import Path

import pytest
from cuda_path import needs_pretended_gpus
from pretended_gpu.launches import HIDDEN, PARAMETERS, ROWS, TOKENS, Part, count
from pretended_gpu.one_gpu import tables, train
from pretended_gpu.pool import GpuPool

pytestmark = needs_pretended_gpus

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "2026-11-24-gpu-count" / "README.md"

PRODUCT = 2 * TOKENS * HIDDEN * ROWS


@pytest.fixture(scope="module")
def parts(gpus: GpuPool) -> dict[str, Part]:
    return gpus.map(count, "chosen", ranks=1)[0]


def test_products_are_those_of_the_algorithm(parts: dict[str, Part]) -> None:
    assert parts["S"].flops == 2 * PRODUCT
    assert parts["C1"].flops == 0
    assert parts["T"].flops == PRODUCT
    assert parts["B"].flops == parts["split B"].flops + parts["W"].flops


def test_the_output_layer_takes_little_longer_than_its_products(parts: dict[str, Part]) -> None:
    assert (parts["S"] + parts["T"]).multiple < 1.10
    assert (parts["S"] + parts["C1"] + parts["T"]).multiple < 1.10


def test_weight_gradients_are_added_in_their_products(parts: dict[str, Part]) -> None:
    assert parts["W"].multiple < 1.05
    assert [each.name for each in parts["W"].launches] == ["addmm"] * 4


def test_s_reads_and_writes_the_logits_as_often_as_it_must(parts: dict[str, Part]) -> None:
    """Once for their maxima; once, and written, for the exponentials."""
    logits = 2 * TOKENS * ROWS
    assert 3 * logits < parts["S"].other_bytes < 3.2 * logits


def test_c1_is_one_kernel_between_its_collectives(parts: dict[str, Part]) -> None:
    assert [each.name for each in parts["C1"].launches] == ["merge_input_gradient"]


def test_what_is_between_products_reads_and_writes_each_tensor_once(
    parts: dict[str, Part],
) -> None:
    """In units of [n, h]: two norms, a sum that is one with a norm, a last sum, and GELU."""
    unit = 2 * TOKENS * HIDDEN
    forward = 2 + 4 + 8 + 3
    assert parts["F"].other_bytes < (forward + 0.1) * unit
    backward = (4 + 4) + 12 + (1 + 1 + 3)  # norms, GELU, biases of the other linear layers
    backward += 3 + 3  # the gradients of queries, keys and values join in one
    assert parts["split B"].other_bytes < (backward + 1.5) * unit  # and sums of spans of rows


def test_a_step_reads_and_writes_each_tensor_once(parts: dict[str, Part]) -> None:
    """Gradient, master and moments in fp32, and the weight in bf16; before it, the norm."""
    assert parts["step"].other_bytes == 30 * PARAMETERS
    assert parts["norm"].other_bytes < 4.02 * PARAMETERS
    assert [each.name for each in parts["step"].launches] == ["adamw_"]


@pytest.mark.full
def test_one_gpu_could_have_65_percent_of_its_peak(gpus: GpuPool) -> None:
    [trained] = gpus.map(train, "chosen", ranks=1)
    assert trained.mfu > 0.65


@pytest.mark.full
def test_the_report_says_what_is_counted_now(gpus: GpuPool) -> None:
    said = PAGE.read_text().splitlines()
    counted = [line for line in tables(gpus) if line]
    assert [line for line in said if line in counted] == counted
