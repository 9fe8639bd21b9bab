"""Marks of cases."""

from functools import partial

import pytest

full = partial(pytest.param, marks=pytest.mark.full)
"""A case that a default run leaves out: others show the same property, or it takes long."""
