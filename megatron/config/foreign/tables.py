"""The tables of answers: to flags that do not exist here, and to values that ours do not have."""

from typing import Final

from megatron.config.declare import all_declarations
from megatron.config.flags import Flags
from megatron.config.foreign.answer import Answers
from megatron.config.foreign.missing import FEATURES
from megatron.config.foreign.noted import noted
from megatron.config.foreign.read_as import read_as

_ROWS: Final = (
    *read_as(),
    *noted(),
    *(row for feature in FEATURES for row in feature.noted),
    *(row for feature in FEATURES for row in feature.refused),
)
_OURS: Final = all_declarations(Flags)

OTHER_FLAGS: Final = Answers([row for row in _ROWS if row[0] not in _OURS])
"""The answers to flags that do not exist here. Of several for one flag the first that fits counts:
another name of ours before a note, and a note before a refusal."""

OTHER_VALUES: Final = Answers([row for row in _ROWS if row[0] in _OURS])
"""The answers to values that Megatron's flags have and ours of the same name do not."""
