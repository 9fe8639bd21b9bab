"""The settings of context parallelism."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, TypeAlias

from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.ranges import RANKS
from megatron.flags.rules import refuses
from megatron.parallel.context import CONTEXT_EXCHANGES, ContextExchange, ExchangeFacts

NamedExchange: TypeAlias = Literal[ContextExchange, "auto"]
"""A ``ContextExchange``, or ``auto``, which takes one of them."""


@dataclass(frozen=True)
class ContextRankSettings:
    """Ranks that share every sequence."""

    # fmt: off
    context_parallel_size: int = flag(1,
        "Context-parallel ranks. They share every sequence.", RANKS)
    cp_comm_type: NamedExchange = flag("all_gather",
        "How attention sees the tokens of all context-parallel ranks. all_gather: it gathers keys "
        "and values. p2p: keys and values pass along a ring of the ranks while attention to those "
        "that are there is computed. a2a: ranks exchange heads for tokens, and each computes "
        "attention of some heads for all tokens. a2a+p2p: neighbours exchange heads, and keys and "
        "values pass along a ring of sets of neighbours. auto: the one with which the run is "
        "the fastest that fits the job's GPUs by prediction, or nearly as fast and holds less; "
        "a2a+p2p only where --hierarchical-context-parallel-sizes are given.",
        idle_without="--context-parallel-size > 1")
    hierarchical_context_parallel_sizes: tuple[int, ...] = flag((),
        "With --cp-comm-type a2a+p2p: number of neighbours that exchange heads, and number of such "
        "sets, which make a ring.", RANKS, metavar="HEADS RING",
        idle_without="--cp-comm-type a2a+p2p or --cp-comm-type auto")
    # fmt: on

    @property
    def size(self) -> int:
        """Context-parallel ranks c."""
        return self.context_parallel_size

    @property
    def exchange(self) -> ContextExchange:
        """How attention sees all tokens; of ``auto``, the exchange that no rule refuses."""
        return "all_gather" if self.cp_comm_type == "auto" else self.cp_comm_type

    @property
    def facts(self) -> ExchangeFacts:
        """The facts about the exchange."""
        return CONTEXT_EXCHANGES[self.exchange]

    @property
    def heads_size(self) -> int:
        """Neighbours that exchange heads, if sets of them form a ring; else 1."""
        in_levels = self.size > 1 and self.facts.in_levels
        return self.hierarchical_context_parallel_sizes[0] if in_levels else 1

    def resolved(self) -> "ContextRankSettings":
        """Return the settings of a run; a rank alone exchanges nothing."""
        if self.size == 1:
            return ContextRankSettings()
        levels = self.hierarchical_context_parallel_sizes if self.facts.in_levels else ()
        return replace(self, cp_comm_type=self.exchange, hierarchical_context_parallel_sizes=levels)


@refuses
def context_levels(flags: Flags) -> Iterator[str]:
    """Refuse neighbours and sets of them that do not make all ranks."""
    own = flags[ContextRankSettings]
    ranks, sizes = own.size, own.hierarchical_context_parallel_sizes
    may = own.cp_comm_type == "auto" and sizes
    in_levels = may or own.facts.in_levels
    if ranks == 1 or not in_levels:
        return
    if len(sizes) != 2 or prod(sizes) != ranks or min(sizes) == 1:
        given = " ".join(map(str, sizes)) if sizes else "unset"
        yield (
            f"--hierarchical-context-parallel-sizes {given} with --cp-comm-type "
            f"{own.cp_comm_type} and "
            f"--context-parallel-size {ranks}: give two numbers above 1 whose product is {ranks}, "
            "first the ranks that exchange heads; for a single level choose --cp-comm-type a2a or "
            "p2p"
        )
