"""How attention turns products of queries and keys into scores."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Final


@dataclass(frozen=True)
class Scores:
    """How a score follows from the product of a query at position i and a key at position j <= i.

    The product is scaled, capped, biased by the distance i - j and hidden outside of the window, in
    this order. No head depends on another head, so heads may be on different ranks.

    Attributes:
        scale: factor of the product; ``None``: 1 / sqrt(channels of a head).
        softcap: c of ``c tanh(score / c)`` (Gemma 2); 0: no cap.
        window: how many positions before its own a query sees; ``None``: all of them.
        slopes_a: for every query head the slope of ALiBi (arXiv 2108.12409): a score falls by the
            slope with every position between query and key; empty: no bias.
    """

    scale: float | None = None
    softcap: float = 0.0
    window: int | None = None
    slopes_a: tuple[float, ...] = ()

    @cached_property
    def asked(self) -> frozenset[str]:
        """The attributes, but the scale, that make scores something else than scaled products."""
        others = fields(self)[1:]
        return frozenset(own.name for own in others if getattr(self, own.name) != own.default)

    @property
    def are_products(self) -> bool:
        """Whether scores are scaled products only, without cap, window and ALiBi."""
        return not self.asked

    def of_heads(self, first: int, count: int) -> "Scores":
        """Return the form of the scores of ``count`` query heads from ``first`` on."""
        return replace(self, slopes_a=self.slopes_a[first : first + count])

    def scale_of(self, channels: int) -> float:
        """Return the scale for heads of ``channels`` channels."""
        return channels**-0.5 if self.scale is None else self.scale


PLAIN: Final = Scores()
"""Scores of causal attention as the Transformer's paper has it (arXiv 1706.03762)."""
