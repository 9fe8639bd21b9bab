"""Times the first run of a new user: a fresh clone of HEAD, without environment and data.

    python3 tools/first_run.py VOCAB_SIZE=256k VOCAB_PARALLEL=1 [NAME=VALUE ...]

Variables are those of ``pretrain_gpt.sh``. Each line of the run is printed with the seconds since
the start. The last lines have the marks of the run, its longest silence, and its CPU seconds, which
say more than seconds where other programs run. It needs Python and git only.

``ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2`` imitates a processor without instructions for
bf16.
"""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

MARKS = {
    "the setup begins": "Setting up ",
    "the setup is done": "Done after ",
    "the model is chosen": "So the model gets ",
    "torchrun starts": "/torchrun ",
    "the first loss": " iteration        1/",
    "the last screen": " the run in short",
}
"""Mark of the run -> text at which it is passed."""


class Line(NamedTuple):
    """A line of the run; ``seconds`` since its start."""

    seconds: float
    text: str


def summary(lines: Sequence[Line], seconds: float, cpu_seconds: float) -> Iterator[str]:
    """Yield the marks, the longest silence and the CPU seconds of a run.

    Args:
        lines: all lines of the run.
        seconds: of the whole run.
        cpu_seconds: of all its processes.
    """
    for mark, text in MARKS.items():
        passed = [line.seconds for line in lines if text in line.text]
        yield f"{passed[0]:8.1f} s  {mark}" if passed else f"{'never':>10}  {mark}"
    yield f"{seconds:8.1f} s  the end"
    before = [Line(0.0, "the start"), *lines]
    after = [*(line.seconds for line in lines), seconds]
    silences = [end - line.seconds for line, end in zip(before, after, strict=True)]
    longest = max(range(len(silences)), key=silences.__getitem__)
    yield f"{silences[longest]:8.1f} s  the longest silence, after: {before[longest].text[:80]}"
    yield f"{cpu_seconds:8.1f} s  of CPU in all"


def stamped(texts: Iterable[str], begin: float) -> Iterator[Line]:
    """Yield every line when it comes, and print it with its seconds."""
    for text in texts:
        line = Line(monotonic() - begin, text.rstrip("\n"))
        print(f"{line.seconds:8.1f}  {line.text}", flush=True)
        yield line


def main(argv: Sequence[str]) -> int:
    """Clone, run and tell; return the exit status of the run."""
    if faults := [word for word in argv if "=" not in word]:
        print(f"{faults[0]}: give variables as NAME=VALUE\n\n{__doc__}", file=sys.stderr)
        return 2
    given = dict(word.split("=", 1) for word in argv)
    with tempfile.TemporaryDirectory(prefix="first-run-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        usual = {"VOCAB_PARALLEL": "1", "VOCAB_SIZE": "256k", "MEGATRON_CACHE": f"{folder}/cache"}
        environment = {**os.environ, **usual, **given}
        environment.pop("VENV", None)
        begin = monotonic()
        with subprocess.Popen(
            ["bash", "pretrain_gpt.sh"],
            cwd=clone,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as run:
            assert run.stdout is not None
            lines = list(stamped(run.stdout, begin))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        for line in summary(lines, monotonic() - begin, used.ru_utime + used.ru_stime):
            print(line)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
