"""What the passes of a rank ask of its model, be it a ``RankModel`` or other people's layers."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.layers.vocabulary.input_layer import InputLayer
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.parallel.tensor import TensorParallel


class StageModel(Protocol):
    """The parts of a model on one rank."""

    @property
    def tensor(self) -> TensorParallel:
        """The ranks that share the layers."""
        ...

    @property
    def input_layer(self) -> InputLayer | None:
        """The rows of the embedding that are here, if any."""
        ...

    @property
    def output_layer(self) -> OutputLayer | None:
        """The rows of the output matrix that are here, if any."""
        ...

    @property
    def ahead_layer(self) -> InputLayer | None:
        """The embedding of the tokens that follow, where further tokens are predicted."""
        ...

    @property
    def mtp_num_layers(self) -> int:
        """Further tokens that every token predicts besides the next one, D."""
        ...

    @property
    def mtp_loss_scaling_factor(self) -> float:
        """Weight of the mean of their losses."""
        ...

    def __call__(
        self,
        chunk: int,
        x_bsh: Tensor,
        forward_pass: ForwardPass = PLAIN_PASS,
    ) -> Tensor:
        """Run one stage, as ``RankModel.forward`` does."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """Return all modules, as ``nn.Module`` does."""
        ...

    def begin(self, *, training: bool) -> None:
        """Begin an iteration of training or evaluation; weights may have other values now."""
        ...
