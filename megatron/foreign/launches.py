"""Finds the command that starts a training: its launcher, its ranks, its program and its flags."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Final

from megatron.flags.words import spelling
from megatron.foreign.values import HOLE, Holes, is_hole

_MODULES: Final = ("torch.distributed.launch", "torch.distributed.run", "deepspeed", "accelerate")
_TORCH: Final = ("torchrun", "torch.distributed.launch", "torch.distributed.run")
_LAUNCHERS: Final = (*_TORCH, "deepspeed", "accelerate", "srun", "mpirun", "mpiexec")
"""Launchers, the one that starts the processes of a machine first."""

_SIGNS: Final = frozenset(
    {
        *("--num-layers", "--hidden-size", "--seq-length", "--micro-batch-size", "--lr"),
        *("--global-batch-size", "--train-iters", "--train-samples", "--num-attention-heads"),
        *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--encoder-seq-length"),
    }
)
"""Flags of a training; two of them make a program a training."""

_OTHERS: Final = ("*bert*", "*t5*", "*vision*", "*ict*", "*vlm*", "*retro*", "*mamba*", "*hybrid*")
"""Programs of Megatron-LM that train no GPT."""

USUAL: Final = 8
"""Processes of a machine, if only the processes of all machines are told."""

SHELLS: Final = ("bash", "sh", "zsh", "dash")


@dataclass(frozen=True)
class Ranks:
    """The processes that a launcher starts.

    Attributes:
        machines: number of machines; ``None``: not known.
        per_machine: processes of a machine; ``None``: not known.
        machines_text: the number of machines as the script writes it; empty: not written.
        per_machine_text: the processes of a machine as the script writes them.
        total: all processes, if the command tells only their number.
    """

    machines: int | None
    per_machine: int | None
    machines_text: str = ""
    per_machine_text: str = ""
    total: int | None = None

    @property
    def world_size(self) -> int | None:
        """All processes; ``None``: not known."""
        if self.machines is None or self.per_machine is None:
            return self.total
        return self.machines * self.per_machine


@dataclass(frozen=True)
class Launch:
    """A training that a script starts.

    Attributes:
        line: number of the line; 0: the launch is that of a configuration.
        launcher: program that starts the processes; empty: there is none.
        ranks: the processes.
        program: the program, as the script writes it.
        words: the words behind the program, with holes.
        times: number of times that the script starts the training.
        notes: sentences on how this training was read.
        is_config: whether the line is that of a configuration in Python, and starts nothing.
    """

    line: int
    launcher: str
    ranks: Ranks
    program: str
    words: tuple[str, ...]
    times: int = 1
    notes: tuple[str, ...] = ()
    is_config: bool = False

    @property
    def trains_gpt(self) -> bool:
        """Whether the program's name is none that trains another kind of model."""
        name = PurePosixPath(self.program).name
        return not any(fnmatchcase(name, pattern) for pattern in _OTHERS)


def launch_of(
    words: Sequence[str], line: int, holes: Holes, directives: Mapping[str, str]
) -> Launch | None:
    """Return the training that a command starts; ``None``: it starts none.

    Args:
        words: words of the command.
        line: number of its line.
        holes: the holes in the words.
        directives: options of the script's #SBATCH lines.
    """
    place = _program_at(words, holes)
    if place is None:
        return None
    before, flags = list(words[:place]), list(words[place + 1 :])
    launcher = _launcher(before)
    given = {spelling(word.split("=")[0]) for word in flags if word.startswith("--")}
    if len(given & _SIGNS) < 2 and not _is_config_line(words[place], given):
        return None
    ranks = _ranks(before, launcher, holes, directives)
    return Launch(line, launcher, ranks, holes.shown(words[place]), tuple(flags))


def _is_config_line(program: str, given: set[str]) -> bool:
    """Return whether a line's model stands in a file that the line names."""
    configs = {"--job.config-file", "--yaml-cfg", "--config-path", "--config-file"}
    return bool(configs & given) and "train" in program


def _program_at(words: Sequence[str], holes: Holes) -> int | None:
    """Return the place of the program among the words of a command."""
    for place, word in enumerate(words):
        shown = holes.shown(word)
        if shown.endswith(".py") and not shown.startswith("-"):
            return place
        behind_m = place > 0 and words[place - 1] in ("-m", "--module")
        if behind_m and shown not in _MODULES:
            return place
    launchers = [place for place, word in enumerate(words) if _name(word) in _LAUNCHERS]
    if not launchers:
        return None
    last = launchers[-1]
    for place in range(last + 1, len(words)):  # a program whose name is not known
        behind = words[place + 1 : place + 2]
        is_value = words[place - 1].startswith("-") and "=" not in words[place - 1]
        if is_hole(words[place]) and behind and behind[0].startswith("--") and not is_value:
            return place
    return None


def _name(word: str) -> str:
    return PurePosixPath(word).name


def _launcher(before: Sequence[str]) -> str:
    names = {_name(word) for word in before}
    return next((name for name in _LAUNCHERS if name in names), "")


def _options(before: Sequence[str]) -> dict[str, str]:
    """Return the options before the program, each with the word behind it; the last counts."""
    found = {}
    for place, word in enumerate(before):
        if not word.startswith("-"):
            continue
        option, equals, value = word.partition("=")
        if glued := re.fullmatch(r"(-[Nn])(\d+)", option):
            option, equals, value = glued[1], "=", glued[2]
        if not equals:
            value = before[place + 1] if place + 1 < len(before) else ""
        found[option.lstrip("-").replace("_", "-") if option.startswith("--") else option] = value
    return found


_MACHINES: Final = {
    **dict.fromkeys(_TORCH, ("nnodes",)),
    "deepspeed": ("num-nodes",),
    "accelerate": ("num-machines",),
    "srun": ("nodes", "-N"),
}
_PROCESSES: Final = {
    **dict.fromkeys(_TORCH, ("nproc-per-node",)),
    "deepspeed": ("num-gpus",),
    "srun": ("ntasks-per-node",),
}
_ALL: Final = {
    "accelerate": ("num-processes",),
    "srun": ("ntasks", "-n"),
    "mpirun": ("-np", "-n", "-c"),
    "mpiexec": ("-np", "-n"),
}


def _ranks(
    before: Sequence[str], launcher: str, holes: Holes, directives: Mapping[str, str]
) -> Ranks:
    """Return the processes that a command starts."""
    options = _options(before)
    if launcher == "srun":
        options = {**directives, **options}
    if not launcher:
        return Ranks(1, 1)
    machines = _first(options, _MACHINES.get(launcher, ()))
    each = _first(options, _PROCESSES.get(launcher, ()))
    together = _first(options, _ALL.get(launcher, ()))
    ranks = Ranks(
        _number(machines, 1 if launcher != "deepspeed" or each else None),
        _number(each, 1 if launcher in _TORCH else None),
        holes.shown(machines),
        holes.shown(each),
    )
    total = _number(together, None)
    if ranks.per_machine is None and total is not None and ranks.machines:
        count = ranks.machines
        if not machines and total > USUAL and total % USUAL == 0:
            count = total // USUAL
        return replace(ranks, machines=count, per_machine=-(-total // count), total=total)
    if not each and together and total is None:
        return replace(ranks, per_machine_text=holes.shown(together))
    return ranks


def _first(options: Mapping[str, str], names: Sequence[str]) -> str:
    return next((options[name] for name in names if name in options), "")


def _number(text: str, otherwise: int | None) -> int | None:
    """Return the number of a word; ``otherwise`` for an empty one; ``None``: it is not known."""
    if not text:
        return otherwise
    is_number = not HOLE.search(text) and re.fullmatch(r"\d{1,6}", text) and int(text) > 0
    return int(text) if is_number else None


def directives_of(text: str) -> dict[str, str]:
    """Return the options of a script's #SBATCH lines, without their dashes."""
    found: dict[str, str] = {}
    for row in re.findall(r"^#SBATCH[ \t]+(.*)$", text, re.MULTILINE):
        words = row.split("#")[0].split()
        for option, value in _options(words).items():
            short = {"-N": "nodes", "-n": "ntasks"}.get(option, option)
            found[short] = value.split("-")[0] if short == "nodes" else value
    return found


def variables_of(directives: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Slurm sets for the options of #SBATCH lines."""
    gpus = directives.get("gpus-per-node") or directives.get("gres", "")
    per_node = gpus.split(":")[-1]
    known = {
        "SLURM_NNODES": directives.get("nodes", ""),
        "SLURM_JOB_NUM_NODES": directives.get("nodes", ""),
        "SLURM_NTASKS_PER_NODE": directives.get("ntasks-per-node", ""),
        "SLURM_NTASKS": directives.get("ntasks", ""),
        "SLURM_GPUS_PER_NODE": per_node,
        "SLURM_GPUS_ON_NODE": per_node,
    }
    nodes, each = known["SLURM_NNODES"], known["SLURM_NTASKS_PER_NODE"]
    if not known["SLURM_NTASKS"] and nodes.isdigit() and each.isdigit():
        known["SLURM_NTASKS"] = str(int(nodes) * int(each))
    return {name: value for name, value in known.items() if value.isdigit()}
