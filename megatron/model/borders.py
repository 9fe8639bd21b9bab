"""The borders of a chunk's layers: where a count tells them from the rest of a stage."""

from torch import Tensor


class Borders:
    """Sees where the layers of a chunk begin and end. A model that trains does nothing there."""

    def begin(self, x_bsh: Tensor, used: object) -> Tensor:
        """Return the input of a chunk's layers.

        Args:
            x_bsh: the input.
            used: an object that all layers of the chunk use.
        """
        return x_bsh

    def end(self, x_bsh: Tensor) -> Tensor:
        """Return the output of a chunk's layers."""
        return x_bsh
