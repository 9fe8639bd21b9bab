"""Measurements that every benchmark case makes, of this project and of references."""

import time
from collections.abc import Sequence
from statistics import mean
from typing import Any, Final

import torch

from megatron.model.flops import iteration_flops
from megatron.training.metrics.peak_tflops import measure_tflops
from tools.benchmarking.case import BenchmarkCase

WARM_UP_ITERATIONS: Final = 2
"""The first iteration makes buffers that stay, so the heap is in its final state only after the
second. With one warm-up iteration, 9,000 page faults were seen in one pass."""

WARM_UP_MICROBATCHES: Final = 8

_PRODUCT_ROWS: Final = 128000

_PRODUCT_SECONDS: Final = 3.0
"""Other users of a shared machine cause bursts of load that last a second. An iteration averages
over such bursts, so the measured product must do so too: over 15 s, the median rate of products was
7 % above their mean."""


def matrix_rates(case: BenchmarkCase, device: torch.device) -> dict[str, float]:
    """Return TFLOP/s of this rank in two products, while the other ranks measure too.

    ``product`` is the output layer's own product in one piece, [n, h] x [h, 128000], over and over
    for seconds; ``peak`` is a square product that stays in cache, the best that the device does.
    """
    dtype = case.torch_dtype
    x_nh = torch.randn(case.seq_length, case.hidden_size, device=device).to(dtype)
    w_vh = torch.randn(_PRODUCT_ROWS, case.hidden_size, device=device).to(dtype)
    out_nv = torch.empty(case.seq_length, _PRODUCT_ROWS, device=device, dtype=dtype)

    def multiply() -> None:
        torch.mm(x_nh, w_vh.T, out=out_nv)
        if device.type == "cuda":
            torch.cuda.synchronize()

    multiply()
    count, start, seconds = 0, time.perf_counter(), 0.0
    while seconds < _PRODUCT_SECONDS:
        multiply()
        count, seconds = count + 1, time.perf_counter() - start
    flops = 2 * count * x_nh.numel() * len(w_vh)
    return {"product": flops / seconds / 1e12, "peak": measure_tflops(device, dtype)}


def document(case: BenchmarkCase, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of one run for the report, from the measurements of all ranks.

    Args:
        case: what was run.
        ranks: of every rank ``schedule`` (seconds of forward and backward), ``rates`` (of
            ``matrix_rates``), ``memory`` (bytes at the peak) and ``loss``, its part of the loss
            that the initial weights have on the first microbatches; maybe ``update`` (seconds).
    """
    model = case.model_config()
    updated = {"update_s": max(rank["update"] for rank in ranks)} if "update" in ranks[0] else {}
    return updated | {
        "schedule_s": max(rank["schedule"] for rank in ranks),
        "flops": iteration_flops(model, case.microbatches),
        "product_tflops": mean(rank["rates"]["product"] for rank in ranks),
        "peak_tflops": mean(rank["rates"]["peak"] for rank in ranks),
        "memory_bytes": [rank["memory"] for rank in ranks],
        "loss": sum(rank["loss"] for rank in ranks),
    }
