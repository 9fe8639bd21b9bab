"""What a GPU would be asked to do: the launches of some code, with their bytes and products.

The time of a launch is that of its products or that of its bytes, whichever is longer: what it
would take on a GPU that did nothing badly. A part of a training iteration is then so many times
its *pure products*, the products alone.

``python -m pretended_gpu launches`` (with ``tests`` in the path) prints the table of
docs/benchmarks/2026-11-22-gpu-count.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from pretended_gpu.gpu import DEVICE, PretendedGpu, tensors_of, uses_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron.kernels.choose import kernels_for
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.softmax import LossOptions
from megatron.layers.main_grad import give_main_grad
from megatron.layers.site import Site
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.layers.vocabulary.shard import VocabularyShard
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.model.config import ModelConfig
from megatron.model.ownership import OwnedParameter
from megatron.model.transformer_layer import TransformerLayer
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.grad_norm import local_sum_of_squares
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.make import make_optimizer
from megatron.optimizer.muon import QKVRows
from megatron.optimizer.parameters import OptimizedParameter, ParameterPart
from megatron.parallel.groups import ConnectedAxis

PRODUCTS_PER_SECOND: Final = 790e12
BYTES_PER_SECOND: Final = 4e12
"""Of an H200: bf16 FLOP that products attain, and its memory."""

TOKENS: Final = 4096
HIDDEN: Final = 4096
ROWS: Final = 32_000
SHARDS: Final = 8

_aten = torch.ops.aten

_NO_LAUNCH: Final = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
    "_unsafe_view",
    "_pin_memory",
    "is_pinned",
}
"""Operations that ask for memory of either side, or for nothing."""

_ROWS_OF_TOKENS: Final = {
    "embedding": ("weight", "indices"),
    "index_add_": ("self", "index"),
    "merge_input_gradient": ("weight_vh", "targets_n"),
    "subtract_targets_": ("gradient_vh", "targets_n"),
}
"""Arguments of which an operation touches one row for every index: which, and by which indices.
Where the row is another shard's, the Triton programs touch none; that is not counted for them."""


_ONLY_WRITTEN: Final = {"adamw_": ("quotients", "weights"), "_foreach_copy_": ("self",)}
"""Arguments of operations in place that are not read; what a quotient comes from is another."""

STEP_PARTS: Final = ("norm", "step")

PARAMETERS: Final = 4 * HIDDEN * HIDDEN
"""Of the matrices whose step is counted."""


@dataclass(frozen=True)
class Launch:
    """A kernel, or what PyTorch does as one.

    Attributes:
        name: of the operation.
        bytes: that it reads and writes, once each.
        flops: of its products.
    """

    name: str
    bytes: int
    flops: int

    @property
    def seconds(self) -> float:
        """Least time."""
        return max(self.bytes / BYTES_PER_SECOND, self.flops / PRODUCTS_PER_SECOND)


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
        return sum(each.seconds for each in self.launches)

    @property
    def multiple(self) -> float:
        """Time as a multiple of the pure products'; infinite without any."""
        return self.seconds / (self.flops / PRODUCTS_PER_SECOND) if self.flops else float("inf")

    def __add__(self, other: "Part") -> "Part":
        return Part(self.launches + other.launches)


class Counter(TorchDispatchMode):
    """Notes what is launched; within it, ``part`` names what is launched meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        self.parts: dict[str, Part] = {}
        self._launches: list[Launch] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note launches within as those of ``name``."""
        self._launches = []
        yield
        self.parts[name] = Part(tuple(self._launches))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and note it."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function._schema.name.split("::")[1]
        if name not in _NO_LAUNCH and function.namespace in ("aten", "megatron_kernels"):
            reads, writes = uses_of(function, args, kwargs)
            before = {id(each) for each in tensors_of((args, kwargs))}
            made = [each for each in tensors_of(result) if id(each) not in before]
            if writes or not function.is_view:
                sizes = _sizes(function, args, kwargs)
                again = _read_again(function, args, kwargs, writes)
                moved = [*reads, *writes, *again, *made]
                size = sum(sizes.get(id(each), _bytes(each)) for each in moved)
                flops = _flops(function, args, result)
                self._launches.append(Launch(name, size, flops))
        return result


def _read_again(function: Any, args: Any, kwargs: Any, writes: list[Tensor]) -> list[Tensor]:
    """Return those of the written tensors that an operation in place reads as well."""
    name = function._schema.name.split("::")[1]
    if not name.endswith("_"):
        return []
    names = [argument.name for argument in function._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    unread = {id(each) for key in _ONLY_WRITTEN.get(name, ()) for each in tensors_of(given[key])}
    return [each for each in writes if id(each) not in unread]


def _sizes(function: Any, args: Any, kwargs: Any) -> dict[int, int]:
    """Return the bytes that are touched of arguments of which only some rows are, by their id."""
    chosen = _ROWS_OF_TOKENS.get(function._schema.name.split("::")[1])
    if chosen is None:
        return {}
    names = [argument.name for argument in function._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    rows, indices = (given[name] for name in chosen)
    return {id(rows): indices.numel() * rows.shape[1] * rows.element_size()}


def _bytes(tensor: Tensor) -> int:
    """Bytes that are there, however often a stride of 0 repeats them."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride) * tensor.element_size()


def _flops(function: Any, args: Any, result: Any) -> int:
    counter = flop_registry.get(function.overloadpacket)
    if counter is None:
        return 0
    factors = [each for each in args if isinstance(each, Tensor)]
    return int(counter(*factors, out_val=result))


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
    config = ModelConfig(
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
        OptimizedParameter.of(
            OwnedParameter.whole(
                f"{index}.weight",
                nn.Parameter(torch.empty(HIDDEN, HIDDEN, dtype=torch.bfloat16, device=DEVICE)),
            )
        )
        for index in range(PARAMETERS // HIDDEN**2)
    ]
    Bucket(entries, kernels)
    parts = list(map(ParameterPart.whole, entries))
    config = OptimizerConfig(lr=1e-4, weight_decay=0.1)
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
