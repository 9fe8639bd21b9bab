#!/usr/bin/env python3
"""How long the host takes to issue the passes of transformer layers, beside plain PyTorch.

    python tools/host_time.py --rounds 300

A GPU waits for its host where passes are short: with many tensor-parallel ranks, or few tokens.
With tiny tensors next to nothing is computed, so the time of a pass is that of Python, of autograd
and of PyTorch's dispatcher. All kinds of layers run in turn in every round, four layers in a row as
on a stage: of one alone much time would go to code that no cache holds any more. Figures are
medians, of one layer:

    plain             nn.Linear, nn.LayerNorm and scaled_dot_product_attention, plainly written
    reference         our layer with reference kernels
    GPU's operators   our layer with the kernels of a GPU, whose Triton programs do nothing
    replayed          the same as graphs of passes (--cuda-graph-impl), whose replays do nothing

Ours run with a whole backward and with one that leaves weight gradients to W. Every round is a
further microbatch of an iteration: in all rows gradients are added to those that are there. All
tensors are on the CPU, so PyTorch's own operators cost the same in every row. Launches of a real
GPU come on top, and these are fewer with the GPU's operators. Only the thread's own time counts,
not that of other programs on the machine.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from megatron.flags.command import read
from megatron.flags.declare import flag
from megatron.flags.ranges import COUNT
from megatron.kernels.cuda.kernels import CudaKernels
from megatron.kernels.cuda.library import Programs
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.model.ownership import OwnedParameter
from megatron.model.settings import ModelSettings
from megatron.model.transformer_layer import TransformerLayer
from megatron.optimizer.bucket import Bucket
from megatron.runtime.pass_slots import Slot, StageInput
from tools.benchmarking import harness
from tools.benchmarking.plain_model import Layer
from tools.pages.tables import row, rule

CPU: Final = torch.device("cpu")
HIDDEN: Final = 16
HEADS: Final = 2
TOKENS: Final = 8
WARM_UPS: Final = 20
LAYERS: Final = 4
MODEL: Final = ModelSettings.of(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    ffn_hidden_size=4 * HIDDEN,
    num_attention_heads=HEADS,
    num_query_groups=HEADS,
    kv_channels=HIDDEN // HEADS,
    seq_length=TOKENS,
    max_position_embeddings=TOKENS,
    vocab_size=8,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)


@dataclass
class Subject:
    """Several layers, one after the other, that are timed together.

    Attributes:
        name: name of the row of the table.
        layers: the layers, [b, s, h] -> [b, s, h].
        splits: whether the backward leaves weight gradients to W.
        deferred: work that a split backward has left for W.
        slot: slot of passes that are replayed as graphs.
        taken: seconds per layer of every kind of pass, one entry per round.
    """

    name: str
    layers: nn.Sequential
    splits: bool = False
    deferred: list[Callable[[], None]] = field(default_factory=list)
    slot: Slot | None = None
    taken: dict[str, list[float]] = field(default_factory=dict)

    def run(self) -> None:
        """Run F, B and W once, and note the time of each."""
        x_bsh = torch.full((1, TOKENS, HIDDEN), 0.5, requires_grad=True)
        marks = self._launch(x_bsh) if self.slot is None else self._replay(x_bsh, self.slot)
        for kind, begin in (("F", 0), ("B", 2), ("W", 3)):
            self.taken.setdefault(kind, []).append((marks[begin + 1] - marks[begin]) / LAYERS)

    def _launch(self, x_bsh: Tensor) -> list[float]:
        """Return the times at which passes began and ended."""
        marks = [time.thread_time()]
        y_bsh = self.layers(x_bsh)
        marks.append(time.thread_time())
        gradient = torch.ones_like(y_bsh)
        marks.append(time.thread_time())
        torch.autograd.backward((y_bsh,), (gradient,))
        marks.append(time.thread_time())
        with torch.no_grad():
            for work in self.deferred:
                work()
        marks.append(time.thread_time())
        self.deferred.clear()
        return marks

    def _replay(self, x_bsh: Tensor, slot: Slot) -> list[float]:
        """Return the times at which replayed passes began and ended."""
        marks = [time.thread_time()]
        y_bsh = slot.forward(StageInput(x_bsh.detach())).y_buh
        marks.append(time.thread_time())
        gradient = torch.ones_like(y_bsh)
        marks.append(time.thread_time())
        slot.backward(gradient, loss_weight=0.0)
        marks.append(time.thread_time())
        if self.splits:
            with torch.no_grad():
                slot.weight_gradients()
        marks.append(time.thread_time())
        return marks

    def take_deferred(self) -> list[Callable[[], None]]:
        """Return the work that a backward has left."""
        left, self.deferred[:] = list(self.deferred), []
        return left

    def seconds(self, kind: str) -> float:
        """Return the median time of a pass, without the rounds that warm up."""
        return statistics.median(self.taken[kind][WARM_UPS:])


class _NoGraph:
    """A graph whose replay does nothing."""

    def capture(self, work: Callable[[], None]) -> None:
        work()

    def replay(self) -> None:
        pass

    def reset(self) -> None:
        pass


class _NoSlot:
    """The memory of a slot whose graphs do nothing when they are replayed."""

    def graph(self) -> _NoGraph:
        return _NoGraph()

    def lasting(self) -> AbstractContextManager[object]:
        return nullcontext()


class _Nothing:
    """A Triton program that is launched and does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


def ours(name: str, kernels: Kernels, *, splits: bool) -> Subject:
    """Return our layers, with their gradients in a bucket."""
    site = Site(CPU, torch.float32, given_kernels=kernels)
    layers = nn.Sequential(*(TransformerLayer(MODEL, index, site) for index in range(LAYERS)))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.fill_(0.01)
    entries = [
        OwnedParameter.whole(each, parameter) for each, parameter in layers.named_parameters()
    ]
    Bucket(entries, kernels)
    way = "split" if splits else "whole"
    subject = Subject(f"{name}, {way}", layers, splits)
    defer_weight_gradients(layers, subject.deferred.append if splits else None)
    return subject


def replayed(kernels: Kernels, *, splits: bool) -> Subject:
    """Return our layers, replayed as graphs."""
    subject = ours("replayed", kernels, splits=splits)
    subject.slot = Slot(
        lambda x_bsh, _: subject.layers(x_bsh),
        subject.take_deferred if splits else None,
        _NoSlot(),
        complete=lambda: None,
        free=lambda slot: None,
    )
    return subject


def subjects() -> list[Subject]:
    """Return all subjects, the plain layers first."""
    of_gpu = CudaKernels(CPU, torch.float32)
    return [
        Subject("plain", nn.Sequential(*(Layer(MODEL) for _ in range(LAYERS)))),
        *(ours("reference", ReferenceKernels(), splits=splits) for splits in (False, True)),
        *(ours("GPU's operators", of_gpu, splits=splits) for splits in (False, True)),
        *(replayed(of_gpu, splits=splits) for splits in (False, True)),
    ]


def _no_program(programs: Programs, name: str) -> Any:
    """Return a program that does nothing, even where the true program was launched before."""
    return object.__getattribute__(programs, name) if name.startswith("_") else _Nothing()


def measure(rounds: int) -> list[Subject]:
    """Run all subjects in turn, ``rounds`` times after some rounds to warm up."""
    with patch.object(Programs, "__getattribute__", _no_program):
        found = subjects()
        for _, subject in harness.turns(found, WARM_UPS + rounds):
            subject.run()
    return found


def rows(found: Sequence[Subject]) -> Iterator[str]:
    """Yield a Markdown table of medians in microseconds, and of ratios to the plain layer."""
    yield "| layer | F | B | W | all | F / plain | all / plain |"
    yield rule(7)
    base, *_ = found
    for subject in found:
        times = [subject.seconds(kind) for kind in "FBW"]
        if not subject.splits:
            times[2] = 0.0
        whole = base.seconds("F") + base.seconds("B")
        ratios = (times[0] / base.seconds("F"), sum(times) / whole)
        cells = (f"{1e6 * seconds:.0f}" for seconds in (*times, sum(times)))
        yield row(subject.name, *cells, *(f"{ratio:.2f}" for ratio in ratios))


@dataclass(frozen=True)
class HostFlags(harness.RoundFlags):
    """Measurement."""

    rounds: int = flag(300, "Times that every layer runs.", COUNT)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    words = sys.argv[1:] if argv is None else argv
    flags = read(words, __doc__, HostFlags)[HostFlags]
    torch.set_num_threads(1)
    found = measure(flags.rounds)
    said = f"Microseconds of one of {LAYERS} layers, medians of {flags.rounds} rounds, one thread."
    measured = {own.name: own.taken for own in found}
    run = harness.Run(["tools/host_time.py", *words], "cpu", said, measured)
    run.publish(rows(found), flags)


if __name__ == "__main__":
    main()
