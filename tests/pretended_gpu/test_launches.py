"""What a GPU is asked to do: no more than the products of each part, and little beside them."""

import pytest
from cuda_path import needs_pretended_gpus
from pretended_gpu.launches import HIDDEN, ROWS, TOKENS, Part, count
from pretended_gpu.pool import GpuPool

pytestmark = needs_pretended_gpus

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
