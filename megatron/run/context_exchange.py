"""The exchange of context-parallel ranks as a dimension that a plan chooses in."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from megatron.flags.groups import Flags
from megatron.parallel.context import CONTEXT_EXCHANGES
from megatron.parallel.context_settings import ContextRankSettings
from megatron.run.dimension import Auto, Dimension
from megatron.run.edit import Choice, set_to
from megatron.run.rules.context_ranks import CONTEXT_RULES

_FLAG: Final = "--cp-comm-type"


def _exchanges(flags: Flags) -> list[Choice]:
    """Return the exchanges that no rule about context-parallel ranks refuses."""
    own = flags[ContextRankSettings]
    asked = (replace(own, cp_comm_type=name) for name in CONTEXT_EXCHANGES)
    able = (one for one in asked if not any(_mistakes(flags.replaced(one))))
    return [(set_to(_FLAG, one.cp_comm_type),) for one in able]


def _mistakes(flags: Flags) -> Iterator[str]:
    return (mistake for rule in CONTEXT_RULES for mistake in rule(flags))


def _is_open(flags: Flags) -> bool:
    own = flags[ContextRankSettings]
    return own.cp_comm_type == "auto" and own.size > 1


EXCHANGE: Final = Dimension(
    "exchange of context ranks",
    "factor",
    (_FLAG,),
    _exchanges,
    closing=(_FLAG,),
    auto=Auto(f"{_FLAG} auto", _is_open),
)
"""The exchange of context-parallel ranks as a dimension that the plan chooses in."""
