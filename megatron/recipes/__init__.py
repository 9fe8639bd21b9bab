"""Recipes: flag files of models, each with a layout for given GPUs (docs/recipes.md)."""
