"""The recipes as data: the names, heads and flags of their files."""

import hashlib
import itertools
import math
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

from megatron.flags.words import as_written
from megatron.run.flag_files import RECIPES, SUFFIX, read_flag_files

OTHERS: Final = Path(__file__).with_name("others")
"""The folder of other ways that searches found, each with the name of its recipe."""

PER_MACHINE: Final = 8
"""GPUs of a machine with the GPUs of the recipes."""

LATER: Final = ("--lr", "1", "--train-iters", "1")
"""Flags that a user adds to a recipe. Their values do not change the result of a dry run."""

_NAME: Final = re.compile(r"(?P<model>.+)\.(?P<count>\d+)x(?P<kind>\w+)")
_LAYOUT: Final = "# Flags of layout and plan"
_BESIDE: Final = "# Beside: "
_QUESTION: Final = "# Layout and plan: "
_USUAL: Final = (
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--tensor-model-parallel-size 1", "--context-parallel-size 1"),
)
_START: Final = "# Start: "
_ENDS: Final = (_QUESTION, _START, "@", "--")
"""Beginnings of the lines behind the sentences at its head."""


class Recipe:
    """A recipe.

    Args:
        path: its file, named MODEL.NxGPU.flags.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name.removesuffix(SUFFIX)
        found = _NAME.fullmatch(self.name)
        assert found is not None, f"{path}: a recipe is named MODEL.NxGPU{SUFFIX}"
        self.gpus, self.gpu = int(found["count"]), found["kind"]

    @property
    def is_predicted(self) -> bool:
        """Whether the recipe is for GPUs; no dry run knows the rates of a CPU."""
        return self.gpu != "CPU"

    @property
    def place(self) -> str:
        """Its GPUs, or its cores, in words."""
        return f"{self.gpus:,} {self.gpu}" if self.is_predicted else f"{self.gpus} cores"

    @property
    def anchor(self) -> str:
        """The anchor of its card's heading."""
        return re.sub(r"[^\w -]", "", self.name.lower())

    @cached_property
    def _lines(self) -> Sequence[str]:
        return self.path.read_text(encoding="utf-8").splitlines()

    @property
    def about(self) -> str:
        """The sentences at its head."""
        found = itertools.takewhile(lambda line: not line.startswith(_ENDS), self._lines)
        return " ".join(line.removeprefix("# ") for line in found)

    def _told(self, begin: str) -> str:
        """Return the rest of the line that begins so; empty: there is none."""
        found = (line for line in self._lines if line.startswith(begin))
        return next(found, begin).removeprefix(begin)

    @property
    def question(self) -> str:
        """The question whose answer its layout is, as a command."""
        return self._told(_QUESTION)

    @property
    def command(self) -> str:
        """The command that starts the recipe, if the recipe needs no GPU."""
        return self._told(_START)

    @property
    def beside(self) -> list[str]:
        """Flags of a second forecast of the recipe, to compare; empty: there is one forecast."""
        return self._told(_BESIDE).split()

    @property
    def layout(self) -> list[str]:
        """The flags of the layout and the plan that not every layout has."""
        flags = self._lines[self._lines.index(_LAYOUT) + 1 :]
        return [line for line in flags if line and not line.startswith(_USUAL)]

    def without(self, other: "Recipe") -> str:
        """Return the layout as flags that differ from the flags of another recipe."""
        own = [line for line in self.layout if line not in other.layout]
        options = {line.split()[0] for line in self.layout}
        lost = [line for line in other.layout if line.split()[0] not in options]
        return ", ".join([*(f"`{line}`" for line in own), *(f"no `{line}`" for line in lost)])

    @property
    def replicas(self) -> int:
        """Replicas of the model on its GPUs."""
        given = {own.option: own.values for own in read_flag_files([f"@{self.path}"]).flags}
        kinds = ("tensor-model-parallel", "context-parallel", "pipeline-model-parallel")
        options = (f"--{kind}-size" for kind in kinds)
        return self.gpus // math.prod(int(given.get(option, ("1",))[0]) for option in options)

    @property
    def digest(self) -> str:
        """A digest of the recipe's flags, with the flags of all files that the recipe names."""
        words = read_flag_files([f"@{self.path}"]).words
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]

    @property
    def predicting(self) -> list[str]:
        """The flags of its dry run, beside the recipe."""
        flags = {
            "--dry-run": "",
            "--dry-run-gpu": self.gpu,
            "--dry-run-replicas": str(self.replicas),
            "--ranks-per-node": str(PER_MACHINE),
        }
        words = (word for own in flags.items() for word in own)
        return [*LATER, *filter(None, words)]

    @property
    def dry_run(self) -> str:
        """The command of its dry run."""
        return as_written(f"python pretrain_gpt.py @{self.name}", self.predicting)


def recipes() -> list[Recipe]:
    """Return all recipes, the smallest number of ranks first; shapes of models are none."""
    files = [path for path in RECIPES.glob(f"*{SUFFIX}") if _is_recipe(path)]
    return sorted(map(Recipe, files), key=lambda own: (own.gpus, own.name))


def other_of(recipe: Recipe) -> Recipe | None:
    """Return another way for the job of a recipe, whose ``about`` says which; ``None``: unknown."""
    path = OTHERS / recipe.path.name
    return Recipe(path) if path.is_file() else None


def _is_recipe(path: Path) -> bool:
    return _NAME.fullmatch(path.name.removesuffix(SUFFIX)) is not None
