#!/usr/bin/env python3
"""What a split backward costs: B and W one after the other, against the fused backward.

python tools/benchmark_split.py --dtype bf16 fp32 --repeats 30

One stage of transformer layers without vocabulary, on one thread, as a rank of a laptop's pipeline
has it, and with the launcher's settings of the allocator. The two ways take turns, so that a
machine whose speed drifts is fair to both; reported are medians.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_allocator import allocator
from megatron.layers.linear import defer_weight_gradients
from megatron.model.config import ModelConfig
from megatron.model.init import init_layer
from megatron.model.transformer_layer import TransformerLayer
from megatron.optimizer.main_gradients import MainGradients

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WARMUP = 3
"""Turns before the first that counts: oneDNN prepares its kernels, the allocator its memory."""


class Stage:
    """A stage and one microbatch, run forward and back either way.

    Args:
        arguments: sizes, as parsed from the command line.
        dtype: of parameters and activations.
    """

    def __init__(self, arguments: argparse.Namespace, dtype: torch.dtype) -> None:
        config = _config(arguments)
        layers = [
            TransformerLayer(config, i, torch.device("cpu"), dtype)
            for i in range(config.num_layers)
        ]
        for i, layer in enumerate(layers):
            init_layer(layer, i, config, seed=1)
        self._model = nn.Sequential(*layers)
        self._main_gradients = MainGradients(list(self._model.parameters()))
        generator = torch.Generator().manual_seed(1)
        shape = (1, config.seq_length, config.hidden_size)
        self._x_bsh = torch.randn(shape, generator=generator).to(dtype)
        self._gradient_bsh = torch.randn(shape, generator=generator).to(dtype)
        self._deferred: list[Callable[[], None]] = []

    def run(self, split: bool) -> tuple[float, float, float]:
        """Return the seconds of F, of B (or the whole backward) and of W (or 0)."""
        defer_weight_gradients(self._model, self._deferred.append if split else None)
        x_bsh = self._x_bsh.clone().requires_grad_()
        times = [time.perf_counter()]
        y_bsh = self._model(x_bsh)
        times.append(time.perf_counter())
        y_bsh.backward(self._gradient_bsh)
        times.append(time.perf_counter())
        while self._deferred:
            self._deferred.pop(0)()
        times.append(time.perf_counter())
        return times[1] - times[0], times[2] - times[1], times[3] - times[2]


def _config(arguments: argparse.Namespace) -> ModelConfig:
    h, heads = arguments.hidden_size, arguments.heads
    return ModelConfig(
        num_layers=arguments.layers,
        hidden_size=h,
        ffn_hidden_size=4 * h,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=h // heads,
        seq_length=arguments.seq_length,
        max_position_embeddings=arguments.seq_length,
        vocab_size=1,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )


def measure(stage: Stage, repeats: int) -> str:
    """Return a line of milliseconds and ratios for one stage."""
    runs: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for turn in range(WARMUP + repeats):
        for split in (False, True) if turn % 2 else (True, False):
            times = stage.run(split)
            if turn >= WARMUP:
                runs[split].append(times)
    forward, fused, _ = (
        1e3 * statistics.median(column) for column in zip(*runs[False], strict=True)
    )
    forward_split, b, w = (
        1e3 * statistics.median(column) for column in zip(*runs[True], strict=True)
    )
    both = 1e3 * statistics.median(b + w for _, b, w in runs[True])
    return (
        f"F {forward:.2f} / {forward_split:.2f} ms, fused {fused:.2f} ms, "
        f"B {b:.2f} + W {w:.2f} ms: (B + W) / fused {both / fused:.3f}"
    )


def main() -> None:
    """Measure and print one line per dtype."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in arguments.dtype:
        print(f"{dtype}: {measure(Stage(arguments, DTYPES[dtype]), arguments.repeats)}")


if __name__ == "__main__":
    if not allocator().items() <= os.environ.items():  # read as a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **allocator()})
    main()
