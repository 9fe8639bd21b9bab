"""Compile the Triton programs for a GPU that need not be there, and tell what they take.

    python -m tools.triton_programs 90

Of each program in each of its forms it prints the registers of a thread, the bytes of shared memory
of a block, and the bytes that a thread spills because it has too few registers. 80 is an A100, 90
an H100 or H200. ``TRITON_INTERPRET`` must not be set.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron.flags.command import read
from megatron.flags.declare import flag, positional
from megatron.kernels.cuda import attention_parts as attention_operators
from megatron.kernels.cuda import block_products as block_operators
from megatron.kernels.cuda import eight_bits as eight_bit_operators
from megatron.kernels.cuda import grouped as grouped_operators
from megatron.kernels.cuda import grouped_eight_bits as narrow_operators
from megatron.kernels.cuda import microscaling as mx_operators
from megatron.kernels.cuda import slots as slot_operators
from megatron.kernels.cuda.operators import BLOCK, LAUNCH, TILE
from megatron.kernels.cuda.programs import (
    activations,
    attention,
    block_products,
    eight_bits,
    gradients,
    grouped,
    grouped_eight_bits,
    microscaling,
    norms,
    rotation,
    slots,
    softmax,
    update,
    weighted,
)
from megatron.kernels.cuda.programs.rows import add_rows
from megatron.kernels.cuda.row_operators import (
    ACTIVATION_SPAN,
    SUMS,
    norm_backward_tile,
    norm_tile,
    rotation_tile,
)
from megatron.kernels.cuda.rows import RUN
from megatron.kernels.cuda.sizes import SPAN
from megatron.kernels.cuda.update_operators import BLOCK as UPDATE_BLOCK
from megatron.kernels.cuda.update_operators import SQUARES_BLOCK

_TORCH = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_LEAST_OF_8_BITS = 89
"""Compute capability, times 10, of the first GPUs whose tensor cores multiply 8 bits."""
TYPES = tuple(_TORCH)
"""Dtypes of activations."""

_WIDE = (
    "statistics_p4n",
    "merged_4n",
    "gradient_vh",
    "total_vh",
    "raw_nh",
    "spread_nh",
    "weight_n",
    "shift_n",
    "maximum_n",
    "sum_n",
)
_STATISTICS = ("maxima_kn", "target_logits_n", "sums_kn", "logit_sums_kn")
RANKS = 16
"""Vocabulary shards whose statistics C1 merges; the kernels have a form for every power of two."""

_FLOATS = ("cap", "pull", "spread", "z_loss", "epsilon")
_ALL_WIDE = (
    "statistics_2r",
    "partial_jkh",
    "partial_kf",
    "cos_bsp",
    "sin_bsp",
    "log_bas",
    "part_log_bas",
    "sums_k",
    "weights_c",
    "weights_grad_c",
)
_TABLES = {"table_tc": "*i64", "tensor_k": "*i32"}
_EIGHT_BITS = {
    "straight_rk": "*u8",
    "turned_kr": "*u8",
    "seen": "*i32",
    "scale": "*fp32",
    "straight_sk": "*u8",
    "turned": "*u8",
    "seen_g": "*i32",
    "scale_g": "*fp32",
    "left_sk": "*fp8e5",
    "right_gnk": "*fp8e4nv",
    "grad_op": "*fp8e5",
    "x_ip": "*fp8e4nv",
    "left_worth_g": "*fp32",
    "right_worth_g": "*fp32",
    "grad_worth_g": "*fp32",
    "x_worth_g": "*fp32",
    "turned_kp": "*u8",
    "straight_gnk": "*u8",
    "turned_gkn": "*u8",
    "straight_worth_cs": "*fp32",
    "turned_worth_bk": "*fp32",
    "worth_gbc": "*fp32",
    "turned_worth_gcb": "*fp32",
    "left_worth_cs": "*fp32",
    "right_worth_gbc": "*fp32",
    "grad_worth_bo": "*fp32",
    "x_worth_bi": "*fp32",
    "straight_tiles": "*u8",
    "turned_ks": "*u8",
    "turned_tiles": "*u8",
}
_LONGS = ("targets_n", "sorted_n", "order_n", "choice_r", "slot_r", "slot_nk", "chosen_r")
_INTEGERS = ("ends_g", "counts_gb", "sums_gb")
EXPERTS = 128
"""Experts of a layer; the kernels have a form for every power of two."""

_EVEN = (
    "n",
    "h",
    "f",
    "i",
    "o",
    "s",
    "d",
    "p",
    "k",
    "stride",
    "span",
    "x_batch",
    "x_token",
    "x_head",
    *(f"{tensor}_{dim}" for tensor in ("out", "part") for dim in ("batch", "head", "token")),
    *(f"{tensor}_{dim}" for tensor in ("log", "part_log") for dim in ("batch", "head")),
)
"""Integer arguments (sizes and strides) that are multiples of 16 if a model's sizes are."""

_ODD = ("first_row", "angle_batch", "angle_token", *_EVEN)
_ROW_SIZES = (128, 8192)
"""Sizes of the rows of norms: channels of a head, and the longest row that the programs take."""


@dataclass(frozen=True)
class Form:
    """A program and the constants that it is compiled with."""

    program: Any
    constants: Mapping[str, object]
    activation: str
    warps: int = LAUNCH["num_warps"]

    @property
    def name(self) -> str:
        """Name of the program."""
        name: str = self.program.__name__
        return name


@dataclass(frozen=True)
class Resources:
    """The resources that a form uses.

    Attributes:
        program: name of the program.
        form: dtype of activations and the options that are on.
        registers: registers of a thread.
        shared_bytes: bytes of shared memory of a block.
        spilled_bytes: bytes that a thread spills.
        short_offsets: matrices that are addressed with 32-bit offsets, which are too short for 2^31
            elements.
    """

    program: str
    form: str
    registers: int
    shared_bytes: int
    spilled_bytes: int
    short_offsets: tuple[str, ...]


def forms(kinds: tuple[str, ...] = TYPES, *, multiplies_8_bits: bool = True) -> Iterator[Form]:
    """Yield every form in which the kernels may launch a program.

    Args:
        kinds: dtypes of activations.
        multiplies_8_bits: whether the GPU's tensor cores multiply 8 bits.
    """
    logits, rows = {"SPAN": SPAN, **TILE}, {"BLOCK": BLOCK}
    for kind in kinds:
        for capped in (False, True):
            yield Form(softmax.column_maxima, {"CAPPED": capped, **logits}, kind)
            for sums in (False, True):
                options = {"CAPPED": capped, "LOGIT_SUMS": sums}
                yield Form(softmax.column_statistics, {**options, **logits}, kind)
            yield Form(gradients.subtract_targets, {"CAPPED": capped, **rows}, kind)
            for sums, spread in ((False, False), (True, False), (True, True), (False, True)):
                if not sums and spread and not capped:
                    continue
                options = {"SUMS": sums, "LOGIT_SUMS": sums and spread, "SLOPES": spread and capped}
                yield Form(softmax.exponentials, {"CAPPED": capped, **options, **logits}, kind)
            for spread, z_loss in product((False, True), repeat=2):
                loss = {"CAPPED": capped, "SPREAD": spread, "Z_LOSS": z_loss}
                for merges in (False, True):
                    ranks = {"MERGES": merges, "RANKS": RANKS if merges else 1, **rows}
                    yield Form(gradients.input_gradient, {**loss, **ranks}, kind)
        yield Form(gradients.merge, {"RANKS": RANKS}, kind)
        for on in (False, True):
            yield Form(gradients.scale_rows, {"Z_LOSS": on, **rows}, kind)
            yield Form(activations.gated, {"GELU": on, **rows}, kind)
            yield Form(activations.gated_backward, {"GELU": on, **rows}, kind)
        yield Form(add_rows, {"RUN": RUN, **rows}, kind)
        yield from _row_forms(kind)
        yield from _rotation_forms(kind)
        yield Form(attention.join_parts, attention_operators.joining_tile(128), kind)
        yield from _update_forms(kind)
        yield from _eight_bit_forms(kind)
        yield from _expert_forms(kind)
        yield from _expert_forms_in_eight_bits(kind, products=multiplies_8_bits)
        yield from _block_forms(kind, products=multiplies_8_bits)
        yield from _mx_forms(kind)


def _expert_forms(kind: str) -> Iterator[Form]:
    """Yield the forms of slots and of products of groups."""
    tile = grouped_operators.tile_of(getattr(torch, _TORCH[kind]))
    warps, rows = grouped_operators.LAUNCH["num_warps"], {"BLOCK": BLOCK}
    for on in (False, True):
        shared = {"TURNED": on, "GROUPS": EXPERTS, "SHARED": grouped_operators.SHARED, **tile}
        yield Form(grouped.grouped_product, shared, kind, warps)
        yield Form(grouped.grouped_weight_product, {"ADDS": on, **tile}, kind, warps)
        for gelu in (False, True):
            function = {"GATED": on, "GELU": gelu, **rows}
            yield Form(weighted.weighted, function, kind)
            yield Form(weighted.weighted_backward, function, kind)
    sort, sort_warps = {"BLOCK": slot_operators.CHOICES}, slot_operators.SORT_LAUNCH["num_warps"]
    yield Form(slots.count_choices, {**sort, "GROUPS": slot_operators.COUNTED_GROUPS}, kind)
    yield Form(slots.place_choices, {**sort, "GROUPS": EXPERTS}, kind, sort_warps)
    yield Form(slots.spread, rows, kind)
    yield Form(slots.join, rows, kind)


def _eight_bit_forms(kind: str) -> Iterator[Form]:
    """Yield forms that find the largest number, that quantise, and that do both."""
    for rounds, seen, e5m2 in ((False, True, False), (True, False, False), (True, True, True)):
        options = {"STRAIGHT": rounds, "TURNED": rounds, "SEEN": seen, "E5M2": e5m2}
        own = {**options, "MOST": 57344.0 if e5m2 else 448.0, **eight_bit_operators.TILE}
        yield Form(eight_bits.quantise, own, kind, eight_bit_operators.LAUNCH["num_warps"])


def _expert_forms_in_eight_bits(kind: str, *, products: bool) -> Iterator[Form]:
    """Yield the forms that round groups, and with ``products`` the products of groups."""
    tile, warps = narrow_operators.PRODUCT_TILE, narrow_operators.LAUNCH["num_warps"]
    groups = {"GROUPS": EXPERTS}
    for apart, seen, rounds in ((True, True, True), (False, False, True), (False, True, False)):
        own = {"STRAIGHT": rounds, "TURNED": rounds, "APART": apart, "SEEN": seen, "E5M2": False}
        options = {**own, "MOST": 448.0, **groups, **narrow_operators.TILE}
        yield Form(grouped_eight_bits.quantise_groups, options, kind, warps)
    for on in (False, True) if products else ():
        options = {"QUICK": on, "SHARED": grouped_operators.SHARED, **groups, **tile}
        yield Form(grouped_eight_bits.grouped_eight_bit_product, options, kind, warps)
        options = {"ADDS": on, **groups, **tile}
        yield Form(grouped_eight_bits.grouped_eight_bit_weight_product, options, kind, warps)


def _block_forms(kind: str, *, products: bool) -> Iterator[Form]:
    """Yield the forms with scales of blocks, for groups of rows and for one group."""
    rounding = {"MOST": 448.0, "E5M2": False, **block_operators.TILE}
    warps = block_operators.ROUNDING_LAUNCH["num_warps"]
    yield Form(block_products.quantise_squares, rounding, kind, warps)
    of_groups = [{"WHOLE": True, "GROUPS": 1}, {"WHOLE": False, "GROUPS": EXPERTS}]
    for whole, (straight, turned) in product(
        of_groups, ((True, True), (True, False), (False, True))
    ):
        options = {"STRAIGHT": straight, "TURNED": turned, **whole, **rounding}
        yield Form(block_products.quantise_blocks, options, kind, warps)
    tile, warps = block_operators.PRODUCT_TILE, block_operators.LAUNCH["num_warps"]
    for on, whole in product((False, True), of_groups) if products else ():
        own = {"BIAS": on, "SHARED": grouped_operators.SHARED, **whole, **tile}
        yield Form(block_products.grouped_block_product, own, kind, warps)
        options = {"ADDS": on, **whole, **tile}
        yield Form(block_products.grouped_block_weight_product, options, kind, warps)


def _mx_forms(kind: str) -> Iterator[Form]:
    """Yield the forms with a scale for every 32 numbers."""
    warps = mx_operators.LAUNCH["num_warps"]
    for straight, turned in ((True, True), (True, False), (False, True)):
        options = {"STRAIGHT": straight, "TURNED": turned, "MOST": 448.0, "E5M2": False}
        yield Form(microscaling.quantise_mx, options, kind, warps)


def _row_forms(kind: str) -> Iterator[Form]:
    """Yield the forms of norms and activations."""
    number_bytes = 4 if kind == "fp32" else 2
    for size, on in product(_ROW_SIZES, (False, True)):
        tile, back = norm_tile(size, number_bytes), norm_backward_tile(size, number_bytes)
        warps, back_warps = tile.pop("num_warps"), back.pop("num_warps")
        for other in (False, True):
            forward = {"CENTRED": on, "ADDS": other, **tile}
            yield Form(norms.norm, forward, kind, warps)
            backward = {"CENTRED": on, "STREAM": other, **back}
            yield Form(norms.norm_backward, backward, kind, back_warps)
    sums = dict(SUMS)
    warps = sums.pop("num_warps")
    yield Form(norms.column_sums, sums, kind, warps)
    for gelu, other in product((False, True), repeat=2):
        if other:
            yield Form(activations.activation, {"GELU": gelu, "BLOCK": BLOCK}, kind)
        constants = {"GELU": gelu, "BIAS": other, "SPAN": ACTIVATION_SPAN, **TILE}
        yield Form(activations.activation_backward, constants, kind)


def _rotation_forms(kind: str) -> Iterator[Form]:
    """Yield the forms of RoPE for heads of 128 channels, of which all or half are rotated."""
    for back, interleaved in product((False, True), repeat=2):
        options = {"BACK": back, "INTERLEAVED": interleaved}
        yield Form(rotation.rotate, {**options, **rotation_tile(128, 32 if back else 64)}, kind)


def _update_forms(kind: str) -> Iterator[Form]:
    """Yield the forms of an optimizer step: fp32 moments, all in bf16, gradients kept scaled."""
    wide, narrow = tl.float32, tl.bfloat16
    types = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
    rounds = {"WEIGHT": types[kind], "ROUNDS": kind != "fp32"}
    for held, moment, scales, aligned in (
        (wide, wide, False, True),
        (wide, wide, True, True),
        (wide, wide, False, False),
        (narrow, narrow, False, True),
    ):
        own = {"GRADIENT": held, "MOMENT": moment, "SQUARE": moment, "BLOCK": UPDATE_BLOCK}
        options = {"SCALES": scales, "ALIGNED": aligned}
        yield Form(update.adamw, {**own, **rounds, **options}, kind)
    own = {"GRADIENT": wide, "ALIGNED": True, "BLOCK": SQUARES_BLOCK}
    yield Form(update.sums_of_squares, own, kind)


def compiled(form: Form, capability: int) -> Resources:
    """Compile a form for sizes that are multiples of 16, as a model's are.

    Args:
        form: what to compile.
        capability: compute capability of the GPU, times 10.
    """
    names = [parameter.name for parameter in form.program.params]
    signature = {name: _type_of(name, form) for name in names}
    even = [
        (index,)
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in _EVEN
    ]
    source = ASTSource(
        form.program,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in form.constants.items()},
        attrs={place: [["tt.divisibility", 16]] for place in even},
    )
    result = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={**LAUNCH, "num_warps": form.warps},
    )
    options = [name.lower() for name, value in form.constants.items() if value is True]
    registers, spilled = _resources(result.asm["cubin"])
    return Resources(
        form.name,
        " ".join([form.activation, *options]),
        registers,
        int(result.metadata.shared),
        spilled,
        tuple(_short_offsets(result.asm["ttir"], form)),
    )


def _type_of(name: str, form: Form) -> str:
    """Return the type of a program's argument by Triton's name."""
    if name in form.constants:
        return "constexpr"
    if name == "left_sk" and (form.constants.get("QUICK") or form.constants.get("BIAS")):
        return "*fp8e4nv"  # a forward has no gradients
    if name in _EIGHT_BITS:
        return _EIGHT_BITS[name]
    if name in _TABLES:
        return _TABLES[name]
    if name in _FLOATS or form.program is update.adamw:
        return "fp32"
    if name in _LONGS:
        return "*i64"
    if name in _INTEGERS:
        return "*i32"
    if name in _WIDE or name in _STATISTICS or name in _ALL_WIDE:
        return "*fp32"
    return f"*{form.activation}" if "_" in name and name not in _ODD else "i32"


def _short_offsets(ttir: str, form: Form) -> list[str]:
    """Return the matrices that a program in Triton's IR addresses with 32-bit offsets.

    A single row that all tokens share does not count as a matrix.
    """
    [arguments] = re.findall(r"tt\.func public @\w+\((.*)", ttir)
    given = [each.name for each in form.program.params if each.name not in form.constants]
    names = dict(zip(re.findall(r"(%\w+): ", arguments), given, strict=True))
    found = set()
    for result, act, source, kinds in re.findall(
        r"(%\w+) = tt\.(splat|addptr) (%\w+)(?:, %\w+)? : (.*?)(?: loc|\n)", ttir
    ):
        name = names.get(source, "")
        if act == "splat":
            names[result] = name
        elif re.search(r"\bi32>?$|xi32>$", kinds) and re.search(r"_[vnrk][nhfkr]$", name):
            found.add(name)
    if not form.constants.get("CAPPED"):
        found.discard("spread_nh")
    return sorted(found)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and spilled bytes of a thread, as NVIDIA's tool reports them."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools / "cuobjdump"), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", printed)}
    return found["REG"], found["STACK"] + found["LOCAL"]


@dataclass(frozen=True)
class ProgramFlags:
    """Programs."""

    capability: int = positional("Of the GPU, as 90.", "CAPABILITY")
    types: tuple[str, ...] = flag(tuple(TYPES), "Of the elements.", choices=tuple(TYPES))
    json: bool = flag(False, "Print JSON.")


def main() -> None:
    """Print a table, or JSON."""
    flags = read(None, __doc__, ProgramFlags)[ProgramFlags]
    found = [
        compiled(form, flags.capability)
        for form in forms(flags.types, multiplies_8_bits=flags.capability >= _LEAST_OF_8_BITS)
    ]
    if flags.json:
        print(json.dumps([asdict(each) for each in found]))
        return
    print("| program | form | registers | shared bytes | spilled bytes |\n|---|---|--:|--:|--:|")
    for each in found:
        *values, _ = asdict(each).values()
        print("| " + " | ".join(map(str, values)) + " |")


if __name__ == "__main__":
    main()
