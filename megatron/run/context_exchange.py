"""The exchange of context-parallel ranks as a dimension that a plan chooses in."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from megatron.flags.groups import Flags
from megatron.parallel.context import CONTEXT_EXCHANGES
from megatron.parallel.context_settings import ContextRankSettings
from megatron.run.dimension import Dimension, NamedChoice
from megatron.run.edit import set_to
from megatron.run.rules.context_ranks import CONTEXT_RULES


def _exchanges(flags: Flags) -> list[NamedChoice]:
    """Return the exchanges that no rule about context-parallel ranks refuses."""
    own = flags[ContextRankSettings]
    asked = (replace(own, cp_comm_type=name) for name in CONTEXT_EXCHANGES)
    able = (one for one in asked if not any(_mistakes(flags.replaced(one))))
    return [NamedChoice((set_to("--cp-comm-type", one.cp_comm_type),)) for one in able]


def _mistakes(flags: Flags) -> Iterator[str]:
    return (mistake for rule in CONTEXT_RULES for mistake in rule(flags))


def _is_open(flags: Flags) -> bool:
    own = flags[ContextRankSettings]
    return own.cp_comm_type == "auto" and own.size > 1


EXCHANGE: Final = Dimension("--cp-comm-type auto", _is_open, _exchanges)
"""The exchange of context-parallel ranks as a dimension that the plan chooses in."""
