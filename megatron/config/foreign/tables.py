"""The tables of answers: to flags that do not exist here, and to values that ours do not have."""

from typing import Final

from megatron.config.foreign.answer import Answers
from megatron.config.foreign.missing import FEATURES
from megatron.config.foreign.noted import noted
from megatron.config.foreign.read_as import read_as
from megatron.config.topics import DECLARED

ROWS: Final = (
    *read_as(),
    *noted(),
    *(row for feature in FEATURES for row in feature.noted),
    *(row for feature in FEATURES for row in feature.refused),
)
"""All answers, in their order: another name of ours before a note, a note before a refusal."""

_OURS: Final = DECLARED

OTHER_FLAGS: Final = Answers([row for row in ROWS if row[0] not in _OURS])
"""The answers to flags that do not exist here. Of several the first that fits counts."""

OTHER_VALUES: Final = Answers([row for row in ROWS if row[0] in _OURS and row[1].is_limited])
"""The answers to values that Megatron's flags have and ours of the same name do not."""

DECIDED: Final = {feature.name: feature.decides for feature in FEATURES if feature.decides}
"""By the name of what is missing: our flag whose value a flag that asks for it would decide."""
