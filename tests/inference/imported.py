"""Checkpoints of small random models of ``transformers``, opened by the ranks of a test."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron.commands.convert_checkpoint import main as convert
from megatron.inference.generate import answers, generate
from megatron.inference.model import InferenceModel
from megatron.inference.sampling import Sampling
from megatron.inference.score import score
from megatron.parallel.grid import Grid
from megatron.parallel.groups import make_groups

NEW, END = 12, 2
"""Tokens of an answer, and the one that ends it."""
PROMPTS = [[5, 17, 33, 8, 90, 41, 3, 64, 12], [7], [23, 23, 50, 61]]
TEXT = [(11 * i * i + 5 * i) % 97 for i in range(45)]
PATIENCE = timedelta(seconds=60)


def imported(theirs: Any, folder: Path) -> Path:
    """Import a model of ``transformers``; return the folder of its one checkpoint."""
    theirs.save_pretrained(folder / "theirs")
    convert(["import", str(folder / "theirs"), str(folder / "ours")])
    return folder / "ours" / "iter_0000000"


def opened(where: Path, ranks: int = 1, longest: int = 60) -> InferenceModel:
    """This rank's part of a model in fp32."""
    groups = make_groups(Grid(pipeline_size=ranks), torch.device("cpu"), PATIENCE, (0, 0))
    return InferenceModel(where, groups, torch.float32, longest)


def our_answers(
    where: Path, prompts: Sequence[Sequence[int]], how: Sampling, ranks: int = 1, **options: Any
) -> list[list[int]]:
    """What our model answers to a batch."""
    model = opened(where, ranks)
    return answers(generate(model, prompts, how, NEW, end=END, **options), len(prompts))


def answers_on_rank(rank: int, world_size: int, *, where: Path, how: Sampling) -> list[list[int]]:
    """The answers that one of several ranks knows."""
    return our_answers(where, PROMPTS, how, world_size)


def scored_on_rank(rank: int, world_size: int, *, where: Path) -> tuple[list[float], list[bool]]:
    """What one of several ranks knows of a text."""
    found = score(opened(where, world_size), TEXT, 30)
    return found.log_probabilities, found.likeliest
