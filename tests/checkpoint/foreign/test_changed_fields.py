"""After a change of any field of ``config.json``, logits are those of ``transformers``, or told.

Both ways: an import computes what ``transformers`` computes, and so does the export of the import.
A refusal names the field. What is imported has flags with which training makes the same model.

Every field of every family is changed. The families that have a field share its values out, so that
every value is tried in some of them.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("transformers", reason="the reference: pip install transformers")

from checkpoint.foreign.changed_fields import LEFT_OUT, Change, Comparison, changes, part_of

from tools.conversions_table import CONFIGS

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours

CHANGES: Final = {family: changes(family) for family in CONFIGS}
FIELDS: Final = [(family, field) for family in CONFIGS for field in CHANGES[family]]

MOST: Final = 3
"""Values of a field that a family tries, if other families have the field and try the others."""
MOST_OF_ROTATIONS: Final = 12
"""The same of fields that hold all about rotary positions, which have 40 values and more."""

_YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LINEAR: Final = {"rope_type": "linear", "factor": 4.0, "mscale_all_dim": 0.7}
_DYNAMIC: Final = {"rope_type": "dynamic", "factor": 4.0, "mscale_all_dim": 0.7}

WRONG_ONCE: Final[list[tuple[str, str, Any]]] = [
    *(
        (family, "rope_parameters", rotation)
        for family in ("deepseek v2 lite", "deepseek v3")
        for rotation in (
            _YARN | {"mscale_all_dim": 0.7},
            _YARN | {"mscale_all_dim": 0.7, "mscale": 0},
            _YARN | {"mscale_all_dim": 0.7, "mscale": None},
            _LINEAR,
            _DYNAMIC,
        )
    ),
    ("deepseek v3", "routed_scaling_factor", LEFT_OUT),
    *(
        (family, "max_position_embeddings", 16)
        for family in CONFIGS
        if family not in ("gpt2", "opt", "bloom")  # learned positions, and no such field
    ),
    ("deepseek v3", "rope_interleave", None),
    ("deepseek v3", "original_max_position_embeddings", 32),
    ("llama 2", "rope_scaling", {"rope_type": "linear", "factor": 4.0}),
    ("mistral", "layer_types", ["full_attention"] * 3 + ["sliding_attention"]),
    ("gemma 3", "layer_types", ["full_attention"] * 7),
    ("gpt-oss", "rope_parameters", {"rope_type": "default"}),
]
"""Families, fields and values after which logits were wrong, or an export was refused."""


def tried(family: str, field: str) -> Sequence[Change]:
    """Return the changes of a field that are tried in a family."""
    found = CHANGES[family][field]
    having = [other for other in CONFIGS if field in CHANGES[other]]
    most = MOST_OF_ROTATIONS if field == "rope_parameters" else MOST
    return part_of(found, having.index(family), min(-(-len(found) // most), len(having)))


@cache
def comparison_of(family: str) -> Comparison:
    """One for all changes of a family: many make the same model, which is compared once."""
    return Comparison(family)


@pytest.mark.parametrize(("family", "field", "value"), WRONG_ONCE)
def test_values_that_were_wrong_once(family: str, field: str, value: Any, tmp_path: Path) -> None:
    assert comparison_of(family).fault_of(Change((field,), value), tmp_path) is None


@pytest.mark.one_in(70)
@pytest.mark.parametrize(("family", "field"), FIELDS)
def test_logits_are_right_or_the_field_is_named(family: str, field: str, tmp_path: Path) -> None:
    comparison, faults = comparison_of(family), {}
    for number, change in enumerate(tried(family, field)):
        folder = tmp_path / str(number)
        folder.mkdir()
        if fault := comparison.fault_of(change, folder):
            faults[str(change)] = fault
    assert not faults


def test_values_that_are_not_tried_in_a_family_are_tried_in_another() -> None:
    """Of the fields that hold the same values in every family."""
    for field in ("rope_parameters", "scoring_func", "sliding_window_pattern", "clip_qkv"):
        having = [family for family in CONFIGS if field in CHANGES[family]]
        everywhere = set.intersection(*({*map(str, CHANGES[own][field])} for own in having))
        found = {str(change) for own in having for change in tried(own, field)}
        assert everywhere
        assert everywhere <= found
