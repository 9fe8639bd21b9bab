"""Launchers other than torchrun: Slurm's srun and MPI, whose variables become torchrun's.

All other code reads torchrun's variables. If ``RANK`` or ``WORLD_SIZE`` is set, other launchers'
variables are ignored: torchrun within a Slurm job sets both.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final

PORTS: Final = range(20_000, 32_000)
"""A Slurm job takes one of these ports, by the job's number; Linux itself gives away higher
ports."""


@dataclass(frozen=True)
class Launcher:
    """Names of a launcher's variables.

    Attributes:
        name: name of the launcher.
        rank: variable with the number of a process in the job.
        size: variable with the number of processes of the job.
        local_rank: variable with the number of a process on its machine.
        local_size: variable with the number of processes on that machine.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


LAUNCHERS: Final = (
    # A shell of salloc or sbatch has SLURM_PROCID and SLURM_NTASKS too, but is no rank. Only a
    # process that srun has started has the number of tasks of a step.
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def adopt_launcher(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Set torchrun's variables from another launcher's, if that launcher has started this process.

    Args:
        environment: variables by name; an empty one counts as not set. Variables that are set stay.

    Returns:
        The launcher's name; ``None`` if torchrun, or no launcher, has started this process.
    """
    if environment.get("RANK") or environment.get("WORLD_SIZE"):
        return None
    for known in LAUNCHERS:
        if environment.get(known.rank) and environment.get(known.size):
            for name, value in _of_torchrun(known, environment).items():
                if value and not environment.get(name):
                    environment[name] = value
            return known.name
    return None


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this process on its machine, 0 if no launcher tells it.

    Some users set ``RANK`` and ``WORLD_SIZE`` themselves in a job of srun or MPI. Then another
    launcher's variable counts where ``LOCAL_RANK`` is missing.
    """
    names = ("LOCAL_RANK", *(known.local_rank for known in LAUNCHERS))
    found = next((value for name in names if (value := environment.get(name))), "0")
    return int(found) if found.isdecimal() else 0


def _of_torchrun(launcher: Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables; a value that is not known is empty."""
    size = environment[launcher.size]
    local_size = environment.get(launcher.local_size, "")
    found = {
        "RANK": environment[launcher.rank],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment.get(launcher.local_rank, ""),
        "LOCAL_WORLD_SIZE": local_size,
    }
    if launcher.name == "srun":
        node = environment.get("SLURM_NODEID", "0")
        found["LOCAL_WORLD_SIZE"] = _tasks_of_node(local_size, int(node or 0))
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
        found["MASTER_ADDR"] = first_node(nodes)
        job = environment.get("SLURM_JOB_ID", "")
        found["MASTER_PORT"] = str(PORTS[int(job) % len(PORTS)]) if job.isdecimal() else ""
    elif local_size == size:
        found |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    return found


def first_node(nodes: str) -> str:
    """Return the first name of Slurm's list of nodes, such as ``gpu[03-05,9],login1``."""
    first = re.match(r"(?P<name>[^,\[]*)(\[(?P<number>\d+)[^\]]*\])?(?P<rest>[^,\[]*)", nodes)
    assert first is not None, "every part may be empty"
    return first["name"] + (first["number"] or "") + first["rest"]


def _tasks_of_node(tasks: str, node: int) -> str:
    """Return a node's number of tasks from Slurm's list, such as ``8(x3),4``; empty if unknown."""
    for word in tasks.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if found is None:
            return ""
        node -= int(found[2] or 1)
        if node < 0:
            return found[1]
    return ""
