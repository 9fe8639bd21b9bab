"""Which layers of a stage compute themselves again in the backward, and what that costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Recomputed:
    """What the layers of a stage compute again, counted alone.

    Attributes:
        core: of every layer, attention between its two projections.
        norms: of every layer, the two norms before its linear layers.
        mlp: of every layer, the MLP up to its last product.
        group: layers in a row that are computed again together, from the input of the first; 0: no
            whole layer is.
        most: groups of a stage at most; ``None``: as many as its layers make.
    """

    core: bool = False
    norms: bool = False
    mlp: bool = False
    group: int = 0
    most: int | None = None

    def groups(self, layers: int) -> int:
        """Return how many groups of a stage of so many layers are computed again."""
        if not self.group:
            return 0
        made = -(-layers // self.group)
        return made if self.most is None else min(made, self.most)

    def layers(self, layers: int) -> int:
        """Return how many of a stage's layers are computed again whole."""
        return min(layers, self.group * self.groups(layers))


NOTHING: Final = Recomputed()


@dataclass(frozen=True)
class Repeated:
    """Time that computing whole layers again takes on a stage: R, or a part of B.

    Attributes:
        which: the layers.
        layer: time of a layer's forward.
        spared: time at the end of a group that is not repeated, because the backward needs nothing
            of it.
        hidden: for every layer of the model, how much less its forward takes because of a window;
            empty: no layer has one.
    """

    which: Recomputed = NOTHING
    layer: float = 0.0
    spared: float = 0.0
    hidden: Sequence[float] = ()

    def time(self, layers: int, first: int = 0) -> float:
        """Return the time of a stage.

        Args:
            layers: of the stage.
            first: index of the first of them in the whole model.
        """
        whole = self.which.layers(layers)
        less = self.which.groups(layers) * self.spared + sum(self.hidden[first : first + whole])
        return whole * self.layer - less
