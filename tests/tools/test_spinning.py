"""The kernel that stands in for a collective: its copies and its end, and products beside it."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.test_compiled_programs import without_interpreter

from tools.fake_clock import CLUSTER, FakeTime
from tools.gpu_sections import beside_spinning
from tools.gpu_sections.peers import Peers
from tools.gpu_sections.timing import Scale

CPU = torch.device("cpu")


class FakeEvent:
    """An event whose time is that of the fake clock."""

    clock: FakeTime

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = self.clock.now

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 1e3 * (later.at - self.at)

    def query(self) -> bool:
        return False


class FakeSpinner:
    """Its kernels last their time times a factor."""

    def __init__(self, clock: FakeTime, factor: float) -> None:
        self.clock, self.factor = clock, factor
        self.blocks: list[int] = []

    def begin(self) -> None:
        """Nothing counts from here."""

    def launch(self, blocks: int, ready: float, seconds: float, *_: Any) -> None:
        self.blocks.append(blocks)
        self.clock.sleep(self.factor * seconds)


@pytest.fixture
def clock() -> FakeTime:
    return FakeTime()


@pytest.fixture
def spins(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Peers]:
    """Peers on a GPU that is only a clock."""

    def peers_of(factor: float) -> Peers:
        others = Peers(CPU, CLUSTER)
        others.spinner = FakeSpinner(clock, factor)
        return others

    monkeypatch.setattr(FakeEvent, "clock", clock, raising=False)
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=FakeEvent)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda own: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(beside_spinning, "leaving_free", lambda blocks: nullcontext())
    return peers_of


def test_a_product_is_timed_beside_every_number_of_blocks(
    spins: Callable[[float], Peers],
) -> None:
    others = spins(1.0)
    found = beside_spinning.product_beside_blocks(Scale(CPU, small=True), others)
    assert [row["blocks"] for row in found.values["beside_blocks"]] == [1, 2, 4, 16]
    # Two probes, and each number once as it is and once with room.
    assert others.spinner.blocks == [1, 1, 1, 1, 2, 2, 4, 4, 16, 16]


@pytest.mark.parametrize("factor", [0.0, 0.5, 1000.0])
def test_a_kernel_that_does_not_last_its_time_says_so(
    factor: float, spins: Callable[[float], Peers]
) -> None:
    with pytest.raises(RuntimeError, match=r"should spin 0[.]005 s took"):
        beside_spinning.product_beside_blocks(Scale(CPU, small=True), spins(factor))


COMPILES = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tools.gpu_sections.spinning_programs import FORMS, LAUNCH
found = []
for capability in (80, 90):
    for form in FORMS:
        source = ASTSource(form.program, dict(form.types), dict(form.constants))
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=LAUNCH)
        reads = made.asm["ptx"].count("%globaltimer")
        found.append([form.program.__name__, reads, len(made.asm["cubin"]) > 0])
print(json.dumps(found))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_spinning_kernel_compiles_and_keeps_all_its_looks_at_the_clock() -> None:
    """At its start, in the wait for the peers, and in the wait for the planned end."""
    expected = [["note_time", 1, True], ["spin_and_copy", 3, True]]
    assert json.loads(without_interpreter("-c", COMPILES)) == 2 * expected


class Nanoseconds:
    """The clock of a GPU, which every look at it moves."""

    def __init__(self, now: int) -> None:
        self.now = now

    def __call__(self) -> int:
        self.now += 50
        return self.now


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(
    ("ready", "seconds", "expected"),
    [(5e-6, 2e-6, 7_000), (0.0, 3e-6, 3_000 + 1_000), (0.0, 0.0, 1_000)],
)
def test_the_kernel_copies_and_ends_as_planned(
    ready: float, seconds: float, expected: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter, where blocks run one by one; the kernel starts 1 us late."""
    from tools.gpu_sections import spinning, spinning_programs

    nanoseconds = Nanoseconds(1_000_000)
    monkeypatch.setattr(spinning_programs, "globaltimer", nanoseconds)
    monkeypatch.setattr(spinning, "WORDS", 256)
    spinner = spinning.Spinner(CPU)
    spinner.begin()
    begin = nanoseconds.now
    nanoseconds.now += 1_000
    source = torch.randn(2, 300).bfloat16()
    destination = torch.zeros(4, 2, 300, dtype=torch.bfloat16)
    spinner.launch(blocks, ready, seconds, source, destination)
    assert torch.equal(destination, source.expand(4, 2, 300))
    assert nanoseconds.now - begin >= expected
    if blocks == 1:
        assert nanoseconds.now - begin < expected + 500


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_words_are_those_of_the_tensor() -> None:
    from tools.gpu_sections.spinning import _words

    tensor = torch.zeros(3, 3, dtype=torch.bfloat16)
    words = _words(tensor)
    assert words.numel() == 4  # of 18 bytes
    words.fill_(-1)
    assert int(tensor.isnan().sum()) == 8
