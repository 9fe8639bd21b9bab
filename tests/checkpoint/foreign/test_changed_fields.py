"""After a change of any field of ``config.json``, logits are those of ``transformers``, or told.

Both ways: an import computes what ``transformers`` computes, and so does the export of the import.
A refusal names the field. What is imported has flags with which training makes the same model.

Every field of every family is changed. A change to a value that several families have is tried in
some of them; one that a single family has is tried there.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("transformers", reason="the reference: pip install transformers")

from checkpoint.foreign.changed_fields import LEFT_OUT, Change, Comparison, changes

from tools.conversions_table import CONFIGS

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours

CHANGES: Final = {family: changes(family) for family in CONFIGS}
FIELDS: Final = [(family, field) for family in CONFIGS for field in CHANGES[family]]

MOST: Final = 3
"""About as many values of a field are tried in a family, if other families have the others too."""
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


@cache
def families_of(field: str) -> Mapping[str, Sequence[str]]:
    """Return every change of a field, as text, with the families that have this very change."""
    found = defaultdict[str, list[str]](list)
    for family in CONFIGS:
        for change in CHANGES[family].get(field, ()):
            found[str(change)].append(family)
    return found


def tried(family: str, field: str) -> Sequence[Change]:
    """Return the changes of a field that are tried in a family."""
    having, most = families_of(field), MOST_OF_ROTATIONS if field == "rope_parameters" else MOST
    longest = max(len(own.get(field, ())) for own in CHANGES.values())
    turns = {change: at for at, change in enumerate(having)}

    def is_tried(change: str) -> bool:
        parts = min(-(-longest // most), len(having[change]))
        return (having[change].index(family) - turns[change]) % parts == 0

    return [own for own in CHANGES[family][field] if is_tried(str(own))]


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


@pytest.mark.parametrize("field", {field: None for _, field in FIELDS})
def test_every_value_of_a_field_is_tried_in_some_family(field: str) -> None:
    having = [family for family in CONFIGS if field in CHANGES[family]]
    of_all = {str(own) for family in having for own in CHANGES[family][field]}
    assert {str(own) for family in having for own in tried(family, field)} == of_all
