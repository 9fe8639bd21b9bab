"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2), as Megatron-Core has it.

Depth k = 1 ... D predicts the token k + 1 positions on. It joins what depth k - 1 knows of a
position, for depth 1 the output of the model's final norm, with the embedding of the token k
positions on, and runs one more transformer layer. All depths share the model's output layer: their
outputs are further samples of its input, so no pass and no schedule knows of depths.

Shapes: b batch, u tokens of a sequence that this rank has, w those tokens and D - 1 more, h hidden.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.kernels.face import Kernels
from megatron.layers.dropout import DropoutSeeds, dropout
from megatron.layers.join import join_columns
from megatron.layers.linear import Linear
from megatron.layers.recompute import NO_RECOMPUTATION, Recomputation, prepare
from megatron.layers.rope import RotaryEmbedding
from megatron.model.build_layer import build_layer
from megatron.model.config import ModelConfig
from megatron.model.layer_spec import layer_spec
from megatron.parallel.tensor import ALONE, TensorParallel

Seeds = Callable[[int], DropoutSeeds | None]
"""From the index of a layer to the seeds of its dropout."""


class MultiTokenPrediction(nn.Module):
    """The layers of all depths, which the last stage runs behind the final norm.

    Args:
        config: the model; its layers are of the kind of its last one.
        device: where the parameters live.
        dtype: type of the parameters and of the activations.
        kernels: of that device and type.
        tensor: the ranks that share the layers.
        recomputation: what the backward computes again. If it is whole layers, by groups without a
            limit, a depth is such a group; with a limit it belongs to none.
        stream_kernels: for the norms of the residual stream; ``None``: the same.
        stream_dtype: of the residual stream; ``None``: as activations.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
        tensor: TensorParallel = ALONE,
        recomputation: Recomputation = NO_RECOMPUTATION,
        stream_kernels: Kernels | None = None,
        stream_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._config = config
        self._tensor = tensor
        self._recomputation = recomputation if recomputation.most is None else NO_RECOMPUTATION
        self.layers = nn.ModuleList(
            MTPLayer(config, device, dtype, kernels, tensor, stream_kernels, stream_dtype)
            for _ in range(config.mtp_num_layers)
        )
        prepare(self.layers, recomputation)
        rotation = layer_spec(config, config.num_layers - 1).rotation
        self._rope = None if rotation is None else rotation.build(device, dtype, kernels)

    def forward(self, known_buh: Tensor, ahead_bwh: Tensor, seeds: Seeds) -> Tensor:
        """Return the inputs of the output layer, [(1 + D) b, u, h], depth by depth.

        Args:
            known_buh: output of the final norm, which comes first.
            ahead_bwh: word embeddings of the tokens that follow this rank's tokens, beginning with
                the second token of them.
            seeds: of dropout; depth k is the k-th layer after the model's last one.
        """
        length, known = known_buh.shape[1], [known_buh]
        for depth, layer in enumerate(self.layers):
            words_buh = ahead_bwh[:, depth : depth + length]
            own_seeds = seeds(self._config.num_layers + depth)

            def run(
                layer: nn.Module,
                known_buh: Tensor,
                words_buh: Tensor = words_buh,
                own_seeds: DropoutSeeds | None = own_seeds,
            ) -> Tensor:
                words_buh = self._embedding(words_buh, own_seeds)
                result: Tensor = layer(known_buh, words_buh, self._rope, own_seeds)
                return result

            known.append(self._recomputation.run([layer], run, known[-1]))
        return torch.cat(known)

    def _embedding(self, words_buh: Tensor, seeds: DropoutSeeds | None) -> Tensor:
        """Return what a depth reads of embeddings, as the first layer of the model does."""
        if self._config.embedding_multiplier != 1:
            words_buh = words_buh * self._config.embedding_multiplier
        return dropout(words_buh, self._config.hidden_dropout, seeds, "embedding", self._tensor)


class MTPLayer(nn.Module):
    """One depth, with the parameter names of Megatron's checkpoints.

    Args: as those of ``MultiTokenPrediction``.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
        tensor: TensorParallel = ALONE,
        stream_kernels: Kernels | None = None,
        stream_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        h, last = config.hidden_size, config.num_layers - 1
        norm = layer_spec(config, last).norm
        self._tensor = tensor
        self._stream_dtype = stream_dtype or dtype
        self.enorm = norm.build(h, device, dtype, kernels)
        self.hnorm = norm.build(h, device, dtype, kernels)
        self.eh_proj = Linear(
            2 * h, h, bias=False, device=device, dtype=dtype, kernels=kernels, columns=tensor
        )
        self.transformer_layer = build_layer(
            config, last, device, dtype, kernels, tensor, stream_kernels
        )
        self.final_layernorm = norm.build(h, device, dtype, stream_kernels or kernels)

    def forward(
        self,
        known_buh: Tensor,
        words_buh: Tensor,
        rope: RotaryEmbedding | None = None,
        seeds: DropoutSeeds | None = None,
    ) -> Tensor:
        """Return what this depth knows of every position, normalised, [b, u, h].

        Args:
            known_buh: what the depth before knows.
            words_buh: embeddings of the tokens to take in.
            rope: rotation of the layer.
            seeds: of dropout; ``None``: nothing is dropped.
        """
        both_buh = torch.cat((self.enorm(words_buh), self.hnorm(known_buh)), dim=-1)
        joined_buh = join_columns(self.eh_proj(both_buh), self._tensor).to(self._stream_dtype)
        result: Tensor = self.final_layernorm(self.transformer_layer(joined_buh, rope, seeds))
        return result
