"""A made-up machine on which ``pretrain_gpt.sh`` says what it would start."""

import os
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ALLOCATOR = {"LD_PRELOAD", "MALLOC_CONF", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"}
"""Variables that choose and set up the ranks' allocator."""


class Line(NamedTuple):
    """The torchrun line in its parts."""

    environment: dict[str, str]
    torchrun: dict[str, str]
    training: dict[str, str]


class Machine:
    """A machine with some GPUs, cores and libraries, on which the script is run."""

    def __init__(
        self, folder: Path, gpus: int = 0, cores: int = 8, libraries: Iterable[str] = ()
    ) -> None:
        self.folder = folder
        listing = "\n".join(f"echo 'GPU {i}: NVIDIA H200 (UUID: GPU-{i})'" for i in range(gpus))
        self.stand_in("nvidia-smi", listing or "echo 'no devices were found'; exit 6")
        self.stand_in("nproc", f"echo {cores}")
        known = (f"echo '\t{name} (libc6,x86-64) => /lib/{name}'" for name in libraries)
        self.stand_in("ldconfig", "\n".join(known))

    def stand_in(self, name: str, script: str) -> None:
        """Have ``script`` run in place of a command of the machine."""
        file = self.folder / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def run(self, *flags: str, **variables: str | int) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "HOME": os.environ.get("HOME", "/"),
            "DRY_RUN": "1",
            **{name: str(value) for name, value in variables.items()},
        }
        command = ["bash", str(ROOT / "pretrain_gpt.sh"), *flags]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def line(self, *flags: str, **variables: str | int) -> Line:
        """Return the line that the script prints."""
        done = self.run(*flags, **variables)
        assert done.returncode == 0, done.stderr
        (printed,) = done.stdout.splitlines()
        words = shlex.split(printed)
        program = next(i for i, word in enumerate(words) if word.endswith("/torchrun"))
        script = words.index(str(ROOT / "pretrain_gpt.py"))
        assert words[0] == "env"
        return Line(
            dict(word.split("=", 1) for word in words[1:program]),
            _flags(words[program + 1 : script]),
            _flags(words[script + 1 :]),
        )

    def refusal(self, *flags: str, **variables: str | int) -> str:
        """Return the message with which the script refuses."""
        done = self.run(*flags, **variables)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        return done.stderr


def _flags(words: list[str]) -> dict[str, str]:
    """Return flag -> value, the last one where it stands twice, as the program reads them."""
    flags: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            flags[word] = "" if following.startswith("--") else following
    return flags
