"""FLOPs are those of PyTorch's own counter, and a rank imports only what it needs."""

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from megatron.commands.environment import in_environment
from megatron.kernels.declared import LaunchWork
from megatron.kernels.pytorch_launches import work_of

ROOT = Path(__file__).resolve().parents[3]


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


Q, K, V = meta(2, 3, 5, 8), meta(2, 3, 7, 8), meta(2, 3, 7, 4)
OUT = meta(2, 3, 5, 4)
FORWARD, BACKWARD = (Q, K, V), (OUT, Q, K, V)
CASES: dict[str, tuple[torch.Tensor, ...]] = {
    "mm": (meta(3, 5), meta(5, 7)),
    "addmm": (meta(3, 7), meta(3, 5), meta(5, 7)),
    "bmm": (meta(2, 3, 5), meta(2, 5, 7)),
    "baddbmm": (meta(2, 3, 7), meta(2, 3, 5), meta(2, 5, 7)),
    "_scaled_mm": (meta(3, 5), meta(5, 7)),
    **{
        f"_scaled_dot_product_{kind}_attention{way}": factors
        for kind in ("efficient", "flash", "cudnn")
        for way, factors in (("", FORWARD), ("_backward", BACKWARD))
    },
}
ELSEWHERE = {
    # counted by rows of tokens, or not in a GPT, or no operation that is dispatched
    "_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward",
    "_efficient_attention_backward", "convolution", "_convolution", "cudnn_convolution",
    "convolution_overrideable", "_slow_conv2d_forward", "convolution_backward", "flex_attention",
    "flex_attention_backward",
    # known to PyTorch from the first import of torch.nn.attention.varlen on
    "_varlen_attn", "_varlen_attn_out", "_varlen_attn_backward",
}  # fmt: skip


def declared(name: str, *factors: torch.Tensor) -> LaunchWork | None:
    """The declared work of one of PyTorch's operators for its first arguments."""
    operator = getattr(torch.ops.aten, name)
    function = getattr(operator, operator.overloads()[0])
    return work_of(function, factors, {})


@pytest.mark.parametrize("name", CASES)
def test_flops_are_those_of_pytorch(name: str) -> None:
    """A backward counts four of the five products that PyTorch counts.

    Attention to all keys is a part of causal attention, so it counts twice what it executes.
    """
    factors = CASES[name]
    counter: Any = flop_registry[getattr(torch.ops.aten, name)]
    more = (None, None) if name == "_scaled_mm" else ()
    expected = counter(*factors, *more, out_val=None)
    work = declared(name, *factors)
    assert work is not None
    assert work.executed == expected
    counts = expected * 2 if "attention" in name else expected
    assert work.flops == (counts * 4 // 5 if name.endswith("_backward") else counts)


def test_every_formula_of_pytorch_is_known() -> None:
    names = {str(key).rpartition(".")[2] for key in flop_registry}
    assert names - ELSEWHERE == CASES.keys()


def test_heads_that_share_keys_count_each() -> None:
    shared = declared("_scaled_dot_product_flash_attention", Q, K[:, :1], V[:, :1])
    assert shared == declared("_scaled_dot_product_flash_attention", *FORWARD)
    assert declared("add", Q, Q) == LaunchWork()


NAMED = ("torch._dynamo", "triton", "tokenizers", "rich", "transformers", "sympy")
TRAINS = """
import os, sys
sys.argv = ["pretrain_gpt.py", *"{flags}".split()]
end = os._exit
def tell(code):
    found = [name for name in {names} if name in sys.modules]
    print("imported:", *found, "exit:", code, flush=True)
    end(code)
os._exit = tell
import pretrain_gpt
print("imported by the entry:", *(name for name in {names} if name in sys.modules), "end")
pretrain_gpt.main()
os._exit(0)
"""


SMALL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 31 "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3"
)
TRAINING = "--global-batch-size 1 --mock-data --tokenizer-type NullTokenizer --device cpu"
REPLICAS = "--global-batch-size 2 --dry-run --dry-run-replicas 2 --dry-run-gpu H100 --bf16"


@pytest.mark.parametrize(
    "flags",
    [f"{TRAINING} --peak-tflops 0.1", f"{REPLICAS} --position-embedding-type rope"],
    ids=["an iteration on a CPU", "a dry run of replicas"],
)
def test_a_command_imports_only_what_it_needs(flags: str) -> None:
    """PyTorch's rules for shapes of tensors without values import sympy in a count."""
    flags = f"{SMALL} {flags}"
    script = TRAINS.format(flags=flags, names=NAMED)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert "imported by the entry: end" in done.stdout, done.stdout + done.stderr
    assert "imported: sympy exit: 0" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_a_command_imports(collects: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with in_environment():
            assert not gc.isenabled()
        assert gc.isenabled() == collects
        assert (gc.get_freeze_count() > 0) == collects
    finally:
        gc.unfreeze()
        (gc.enable if was_enabled else gc.disable)()
