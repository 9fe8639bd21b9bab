"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2), as in Megatron-Core.

Depth k = 1 ... D predicts the token k + 1 positions later. A depth takes the output of depth k - 1
(depth 1: the output of the model's final norm) and the embedding of the token k positions later,
joins both by a projection, and runs one more transformer layer. All depths share the model's output
layer: their outputs are further samples of its input, so schedules need not know of depths.

If ranks share sequences (context parallelism), the tokens that follow a chunk are on another rank.
The tokens that follow a slice of a microbatch are in the next slice. In both cases a rank reads the
embeddings of following tokens for every depth anew.

Shapes: b batch, u tokens of a sequence that a pass has on this rank, h hidden, w = u + D - 1, or
w = D u if these tokens are a part of every sequence.
"""

import torch
from torch import Tensor, nn

from megatron.layers.dropout import dropout
from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.layers.join import join_columns
from megatron.layers.linear import Linear
from megatron.layers.recompute import NO_RECOMPUTATION
from megatron.layers.site import Site
from megatron.model.build_layer import build_layer
from megatron.model.parts import rotation_of
from megatron.model.settings import ModelSettings


def width_ahead(tokens: int, depths: int, *, cut: bool) -> int:
    """Return w, the embeddings of following tokens that ``tokens`` of a sample read.

    Args:
        tokens: u.
        depths: D.
        cut: whether the tokens are a part of every sample, of which the rest is in other
            passes or on other context-parallel ranks.
    """
    return depths * tokens if cut else tokens + depths - 1


class MultiTokenPrediction(nn.Module):
    """The layers of all depths, which the last stage runs after the final norm.

    Args:
        config: the model; every depth has a layer like the model's last layer.
        site: device, dtype, ranks and kernels of the layers. If whole layers are recomputed and
            their groups have no limit (``Recomputation.most``), each depth is such a group; with a
            limit no depth is recomputed as a whole.
    """

    def __init__(self, config: ModelSettings, site: Site) -> None:
        super().__init__()
        self._config = config
        self._site = site
        again = site.recomputation
        self._recomputation = again if again.most is None else NO_RECOMPUTATION
        self.layers = nn.ModuleList(
            MTPLayer(config, site) for _ in range(config.further.mtp_num_layers)
        )
        rotation = rotation_of(config, config.num_layers - 1)
        self._rope = None if rotation is None else rotation.build(site)

    def forward(self, known_buh: Tensor, forward_pass: ForwardPass) -> Tensor:
        """Return the inputs of the output layer, [(1 + D) b, u, h], depth by depth.

        Args:
            known_buh: output of the final norm; it comes first in the result.
            forward_pass: the data of the pass. Its ``ahead_bwh`` has the word embeddings from this
                rank's second token on, or those of every depth. For dropout, depth k is the k-th
                layer after the model's last layer.
        """
        length, known = known_buh.shape[1], [known_buh]
        ahead_bwh = forward_pass.ahead_bwh
        assert ahead_bwh is not None, "further tokens are predicted from those that follow"
        step = (ahead_bwh.shape[1] - length) // max(1, len(self.layers) - 1)
        rope = self._rope
        if rope is not None and forward_pass.positions_bs is not None:
            rope = rope.at(forward_pass.positions_bs)
        for depth, layer in enumerate(self.layers):
            first = depth * step
            words_buh = ahead_bwh[:, first : first + length]
            index = self._config.num_layers + depth
            own_pass = forward_pass.of_layers.in_layer(index, rope)

            def run(
                layer: nn.Module,
                known_buh: Tensor,
                words_buh: Tensor = words_buh,
                own_pass: ForwardPass = own_pass,
            ) -> Tensor:
                result: Tensor = layer(known_buh, self._embedding(words_buh, own_pass), own_pass)
                return result

            known.append(self._recomputation.run([layer], run, known[-1]))
        return torch.cat(known)

    def _embedding(self, words_buh: Tensor, forward_pass: ForwardPass) -> Tensor:
        """Return embeddings with multiplier and dropout, as for the model's first layer."""
        config, seeds = self._config, forward_pass.seeds
        if config.vocabulary.embedding_multiplier != 1:
            words_buh = words_buh * config.vocabulary.embedding_multiplier
        return dropout(words_buh, config.block.hidden_dropout, seeds, "embedding", self._site)


class MTPLayer(nn.Module):
    """One depth, with the parameter names of Megatron's checkpoints.

    The arguments are those of ``MultiTokenPrediction``.
    """

    def __init__(self, config: ModelSettings, site: Site) -> None:
        super().__init__()
        h, last = config.hidden_size, config.num_layers - 1
        norm = config.norm
        self._site = site
        self.enorm = norm.build(h, site)
        self.hnorm = norm.build(h, site)
        self.eh_proj = Linear(2 * h, h, site, bias=False, parallel="columns")
        self.transformer_layer = build_layer(config, last, site)
        self.final_layernorm = norm.build(h, site, of_stream=True)

    def forward(
        self, known_buh: Tensor, words_buh: Tensor, forward_pass: ForwardPass = PLAIN_PASS
    ) -> Tensor:
        """Return the normed output of this depth, [b, u, h].

        Args:
            known_buh: output of the previous depth.
            words_buh: embeddings of the tokens that this depth adds.
            forward_pass: the data of the pass for this depth's layer.
        """
        both_buh = torch.cat((self.enorm(words_buh), self.hnorm(known_buh)), dim=-1)
        joined_buh = join_columns(self.eh_proj(both_buh), self._site.tensor)
        stream_buh = joined_buh.to(self._site.stream_dtype)
        result: Tensor = self.final_layernorm(self.transformer_layer(stream_buh, forward_pass))
        return result
