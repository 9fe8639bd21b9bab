#!/usr/bin/env python3
"""Write docs/recipes.md: a card for every recipe of megatron/recipes.

python tools/recipe_cards.py [--keep FOLDER]

A card has the command, the layout, and what a dry run of the recipe predicts, beside the same job
without a split vocabulary and beside iterations that others published. Nothing is searched: the
head of a recipe has the question to ``plan-pretraining`` whose answer its layout is, and
``tools/recipes/others`` has other ways that these searches found, to compare.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.flags.command import read
    from megatron.flags.declare import flag
    from megatron.simulator.costs.gpus import GIB
    from tools.pages.tables import percent, table
    from tools.predictions.kept import kept
    from tools.recipes.forecast import RecipeForecast, forecast_of
    from tools.recipes.published import PublishedRow, published_rows
    from tools.recipes.recipe import PER_MACHINE, Recipe, other_of, recipes

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "recipes.md"

INTRODUCTION: Final = """# Recipes

A recipe is a [file of flags](running.md#flags-in-a-file) that ships with this project: a model, a
batch and a layout for some GPUs. `@NAME` on the command line stands for its flags, from any
folder, and a flag behind it replaces the same flag of the recipe. You add the learning rate, the
length, the data and the tokenizer:

    torchrun --nproc-per-node 8 pretrain_gpt.py @llama3-8b-128k.8xH100 --lr 3e-4 \\
      --train-iters 1000 --data-path my_text_document \\
      --tokenizer-type HuggingFaceTokenizer --tokenizer-model my-llama

On several machines, start the same line on each of them, with torchrun's `--nnodes`,
`--node-rank` and `--master-addr` ([clusters](clusters.md)). The files are in `megatron/recipes`.
A name without GPUs, such as `llama3-8b`, is the shape of a model alone. For other GPUs,

    plan-pretraining @llama3-8b --gpus 16xH100 --global-batch-tokens 1M --seq-length 8192

proposes a line (in a checkout: `python tools/plan.py`). Each recipe has a section of its own
below, its *card*. A card shows the `plan-pretraining` command that proposed the layout of the
recipe. Of all ways that take at most 1 % longer than the fastest, the command prefers ways without
gradients in bf16, without activations on the host and without [pairs](glossary.md#plans) of passes.
Of these ways it takes the one that holds the least memory ([how it
searches](running.md#which-line-for-my-gpus)). So another way on a card may be a little faster, and
hold more. Every recipe for GPUs also has the flags `--use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather`, which the command always proposes; the cards do not
repeat them.
<!-- figures: a rule of the code -->

**All times and memories of GPUs on this page are predicted.** `python tools/recipe_cards.py`
writes them with the cost model of the [dry run](dry-run.md), and runs no job. No job of several
GPUs has run this project's code. [How well it predicts](predictions.md) says how far predictions
were off for iterations of other programs. The MFU counts attention as if every token saw all
others ([metrics](metrics.md)). In very long samples attention is most of the FLOPs, so the MFU
there is high. Tensors can use 95 % of a GPU's memory, less the memory of NCCL's communicators; each
card says how much is left. Published iterations were measured by others, with other programs and
often another batch. A predicted speed beside a measured speed does not say which program is
faster. The [glossary](glossary.md) explains the letters t, p, c, d and e of a layout.
<!-- figures: a rule of the code -->
"""

PUBLISHED: Final = "<!-- figures: rows of docs/reference/published_2026.csv -->"
"""The mark of figures of others."""

MARK: Final = "<!-- run: python tools/recipe_cards.py -->"
"""The mark of figures that this tool writes (``tools/figures.py``)."""

ON_CPUS: Final = """\
It trains for 200 iterations of 4,096 tokens. In a run on two cores, beside other work, the loss
fell from 9.80 (mean of the first 10 iterations) to 4.33 (of the last 10), and the loss of the
evaluations from 4.99 at iteration 100 to 4.80 at iteration 200. Dry runs predict no time of a CPU.
<!-- from: LOG.md#2026-11-29-recipes -->
"""
"""A run of the recipe for CPUs."""

FREE: Final = (
    "--lr LR --train-iters N --data-path PREFIX --tokenizer-type TYPE --tokenizer-model FOLDER"
)


def page(keep: Path | None = None) -> str:
    """Return the whole page.

    Args:
        keep: folder of forecasts that were made before; ``None``: all are made.
    """
    cards = ["\n".join(card(recipe, keep)) for recipe in recipes()]
    return "\n".join([INTRODUCTION, *overview(keep), "", *cards]).rstrip("\n") + "\n"


def overview(keep: Path | None) -> Iterator[str]:
    """Yield a table of all recipes."""
    yield from table(
        ("recipe", "GPUs", "layout", "s an iteration", "tokens/s a GPU", "MFU", "GiB"),
        [_overview_cells(recipe, keep) for recipe in recipes()],
        "lllr",
    )
    yield ""
    yield MARK


def _overview_cells(recipe: Recipe, keep: Path | None) -> list[str]:
    link = f"[{recipe.name}](#{recipe.anchor})"
    if not recipe.is_predicted:
        return [link, recipe.place, "p 2", *["not predicted"] * 4]
    found = forecast(recipe, keep)
    return [link, recipe.place, found.layout, *_figures(found)]


def card(recipe: Recipe, keep: Path | None = None) -> Iterator[str]:
    """Yield the lines of a recipe's card, in Markdown."""
    yield f"## {recipe.name}"
    yield ""
    yield from wrap(recipe.about, 120, break_on_hyphens=False)
    yield ""
    if not recipe.is_predicted:
        yield f"    {recipe.command}"
        yield ""
        yield ON_CPUS
        return
    found = forecast(recipe, keep)
    yield f"    torchrun {_ranks(recipe)} pretrain_gpt.py @{recipe.name} \\"
    yield f"      {FREE}"
    yield ""
    yield f"**Layout.** {found.layout}, by the flags"
    yield ""
    yield from code(recipe.layout)
    yield ""
    yield "which are the answer to"
    yield ""
    yield f"    {recipe.question}"
    yield ""
    yield "Where the seconds of an iteration go, on average over the ranks:"
    yield ""
    parts = ((words, f"{own:.3f}", percent(own / found.seconds)) for words, own in found.spent)
    yield from table(("part", "s", "share"), parts)
    yield ""
    yield MARK
    yield ""
    yield from _compared(recipe, found, keep)
    yield from _published(recipe, found)
    yield f"To predict it: `{recipe.dry_run}`"
    yield ""


def code(flags: Sequence[str]) -> Iterator[str]:
    """Yield flags as indented lines that break between flags only."""
    joined = " ".join(flag.replace(" ", _JOINT) for flag in flags)
    for line in wrap(joined, 96, break_on_hyphens=False, break_long_words=False):
        yield f"    {line.replace(_JOINT, ' ')}"


_JOINT: Final = "\N{NO-BREAK SPACE}"
"""Stands for the space between a flag and its value while lines are broken."""


def _compared(recipe: Recipe, found: RecipeForecast, keep: Path | None) -> Iterator[str]:
    """Yield the table of the recipe beside the same job without a split vocabulary."""
    rows = [["this recipe", *_figures(found)]]
    if recipe.beside:
        changed = forecast(recipe, keep, *recipe.beside)
        rows.append([f"the same with `{' '.join(recipe.beside)}`", *_figures(changed)])
    if found.is_split:
        whole = forecast(recipe, keep, "--vocab-parallel", "none")
        rows.append(["the same with `--vocab-parallel none`", *_figures(whole)])
    other = other_of(recipe)
    if other is not None:
        best = forecast(other, keep)
        way = f"{other.about}: {best.layout}, {other.without(recipe)}"
        rows.append([way, *_figures(best)])
    head = ("", "s", "tokens/s a GPU", "MFU", "GiB of the fullest rank")
    yield f"Predicted; tensors can use {found.room / GIB:.1f} GiB of a GPU:"
    yield MARK
    yield ""
    yield from table(head, rows)
    yield ""
    yield MARK
    yield ""
    if not (found.is_split or other):
        yield "No way with a split vocabulary was among the best that the search found."
        yield ""


def _published(recipe: Recipe, found: RecipeForecast) -> Iterator[str]:
    """Yield the table of iterations that others measured; nothing if there are none."""
    rows = published_rows(recipe.name)
    if not rows:
        return
    yield "Measured by others, with their own programs, in bf16:"
    yield ""
    head = ("program", "GPUs, layout", "batch", "s", "tokens/s a GPU", "source")
    yield from table(head, map(_published_cells, rows), "lllrrl")
    yield ""
    yield PUBLISHED
    yield ""
    yield f"This recipe has {found.samples:,} samples of {found.seq_length:,} tokens an iteration."
    yield ""


def _published_cells(own: PublishedRow) -> list[str]:
    batch = f"{own.samples:,} x {own.seq_length:,}"
    where = f"{own.gpus} {own.gpu}, {own.layout}"
    return [own.origin, where, batch, f"{own.seconds:g}", f"{own.tokens:,.0f}", own.source]


def _figures(found: RecipeForecast) -> list[str]:
    """Return seconds, speed, MFU and memory of a forecast."""
    gpus = f"{found.tokens_per_gpu:,.0f}"
    memory = f"{found.peak / GIB:.1f}" + ("" if found.fits else ", does not fit")
    return [f"{found.seconds:.3f}", gpus, percent(found.mfu), memory]


def _ranks(recipe: Recipe) -> str:
    machines = recipe.gpus // PER_MACHINE
    nodes = "--standalone" if machines == 1 else f"--nnodes {machines}"
    more = "" if machines == 1 else " --node-rank I --master-addr HOST"
    return f"{nodes} --nproc-per-node {PER_MACHINE}{more}"


def forecast(recipe: Recipe, keep: Path | None, *words: str) -> RecipeForecast:
    """Return the forecast of a recipe with further flags, which replace flags of it."""
    name = " ".join([recipe.digest, recipe.name, *words])
    found: RecipeForecast = kept(keep, name, RecipeForecast, partial(forecast_of, recipe, words))
    return found


@dataclass(frozen=True)
class CardFlags:
    """The page."""

    keep: Path | None = flag(
        None,
        "Folder for forecasts: those that this code has made before are not made again.",
        metavar="FOLDER",
        unset="all are made",
    )


def main() -> None:
    """Write the page."""
    flags = read(None, __doc__, CardFlags)[CardFlags]
    PAGE.write_text(page(flags.keep), encoding="utf-8")


if __name__ == "__main__":
    main()
