"""The interface of a model that the passes of a rank can run, such as ``RankModel``."""

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
        """This rank's rows of the embedding, if it has any."""
        ...

    @property
    def output_layer(self) -> OutputLayer | None:
        """This rank's rows of the output matrix, if it has any."""
        ...

    @property
    def ahead_layer(self) -> InputLayer | None:
        """The embedding of the following tokens, for multi-token prediction."""
        ...

    @property
    def mtp_num_layers(self) -> int:
        """Further tokens that every token predicts besides the next one, D."""
        ...

    @property
    def mtp_loss_scaling_factor(self) -> float:
        """Weight of the mean of the further tokens' losses."""
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
