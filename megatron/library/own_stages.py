"""Other people's layers as the stages of a rank, and embedding and head of any kind.

A schedule that splits the backward forms weight gradients in passes of their own, W. In the modules
here, W forms the weight gradients of the ``nn.Linear`` layers. In B such a layer only keeps its
input and output gradient, and W forms their product. All other gradients are formed in B, so that
every module gets right gradients. (PyTorch's own pipelines cut autograd's graph instead. They keep
the whole graph until W, and run functions with a backward of their own twice.)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatron.kernels.choose import kernels_for
from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.layers.linear import Linear
from megatron.layers.site import Site
from megatron.layers.vocabulary.input_layer import InputLayer
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.parallel.tensor import ALONE, TensorParallel
from megatron.runtime.not_finite import NonFiniteDetector
from megatron.runtime.stage_passes import StagePasses
from megatron.runtime.store import ActivationStore
from megatron.runtime.vocabulary_passes import VocabularyPasses
from megatron.schedules.plan import Plan


class WholeHead(Protocol):
    """A function that returns a microbatch's part of the loss, a scalar."""

    def __call__(self, x_bsh: Tensor, labels_bs: Tensor) -> Tensor:
        """Compute the part, from the last stage's output."""
        ...


class OwnStages(nn.Module):
    """The stages of a rank, made of any modules.

    Args:
        chunks: for every chunk of the rank a module, [b, s, h] -> [b, s, h].
        input_layer: this rank's rows of the embedding, if every rank has some.
        output_layer: this rank's rows of the output matrix, if every rank has some.
        split: let linear layers leave their weight gradients to a later pass, W.
    """

    tensor: TensorParallel = ALONE

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        input_layer: InputLayer | None = None,
        output_layer: OutputLayer | None = None,
        *,
        split: bool = False,
    ) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.input_layer, self.output_layer = input_layer, output_layer
        self._patched = list(_plain_linears(self.chunks)) if split else []
        self._twins = nn.ModuleList(map(_twin, self._patched))
        for linear, twin in zip(self._patched, self._twins, strict=True):
            linear.__dict__["forward"] = twin.forward

    ahead_layer = None
    mtp_num_layers = 0
    mtp_loss_scaling_factor = 1.0

    def begin(self, *, training: bool) -> None:
        """Begin an iteration of training or evaluation."""
        self.train(training)

    @property
    def gathering(self) -> list[Tensor]:
        """The parameters whose gradients passes add up in ``main_grad``, without repetitions."""
        weights = [linear.weight for linear in self._patched]
        vocabulary = (self.input_layer, self.output_layer)
        weights += [layer.weight for layer in vocabulary if layer is not None]
        return list({id(weight): weight for weight in weights if weight.requires_grad}.values())

    def forward(self, chunk: int, x_bsh: Tensor, forward_pass: ForwardPass = PLAIN_PASS) -> Tensor:
        """Run one stage, whose module sees to its own dropout.

        Raises:
            ValueError: if the output has another shape or dtype than the input.
        """
        assert forward_pass.documents is None, "a runner's microbatches have none"
        assert forward_pass.positions_bs is None, "a runner's microbatches have none"
        assert not forward_pass.left_out, "a runner's plan has no R"
        assert forward_pass.ahead_bwh is None, "a runner's stages predict one token"
        y_bsh: Tensor = self.chunks[chunk](x_bsh)
        if y_bsh.shape != x_bsh.shape or y_bsh.dtype != x_bsh.dtype:
            raise ValueError(
                f"chunk {chunk} makes {tuple(y_bsh.shape)} in {y_bsh.dtype} of "
                f"{tuple(x_bsh.shape)} in {x_bsh.dtype}: a stage's output must be like its input"
            )
        return y_bsh.contiguous()

    def close(self) -> None:
        """Let the linear layers compute all their gradients themselves again."""
        for linear in self._patched:
            linear.__dict__.pop("forward", None)
        self._patched, self._twins = [], nn.ModuleList()


def _plain_linears(module: nn.Module) -> Iterator[nn.Linear]:
    for part in module.modules():
        if not isinstance(part, nn.Linear) or type(part).forward is not nn.Linear.forward:
            continue
        if "weight" in part._parameters and part.weight.requires_grad:
            yield part


def _twin(linear: nn.Linear) -> Linear:
    """Return this project's layer over the same parameters, which can leave W for later."""
    weight = linear.weight
    kernels = kernels_for(weight.device, weight.dtype)
    site = Site(torch.device("meta"), weight.dtype, given_kernels=kernels)
    twin = Linear(linear.in_features, linear.out_features, site, bias=linear.bias is not None)
    twin.weight, twin.bias = weight, linear.bias
    return twin


class WholeVocabulary(VocabularyPasses):
    """Embedding and head of any kind, on the ranks of the first and the last stage.

    As with the project's own layers, the last stage's F forms the gradients of the head, and the
    first stage's B forms those of the embedding.

    ``embedding`` maps token ids [b, s] to [b, s, h]. The rank of the first stage needs the
    embedding, the rank of the last stage needs ``head``.
    """

    def __init__(
        self,
        model: OwnStages,
        plan: Plan,
        rank: int,
        store: ActivationStore,
        embedding: Callable[[Tensor], Tensor] | None,
        head: WholeHead | None,
    ) -> None:
        super().__init__(model, plan, rank, store, NonFiniteDetector())
        self._embedding, self._head = embedding, head

    def embed_whole(self, i: int) -> Tensor:
        """Return the embeddings [b, s, h] of a microbatch."""
        assert self._embedding is not None
        own = self._batch[i]
        with torch.set_grad_enabled(self._training):
            x_bsh = self._embedding(own.tokens_n.view(own.samples, -1))
        if x_bsh.requires_grad:
            self._store.put("embedding", i, get_gradient_edge(x_bsh))
        return x_bsh.detach().contiguous()

    def add_embedding_gradient(self, i: int, gradient_nh: Tensor) -> None:
        """Run the embedding's backward, if the embedding has gradients."""
        if not self._store.has("embedding", i):
            return
        edge = self._store.take("embedding", i)
        gradient_bsh = gradient_nh.view(self._batch[i].samples, -1, gradient_nh.shape[-1])
        torch.autograd.backward((edge,), (gradient_bsh,))

    def output_whole(self, i: int) -> None:
        """Compute the loss, and in training its gradients."""
        assert self._head is not None
        x_nh, own = self._store.take("x", i), self._batch[i]
        with torch.set_grad_enabled(self._training):
            x_bsh = x_nh.view(own.samples, -1, x_nh.shape[-1]).requires_grad_(self._training)
            loss = self._head(x_bsh, own.targets_n.view(own.samples, -1))
        self.losses[i] = loss.detach().view(1)
        if self._training:
            loss.backward()
            assert x_bsh.grad is not None, "the loss does not depend on the last stage's output"
            self._store.put("output_gradient", i, x_bsh.grad, self._stages - 1)

    def finish_output(self, i: int) -> None:
        """Do nothing: ``output_whole`` has formed all gradients."""


class OwnPasses(StagePasses):
    """The passes of a rank over ``OwnStages``.

    ``whole`` has embedding and head. It is ``None`` if the vocabulary is split.
    """

    def __init__(
        self,
        model: OwnStages,
        plan: Plan,
        rank: int,
        store: ActivationStore,
        whole: WholeVocabulary | None,
    ) -> None:
        super().__init__(model, plan, rank, store, seed=0)
        if whole is not None:
            self._vocabulary = whole
