"""What is called of Transformer Engine, and what is said where it is not as it was published.

``PUBLISHED`` are the arguments by version, as its wheels have them (2.10.0 to 2.20.2); those of
norms, which are compiled, are as the sources of 2.10.0, 2.12.0, 2.14.0 and 2.20.2 bind them.
"""

import inspect
from typing import Any, Final

import pytest
import torch
from kernels import engine_stand_in
from kernels.engine_stand_in import TYPES, DType, installed

from megatron.kernels.cuda.transformer_engine import (
    NORMS,
    USED,
    columns_of,
    load_transformer_engine,
    rounded,
)
from megatron.native.packages import arguments_of

_GEMM: Final = (
    "A B out_dtype quantization_params gelu gelu_in alpha beta accumulate layout out bias "
    "use_split_accumulator grad ub ub_type extra_output bulk_overlap"
)
_MXFP8: Final = "fp8_dtype rowwise columnwise"
_BLOCK: Final = f"{_MXFP8} amax_epsilon force_pow_2_scales block_scaling_dim"
_NORM: Final = "eps ln_out quantizer otype sm_margin zero_centered_gamma"
PUBLISHED: Final = {
    "general_gemm": {"2.10": _GEMM},
    "Float8Quantizer": {"2.10": "scale amax fp8_dtype rowwise columnwise"},
    "Float8CurrentScalingQuantizer": {
        "2.10": "fp8_dtype device rowwise columnwise use_existing_amax with_amax_reduction "
        "amax_reduction_group force_pow_2_scales amax_epsilon scale amax"
    },
    "Float8BlockQuantizer": {"2.10": f"{_BLOCK} all_gather_usage", "2.12": _BLOCK},
    "MXFP8Quantizer": {"2.10": _MXFP8, "2.19": f"{_MXFP8} with_2d_quantization"},
    "layernorm_fwd": {"2.10": f"input weight bias {_NORM}"},
    "rmsnorm_fwd": {"2.10": f"input weight {_NORM}"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_only_published_arguments_are_given(name: str) -> None:
    for version, arguments in PUBLISHED[name].items():
        assert set((USED | NORMS)[name].split()) <= set(arguments.split()), version
    stand_in = inspect.signature(getattr(engine_stand_in, name)).parameters
    assert " ".join(stand_in) in PUBLISHED[name].values(), "the tests would call something else"


@pytest.mark.parametrize(
    ("version", "fault"),
    [
        ("2.10.0", None),
        ("2.20.2+c0ffee", None),
        ("2.9.0", "version 2.9.0 is installed, and 2.10 to 2.x"),
        ("3.0.0", "version 3.0.0"),
        ("unknown", "version unknown"),
    ],
)
def test_versions(version: str, fault: str | None) -> None:
    with installed(version=version):
        if fault is None:
            assert load_transformer_engine().version == version
            return
        with pytest.raises(ValueError, match=fault):
            load_transformer_engine()


def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"does not load here .*transformer_engine"):
        load_transformer_engine()


def _without_out(A: Any, B: Any, layout: str = "TN") -> None:
    """A product that cannot add."""


class Compiled:
    """A function as pybind11 makes it: its signature stands in its documentation only."""

    def __init__(self, documentation: str) -> None:
        self.__doc__ = documentation

    @property
    def __signature__(self) -> inspect.Signature:
        """As ``inspect`` says of a compiled function."""
        raise ValueError("no signature found for builtin")

    def __call__(self, **_: Any) -> None:
        """Do nothing."""


RMSNORM: Final = (
    "rmsnorm_fwd(input: handle, weight: handle, eps: float, ln_out: object, quantizer: handle, "
    "otype: transformer_engine_torch.DType, sm_margin: int, zero_centered_gamma: bool)"
    " -> list[object]\n\nRMSNorm of scale: one\n"
)


def test_arguments_of_a_compiled_function_are_read_from_its_documentation() -> None:
    hook = torch._C._distributed_c10d._register_comm_hook
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(hook)
    assert set(arguments_of(hook)) == {"reducer", "state", "comm_hook"}
    assert set(arguments_of(Compiled(RMSNORM))) == set(NORMS["rmsnorm_fwd"].split())
    with installed(rmsnorm_fwd=Compiled(RMSNORM)):
        load_transformer_engine()


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"MXFP8Quantizer": None}, "its MXFP8Quantizer is missing"),
        ({"general_gemm": _without_out}, "its general_gemm has no out_dtype, out, bias"),
    ],
    ids=["a class", "an argument"],
)
def test_what_it_lacks_is_named(changed: dict[str, Any], fault: str) -> None:
    with installed(**changed), pytest.raises(ValueError, match=fault):
        load_transformer_engine()


@pytest.mark.parametrize(
    ("changed", "rounds"),
    [
        ({}, True),
        ({"layernorm_fwd": None}, False),
        ({"rmsnorm_fwd": Compiled(RMSNORM.replace("sm_margin", "margin"))}, False),
        ({"rmsnorm_fwd": Compiled("")}, False),
    ],
    ids=["all", "none", "another argument", "no documentation"],
)
def test_without_its_norms_it_multiplies_all_the_same(
    changed: dict[str, Any], rounds: bool
) -> None:
    with installed(**changed):
        assert load_transformer_engine().rounds_norms("delayed", 128, 128) == rounds


@pytest.mark.parametrize("hopper", [True, False], ids=["Hopper", "Blackwell"])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_columns_come_back_from_their_tensors(
    recipe: str, dtype: torch.dtype, hopper: bool
) -> None:
    """As they were, and without the rows; the factor stays whole."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    with installed(hopper=hopper):
        engine = load_transformer_engine()
        assert engine.types[dtype] in DType
        quantiser = engine.quantiser(recipe, dtype, torch.device("cpu"), is_weight=False)
        whole = rounded(quantiser, x, columns=True)
        kept, again = columns_of(whole)
        found = again(kept)
        assert torch.equal(found.columns(), whole.columns())
        torch.testing.assert_close(whole.rows(), x, rtol=0.2, atol=0.1)
        if hopper or recipe != "tensorwise":
            assert sum(t.numel() for t in kept if t.numel() == x.numel()) == x.numel()
            with pytest.raises(AssertionError, match="no row"):
                found.rows()
