"""Recipes make runs, and docs/recipes.md has a current card for each."""

import re
from pathlib import Path

import pytest

from megatron.run.command_line import read
from megatron.run.flag_files import RECIPES, recipe_names
from tools.recipe_cards import INTRODUCTION, PAGE, card, page
from tools.recipes.forecast import run_of
from tools.recipes.published import ROWS, published_rows
from tools.recipes.recipe import LATER, OTHERS, Recipe, other_of, recipes

OURS = {recipe.name: recipe for recipe in recipes()}
QUICKEST = "llama3-8b-128k.8xH100"
EXPECTED = re.compile(
    r"@\S+ is read as \d+ flags of \S+"
    # A recipe may change the shape of its model.
    r"|--(vocab-size|rotary-base|max-position-embeddings) .* \(\S+, line \d+\) changes nothing: .*"
    # Of a job with one replica.
    r"|.* changes nothing: there is one replica of the model.*"
)


def card_on(text: str, name: str) -> str:
    """Return the lines of a recipe's card in a page, from its heading on."""
    _, heading, rest = text.partition(f"\n## {name}\n")
    return (heading + rest.partition("\n## ")[0]).strip("\n")


@pytest.mark.parametrize("name", OURS)
def test_a_recipe_makes_a_run_without_an_unexpected_note(name: str) -> None:
    recipe = OURS[name]
    if recipe.is_predicted:
        config = run_of(recipe)
        assert config.parallel.grid.world_size == recipe.gpus
        notes = config.notes
    else:
        found = read([f"@{name}", "--mock-data", "--vocab-size", "32000"], recipe.gpus)
        assert not found.mistakes
        notes = found.notes
    assert [note for note in notes if not EXPECTED.fullmatch(note)] == []


@pytest.mark.parametrize("name", sorted(path.stem for path in OTHERS.iterdir()))
def test_a_way_beside_a_recipe_is_for_the_same_job(name: str) -> None:
    recipe = OURS[name]
    other = other_of(recipe)
    assert other is not None
    one, two = run_of(recipe, recipe.beside), run_of(other)
    assert one.model == two.model
    assert one.train.global_batch_size == two.train.global_batch_size
    assert one.parallel.grid.world_size == two.parallel.grid.world_size
    assert other.about.endswith(("with a split vocabulary", "without a split vocabulary"))


def test_every_file_is_a_recipe_or_a_shape_that_a_recipe_names() -> None:
    shapes = set(recipe_names()) - OURS.keys()
    named = {
        line.removeprefix("@").removesuffix(".flags")
        for recipe in OURS.values()
        for line in recipe.path.read_text(encoding="utf-8").splitlines()
        if line.startswith("@")
    }
    assert shapes == named


def test_a_recipe_says_what_it_is_of() -> None:
    for recipe in OURS.values():
        assert recipe.about
        assert recipe.question.startswith("plan-pretraining @") or recipe.command


def test_published_rows_are_of_recipes_in_16_bits() -> None:
    assert ROWS.keys() <= OURS.keys()
    for name in ROWS:
        assert all(own.seconds > 0 and own.tokens > 0 for own in published_rows(name))


def test_a_recipe_has_as_many_gpus_as_its_name_says() -> None:
    recipe = Recipe(RECIPES / "llama3-70b.64xH100.flags")
    assert (recipe.gpus, recipe.gpu, recipe.replicas) == (64, "H100", 1)
    assert recipe.predicting[: len(LATER)] == list(LATER)


def test_flags_that_differ_are_named(tmp_path: Path) -> None:
    one, two = tmp_path / "a.8xH100.flags", tmp_path / "b.8xH100.flags"
    head = "# Flags of layout and plan\n"
    one.write_text(f"{head}--micro-batch-size 1\n--cpu-offload\n--bf16\n")
    two.write_text(f"{head}--micro-batch-size 2\n--bf16\n")
    assert Recipe(two).without(Recipe(one)) == "`--micro-batch-size 2`, no `--cpu-offload`"


def test_the_page_has_a_card_for_every_recipe() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(INTRODUCTION)
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == list(OURS)


@pytest.mark.parametrize("name", [QUICKEST, "gpt-27m.2xCPU"])
def test_the_quickest_cards_are_current(name: str) -> None:
    """Else: python tools/recipe_cards.py."""
    made = "\n".join(card(OURS[name])).strip("\n")
    assert made == card_on(PAGE.read_text(encoding="utf-8"), name)


@pytest.mark.full
def test_the_page_is_current() -> None:
    """Else: python tools/recipe_cards.py."""
    assert page() == PAGE.read_text(encoding="utf-8")
