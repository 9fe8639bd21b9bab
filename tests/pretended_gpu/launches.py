"""What a GPU would be asked to do: the launches of some code, with their bytes and products.

The time of a launch is that of its products or that of its bytes, whichever is longer: what it
would take on a GPU that did nothing badly. A part of a training iteration is then so many times
its *pure products*, the products alone.

``python -m pretended_gpu launches`` (with ``tests`` in the path) prints the table of
docs/benchmarks/2026-11-24-gpu-count.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from pretended_gpu.gpu import DEVICE, PretendedGpu
from torch import Tensor, nn

from megatron.kernels.choose import kernels_for
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.softmax import LossOptions
from megatron.layers.main_grad import give_main_grad
from megatron.layers.site import Site
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.layers.vocabulary.shard import VocabularyShard
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.model.ownership import OwnedParameter
from megatron.model.settings import ModelSettings
from megatron.model.transformer_layer import TransformerLayer
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.grad_norm import local_sum_of_squares
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.make import make_optimizer
from megatron.optimizer.muon import QKVRows
from megatron.optimizer.parameters import ParameterPart
from megatron.optimizer.settings import OptimizerSettings
from megatron.parallel.groups import ConnectedAxis
from megatron.planning.count.recorder import Recorder
from megatron.simulator.costs.count import Launch

PRODUCTS_PER_SECOND: Final = 790e12
BYTES_PER_SECOND: Final = 4e12
"""Of an H200: bf16 FLOP that products attain, and its memory."""

TOKENS: Final = 4096
HIDDEN: Final = 4096
ROWS: Final = 32_000
SHARDS: Final = 8

STEP_PARTS: Final = ("norm", "step")

PARAMETERS: Final = 4 * HIDDEN * HIDDEN
"""Of the matrices whose step is counted."""


def least_seconds(launch: Launch) -> float:
    """Return the least time of a launch."""
    return max(launch.bytes / BYTES_PER_SECOND, launch.flops / PRODUCTS_PER_SECOND)


@dataclass(frozen=True)
class Part:
    """What a part of an iteration launches."""

    launches: tuple[Launch, ...]

    @property
    def flops(self) -> int:
        """Of all products."""
        return sum(each.flops for each in self.launches)

    @property
    def other_bytes(self) -> int:
        """Bytes of launches without a product."""
        return sum(each.bytes for each in self.launches if not each.flops)

    @property
    def seconds(self) -> float:
        """Of all launches, one after the other."""
        return sum(map(least_seconds, self.launches))

    @property
    def multiple(self) -> float:
        """Time as a multiple of the pure products'; infinite without any."""
        return self.seconds / (self.flops / PRODUCTS_PER_SECOND) if self.flops else float("inf")

    def __add__(self, other: "Part") -> "Part":
        return Part(self.launches + other.launches)


class Counter(Recorder):
    """Records launches; ``part`` names the launches of the code within."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, Part] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note launches within as those of ``name``."""
        with self.recording() as works:
            yield
        self.parts[name] = Part(tuple(launch for work in works for launch in work.launches))


def count(which: str, rank: int) -> dict[str, Part]:
    """Count all parts with the kernels of ``which``: ``reference``, or those that are chosen."""
    counter = Counter()
    with PretendedGpu(), counter:
        kernels = ReferenceKernels()
        chosen: Kernels = kernels_for(DEVICE, torch.bfloat16) if which == "chosen" else kernels
        _count_output_layer(counter, chosen)
        _count_layer(counter, chosen)
        _count_step(counter, chosen)
    return counter.parts


def _count_output_layer(counter: Counter, kernels: Kernels) -> None:
    shard = VocabularyShard.of(SHARDS * ROWS, SHARDS * ROWS, 1, SHARDS)
    weight = nn.Parameter(torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, device=DEVICE))
    give_main_grad(weight, torch.empty(ROWS, HIDDEN, device=DEVICE))
    layer = OutputLayer(shard, weight, LossOptions(shard.vocab_size), kernels)
    x_nh = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    targets_n = torch.empty(TOKENS, dtype=torch.int64, device=DEVICE)
    weight_n = torch.empty(TOKENS, device=DEVICE)
    gathered_p4n = torch.empty(SHARDS, 4, TOKENS, device=DEVICE)
    with counter.part("S"):
        state = layer.s(x_nh, targets_n, True)
    with counter.part("C1"):
        merged, _ = layer.merge(gathered_p4n, state, weight_n)
    state.drop_gradient()
    with counter.part("T"):
        layer.t(state, merged, weight_n)


def _count_layer(counter: Counter, kernels: Kernels) -> None:
    config = ModelSettings.of(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=4 * HIDDEN,
        num_attention_heads=32,
        num_query_groups=32,
        kv_channels=HIDDEN // 32,
        seq_length=TOKENS,
        max_position_embeddings=TOKENS,
        vocab_size=ROWS,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    layer = TransformerLayer(config, 0, Site(DEVICE, torch.bfloat16, given_kernels=kernels))
    for parameter in layer.parameters():
        give_main_grad(parameter, torch.empty(parameter.shape, device=DEVICE))
        parameter.register_post_accumulate_grad_hook(adds(kernels))
    for split in (False, True):
        work: list[Callable[[], None]] = []
        defer_weight_gradients(layer, work.append if split else None)
        x_bsh = torch.empty(1, TOKENS, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        x_bsh.requires_grad_()
        with counter.part("F"):
            y_bsh = layer(x_bsh)
        grad = torch.empty_like(y_bsh)
        with counter.part("split B" if split else "B"):
            torch.autograd.backward((y_bsh,), (grad,))
        with counter.part("W"), torch.no_grad():
            for each in work:
                each()


def _count_step(counter: Counter, kernels: Kernels) -> None:
    """Count the norm and a clipped step of AdamW on matrices in bf16 with fp32 states."""
    entries = [
        OwnedParameter.whole(
            f"{index}.weight",
            nn.Parameter(torch.empty(HIDDEN, HIDDEN, dtype=torch.bfloat16, device=DEVICE)),
        )
        for index in range(PARAMETERS // HIDDEN**2)
    ]
    Bucket(entries, kernels)
    parts = list(map(ParameterPart.whole, entries))
    config = OptimizerSettings(lr=1e-4, weight_decay=0.1)
    nobody = ConnectedAxis("tensor", 0, (0,))
    optimizer = make_optimizer(config, QKVRows(1, 1, 1), nobody, kernels, parts)
    with counter.part("norm"):
        local_sum_of_squares(parts, kernels, DEVICE)
    with counter.part("step"):
        optimizer.step(Rates(1e-4, 1e-4, 0.1), grad_norm=3.0)


def step_rows(before: dict[str, Part], after: dict[str, Part]) -> Iterator[str]:
    """Yield a table of both."""
    yield "| part | launches | bytes a parameter |"
    yield "|---|--:|--:|"
    for name in STEP_PARTS:
        first, last = before[name], after[name]
        yield (
            f"| {name} | {len(first.launches)} -> {len(last.launches)} | "
            f"{first.other_bytes / PARAMETERS:.1f} -> {last.other_bytes / PARAMETERS:.1f} |"
        )


def adds(kernels: Kernels) -> Callable[[Tensor], None]:
    """Return what a bucket does with a gradient that autograd has formed."""

    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            kernels.accumulate_(parameter.main_grad, parameter.grad)  # type: ignore[attr-defined]  # given above
            parameter.grad = None

    return add


def launch_rows(before: dict[str, Part], after: dict[str, Part]) -> Iterator[str]:
    """Yield a table of both."""
    yield "| part | launches | bytes beside products | times its products |"
    yield "|---|--:|--:|--:|"
    for name in (name for name in after if name not in STEP_PARTS):
        first, last = before[name], after[name]
        yield (
            f"| {name} | {len(first.launches)} -> {len(last.launches)} | "
            f"{first.other_bytes / 1e6:,.0f} -> {last.other_bytes / 1e6:,.0f} MB | "
            f"{_multiples(first, last)} |"
        )
    for names in (("S", "T"), ("S", "C1", "T")):
        first, last = (
            Part(tuple(each for name in names for each in parts[name].launches))
            for parts in (before, after)
        )
        yield f"| {' + '.join(names)} | | | {_multiples(first, last)} |"


def _multiples(before: Part, after: Part) -> str:
    return f"{before.multiple:.2f} -> {after.multiple:.2f}" if after.flops else "no products"
