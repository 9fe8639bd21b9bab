"""The Triton programs compile for GPUs that are not there, fit into their registers, and reach far.

A compiler of its own process, because here Triton interprets (see ``tests/conftest.py``).
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")
def test_triton_is_here() -> None:
    """A run in which nobody tried the programs is not green."""
    if find_spec("triton") is None:
        pytest.fail(
            "Triton is not installed, so that no program of kernels/cuda is tested; install it: "
            f"{sys.executable} -m pip install -c constraints.txt triton",
            pytrace=False,
        )


def without_interpreter(*command: str) -> str:
    """What Python prints where Triton compiles."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


WHICH_COUNT = """
from megatron.kernels.cuda.programs.eight_bits import quantise
from megatron.kernels.cuda.programs import grouped_eight_bits as grouped
programs = (
    quantise,
    grouped.quantise_groups,
    grouped.grouped_eight_bit_product,
    grouped.grouped_eight_bit_weight_product,
)
for program in programs:
    print(*(
        own.name for own in program.params if not own.is_constexpr and not own.do_not_specialize
    ))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_no_form_depends_on_where_the_scales_of_a_layer_lie() -> None:
    """With delayed scaling they lie elsewhere from the second iteration on."""
    assert without_interpreter("-c", WHICH_COUNT).splitlines() == [
        "straight_rk turned_kr x_rk r k stride",
        "straight_sk turned x_sk ends_g g k p",
        "out_sn left_sk right_gnk ends_g g n k",
        "out_goi grad_op x_ip ends_g g o i p",
    ]


WHICH_COUNT_OF_BLOCKS = """
from megatron.kernels.cuda.programs.block_products import grouped_block_product, quantise_blocks
for program in (quantise_blocks, grouped_block_product):
    print(*(own.name for own in program.params if own.do_not_specialize))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_no_form_depends_on_the_number_of_slots() -> None:
    """A microbatch whose slots are a multiple of 16 would wait for a compiler."""
    assert without_interpreter("-c", WHICH_COUNT_OF_BLOCKS).splitlines() == ["s", "s"]


OF_BLACKWELL = """
import json
from dataclasses import asdict
from tools.triton_programs import compiled, forms
found = [form for form in forms(("bf16", "fp32")) if form.name == "quantise_mx"]
print(json.dumps([asdict(compiled(form, 100)) for form in found]))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_scales_of_32_numbers_compile_for_a_b200() -> None:
    """Of the GPUs for which this project compiles, it alone multiplies with them."""
    found = json.loads(without_interpreter("-c", OF_BLACKWELL))
    assert len(found) == 6
    assert [each for each in found if each["spilled_bytes"] or each["short_offsets"]] == []
    assert max(each["registers"] for each in found) <= 128


OF_EXPERTS = """
import json
from dataclasses import asdict
from tools.triton_programs import compiled, forms
names = {
    "count_choices", "place_choices", "spread", "join", "weighted", "weighted_backward",
    "grouped_product", "grouped_weight_product",
}
last = {form.name: form for form in forms(("bf16",)) if form.name in names}
print(json.dumps([asdict(compiled(form, 80)) for form in last.values()]))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_every_program_of_experts_compiles_for_an_a100() -> None:
    """One form of each in bf16; the other forms are in the cases of an A100 below."""
    found = json.loads(without_interpreter("-c", OF_EXPERTS))
    assert len(found) == 8
    assert [each for each in found if each["spilled_bytes"] or each["short_offsets"]] == []
    assert max(each["shared_bytes"] for each in found) <= 160 * 1024


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("capability", "types"),
    [
        pytest.param(90, ["bf16"], id="H100 in bf16"),
        pytest.param(80, ["bf16"], id="A100 in bf16", marks=pytest.mark.full),
        pytest.param(90, ["fp16", "fp32"], id="H100", marks=pytest.mark.full),
        pytest.param(80, ["fp16", "fp32"], id="A100", marks=pytest.mark.full),
    ],
)
def test_every_program_in_every_form_compiles_without_spilling(
    capability: int, types: list[str]
) -> None:
    options = [str(capability), "--json", "--types", *types]
    found = json.loads(without_interpreter("-m", "tools.triton_programs", *options))
    products = {"grouped_product", "grouped_weight_product"}
    if capability >= 89:
        products |= {"grouped_eight_bit_product", "grouped_eight_bit_weight_product"}
        products |= {"grouped_block_product", "grouped_block_weight_product"}
    assert {each["program"] for each in found} == {
        "column_maxima",
        "column_statistics",
        "exponentials",
        "input_gradient",
        "merge",
        "scale_rows",
        "subtract_targets",
        "add_rows",
        "gated",
        "gated_backward",
        "norm",
        "norm_backward",
        "column_sums",
        "activation",
        "activation_backward",
        "rotate",
        "join_parts",
        "adamw",
        "sums_of_squares",
        "quantise",
        "quantise_groups",
        "quantise_blocks",
        "quantise_squares",
        "quantise_mx",
        "count_choices",
        "place_choices",
        "spread",
        "join",
        "weighted",
        "weighted_backward",
        *products,
    }
    assert [each for each in found if each["spilled_bytes"]] == []
    assert [each for each in found if each["short_offsets"]] == []
    # With at most 128 registers each, 512 threads and more are there at a time to hide latencies.
    # Products keep their sums in registers, and copies that run ahead hide latencies.
    others = [each for each in found if each["program"] not in products]
    assert max(each["registers"] for each in others) <= 128
    assert max(each["shared_bytes"] for each in found) <= 160 * 1024, "an A100 has no more"
