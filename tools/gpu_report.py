#!/usr/bin/env python3
"""Find out in 12 minutes what only a GPU can tell, and write a dated report.

python tools/gpu_report.py                     # on the first GPU; docs/benchmarks/DATE-gpu
python tools/gpu_report.py --device cpu        # in small, to see that it works
python tools/gpu_report.py --only output training
python tools/gpu_report.py --list              # the sections, and what their figures decide

Every section runs in a process of its own with its own time, so a section that fails, hangs or
breaks the GPU's state leaves the others alone. The report is written anew after each of them.
Beside every section it logs the GPU's power and the clock of its multiprocessors.
"""

import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.flags.command import read
from megatron.flags.declare import flag
from megatron.flags.ranges import POSITIVE
from tools.gpu_sections.power import PowerLog, Reading, in_words

ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Part:
    """A section of the report.

    Attributes:
        title: heading of the section.
        function: module in ``tools.gpu_sections`` and function in it, as ``module:function``.
        seconds: time limit; the section may also use time that earlier sections have left.
        advice: what to do with the figures.
    """

    title: str
    function: str
    seconds: float
    advice: str


PARTS: Final[Mapping[str, Part]] = {
    "machine": Part(
        "The machine", "machine:measure", 20,
        "All other figures hold for these versions. Compare with reports of the same versions.",
    ),
    "output": Part(
        "S and T against their products", "output_layer:measure", 35,
        "The part that takes the most time over its products is the next to make faster.",
    ),
    "training": Part(
        "One rank: passes, optimizer, memory", "training:measure", 35,
        "Where a pass differs from a dry run, correct the rates of the GPU in "
        "`simulator/costs/gpus.py`. Where memory differs by more than 0.2 %, the count lacks a "
        "tensor.",
    ),
    "elementwise": Part(
        "Work between products, and a step", "elementwise:measure", 20,
        "If LayerNorm's backward of half the rows takes much more than half the time, "
        "`norm_backward` needs more programs than one for each multiprocessor.",
    ),
    "eight bits": Part(
        "Products in 8 bits", "eight_bits:measure", 30,
        "If the product for a weight's gradient takes longer in 8 bits than in 16, train with "
        "`--no-fp8-wgrad`. Dry runs take cuBLAS's products in 8 bits for `EIGHT_BITS` times as "
        "fast as in 16 (`simulator/costs/launch_time.py`): compare it.",
    ),
    "weights": Part(
        "W of two microbatches", "two_microbatches:measure", 25,
        "Where one product takes less than 0.95 of the time of two with its copies, a W that joins "
        "two microbatches is worth building.",
    ),
    "plain": Part(
        "One rank beside plain PyTorch", "plain:measure", 65,
        "If plain PyTorch is faster, compare traces of both (`--profile`) before anything else.",
    ),
    "predicted": Part(
        "What a dry run predicts", "predicted:measure", 75,
        "Where seconds are off by more than a dry run's closing words say, compare the passes of "
        "the section above: rates of products and of memory are in `simulator/costs/`. Where "
        "memory is off by more than 0.2 %, the count lacks a tensor.",
    ),
    "features": Part(
        "Every feature beside a CPU", "features:measure", 80,
        "A layout that is not as on a CPU must not train: look at it before anything else. For all "
        "layouts `--only features --patience 5` has enough time.",
    ),
    "links": Part(
        "Links beside products, and their memory", "links:measure", 40,
        "If a product beside a waiting receive takes 1.1 times as long or more, train with the "
        "largest `--nccl-max-ctas-p2p` for which it does not. If no number of blocks helps and "
        "the last two columns are small, let products leave that many multiprocessors free. If "
        "messages in a row hold more memory than two of them, PyTorch keeps messages longer than "
        "they are used, and a run needs so much more memory than the dry run counts. A rank has a "
        "communicator for each of its links, and up to ten others (`parallel/groups.py`): if "
        "their memory together is more than a twentieth of the GPU's, `USABLE` in "
        "`simulator/costs/gpus.py` is too large.",
    ),
    "overlap": Part(
        "Passes beside stand-ins for peers", "overlap:measure", 120,
        "If passes beside stand-ins take longer by more than the blocks' share of the "
        "multiprocessors, the dry run's `crowding` is too small: choose the setting with the "
        "shortest iteration (`--nccl-max-ctas-p2p`, `--nccl-max-ctas-vocab`). If pairs save less "
        "than simulated, correct `schedules/pair_time.py` before `--tp-comm-overlap` is advised.",
    ),
    "attention": Part(
        "Every attention", "attention:measure", 40,
        "An attention with a larger error than rounding explains must not train: look at it first. "
        "Where a form is much slower than causal attention, and flash-attn is not installed, "
        "install it. Dry runs take causal attention for as fast as `_SHARES` in "
        "`simulator/costs/gpus.py` say: compare it.",
    ),
    "graphs": Part(
        "Passes as graphs", "graphs:measure", 60,
        "Where replayed passes are faster, train with `--cuda-graph-impl local` if the memory is "
        "there: a dry run counts neither.",
    ),
    "contract": Part(
        "Contract tests of the kernels", "machine:contract", 75,
        "A kernel that fails must not train: report it with the lines of its test.",
    ),
}  # fmt: skip
"""All sections, beginning with those that give results soonest; together they take 720 s at most.
The first section also loads PyTorch, from a disk that may be slow."""


@dataclass(frozen=True)
class Told:
    """The result of a section.

    Attributes:
        title: heading of the section.
        lines: lines of its Markdown.
        values: the results for programs; empty if the section failed.
        seconds: seconds that the section took.
        failed: whether the section failed.
        power: readings of the GPU's power and clock; ``None``: no GPU was measured.
    """

    title: str
    lines: Sequence[str]
    values: Mapping[str, Any]
    seconds: float
    failed: bool = False
    power: Sequence[Reading] | None = None


def run_part(name: str, part: Part, device: str, seconds: float) -> Told:
    """Run a section in a process of its own, and log the power of a GPU meanwhile."""
    if device != "cuda":
        return _run_alone(name, part, device, seconds)
    with PowerLog() as log:
        told = _run_alone(name, part, device, seconds)
    return replace(told, power=log.readings)


def _run_alone(name: str, part: Part, device: str, seconds: float) -> Told:
    """Run a section in a process of its own; return its result, also if the process fails.

    What the process prints is printed at once: it is all that is known if the machine is lost.
    """
    begin = time.monotonic()
    last: deque[str] = deque(maxlen=15)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--device", device, "--part", name]
        with subprocess.Popen(
            [*command, "--seconds", str(seconds), "--result", str(result)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            listener = threading.Thread(target=_repeat, args=(process, last))
            listener.start()
            try:
                process.wait(seconds)
                reason = f"it failed with status {process.returncode}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # and all processes that it has started
                reason = f"it was not done after {seconds:g} s"
            listener.join()
        took = time.monotonic() - begin
        if process.returncode == 0 and result.is_file():
            found = json.loads(result.read_text())
            return Told(part.title, found["lines"], found["values"], took)
    return Told(part.title, [f"**{reason}**", "", "```", *last, "```"], {}, took, failed=True)


def _repeat(process: subprocess.Popen[str], last: deque[str]) -> None:
    """Print the lines of a process, and keep the last."""
    for line in process.stdout or ():
        print(line, end="", flush=True)
        last.append(line.rstrip())


def work(part: Part, device: str, seconds: float, result: Path) -> None:
    """Measure a section in this process, which has so many seconds."""
    from megatron.parallel.environment import set_nccl_environment

    set_nccl_environment()
    import torch

    from tools.gpu_sections.timing import Scale, Section

    torch.manual_seed(1234)
    module, _, function = part.function.partition(":")
    measure: Callable[[Scale], Section] = getattr(
        import_module(f"tools.gpu_sections.{module}"), function
    )
    found = measure(Scale(torch.device(device), small=device == "cpu", seconds=seconds))
    result.write_text(json.dumps(asdict(found)))


def write(told: Mapping[str, Told], device: str, folder: Path) -> None:
    """Write the report as Markdown and as JSON."""
    failed = [one.title for one in told.values() if one.failed]
    lines = [
        f"# What a {'GPU' if device == 'cuda' else 'CPU'} tells, {datetime.date.today()}",
        "",
        f"Command: `{shlex.join(['python', 'tools/gpu_report.py', *sys.argv[1:]])}`; "
        f"{sum(one.seconds for one in told.values()):.0f} s in all.",
    ]
    if device == "cpu":
        lines += ["", "In small, on a CPU: these figures say nothing about GPUs."]
    if failed:
        lines += ["", f"**Failed: {', '.join(failed)}.**"]
    for name, one in told.items():
        lines += ["", f"## {one.title}", "", *one.lines, "", PARTS[name].advice]
        if one.power is not None:
            lines += ["", in_words(one.power)]
        lines += ["", f"({one.seconds:.0f} s)"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    document = {name: asdict(one) for name, one in told.items()}
    (folder / "report.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ReportFlags:
    """Report."""

    device: Literal["cuda", "cpu"] = flag("cuda", "What is measured.")
    only: tuple[str, ...] = flag((), "Sections.", choices=tuple(PARTS), unset="all")
    out: Path | None = flag(None, "Folder of it.", unset="docs/benchmarks/DATE-DEVICE")
    list: bool = flag(False, "Only say what the sections measure, and what to do with it.")
    patience: float = flag(1.0, "All times of sections become so many times longer.", POSITIVE)
    part: str = flag("", "Section of this process.", choices=tuple(PARTS), hidden=True)
    seconds: float = flag(60.0, "Seconds that it has.", POSITIVE, hidden=True)
    result: Path | None = flag(None, "File for what it measures.", hidden=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; the exit code is 1 if a section failed."""
    arguments = read(argv, __doc__, ReportFlags)[ReportFlags]
    if arguments.part and arguments.result is not None:
        work(PARTS[arguments.part], arguments.device, arguments.seconds, arguments.result)
        return
    if arguments.list:
        for each in arguments.only or PARTS:
            part = PARTS[each]
            print(f"{each}: {part.title} ({part.seconds:g} s)")
            print(textwrap.indent(textwrap.fill(part.advice, 96, break_on_hyphens=False), "  "))
        return
    name = f"{datetime.date.today()}-{'gpu' if arguments.device == 'cuda' else 'cpu'}"
    folder: Path = arguments.out or ROOT / "docs/benchmarks" / name
    told: dict[str, Told] = {}
    left = 0.0
    for each in arguments.only or PARTS:
        part = PARTS[each]
        print(f"{part.title} ...", flush=True)
        seconds = arguments.patience * part.seconds + left
        told[each] = run_part(each, part, arguments.device, seconds)
        left = max(0.0, seconds - told[each].seconds)
        write(told, arguments.device, folder)
        print("\n".join([*told[each].lines, "", part.advice]), flush=True)
    print(f"\n{folder / 'report.md'}")
    if any(one.failed for one in told.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
