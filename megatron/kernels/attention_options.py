"""Everything that decides an attention besides its queries, keys and values.

Every kernel, and every way in which ranks share a sequence, hands the same ``AttentionOptions`` on.
A kernel names the properties that it computes. So a new property is one attribute here, or of
``Scores``, and its computation in the specification (``reference/scored_attention.py``): no
signature changes, and no quicker kernel takes an attention that has the new property.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Final

from torch import Tensor

from megatron.kernels.documents import Documents
from megatron.kernels.scores import PLAIN, Scores


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """How queries attend to keys, whatever their shapes.

    Attributes:
        scores: how products of queries and keys become scores.
        dropout: probability of dropping an attention weight, 0 outside training.
        documents: documents in samples of s positions or more; no document sees another document.
            ``None``: every position sees all earlier positions.
        sinks_a: a score of every query head, in any type, of a key that every position sees and
            that has no value (arXiv 2309.17453). So the weights of a head add up to less than 1.
            ``None``: there is no such key.
    """

    scores: Scores = PLAIN
    dropout: float = 0.0
    documents: Documents | None = None
    sinks_a: Tensor | None = None

    @cached_property
    def asked(self) -> frozenset[str]:
        """The properties that a kernel has to compute, by their attributes' names.

        Those of ``scores`` are among them. The scale is not: every kernel takes one.
        """
        own = {
            name
            for name, default in _DEFAULTS.items()
            if (value := getattr(self, name)) is not default and value != default
        }
        return self.scores.asked | own

    @property
    def are_plain(self) -> bool:
        """Whether attention is that of the Transformer's paper, its scale included."""
        return not self.asked and self.scores.scale is None

    def of_heads(self, first: int, count: int) -> "AttentionOptions":
        """Return the options of ``count`` query heads from ``first`` on."""
        sinks_a = None if self.sinks_a is None else self.sinks_a[first : first + count]
        return replace(self, scores=self.scores.of_heads(first, count), sinks_a=sinks_a)


_DEFAULTS: Final = {own.name: own.default for own in fields(AttentionOptions)[1:]}
"""The values, but that of ``scores``, which ask nothing of a kernel."""

PLAIN_ATTENTION: Final = AttentionOptions()
"""Causal attention as the Transformer's paper has it (arXiv 1706.03762)."""
