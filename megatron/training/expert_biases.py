"""The biases by which experts are chosen, changed after every iteration (arXiv 2408.15664).

The bias of an expert grows if the expert has fewer tokens of the global batch than the mean, and
shrinks if it has more. Only the sign of the difference counts. No gradient reaches a bias.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.layers.experts.router import Router
from megatron.model.stage import RankModel


class ExpertBiases:
    """The biases of all layers of a rank.

    Args:
        model: this rank's part of the model.
    """

    def __init__(self, model: RankModel) -> None:
        self._routers = {
            index: part
            for index, layer in model.all_layers()
            for part in layer.modules()
            if isinstance(part, Router) and part.expert_bias is not None
        }
        self._before: dict[int, Tensor] = {}

    @torch.no_grad()
    def update(self, loads: Mapping[int, Tensor]) -> None:
        """Change the biases after an iteration.

        Args:
            loads: for the index of each layer of this rank, how often the global batch chose each
                of its experts, int64 [e].
        """
        self._before = {}
        for index, router in self._routers.items():
            bias_e, load_e = router.expert_bias, loads[index].double()
            assert bias_e is not None
            self._before[index] = bias_e.clone()
            signs_e = (load_e.mean() - load_e).sign().to(bias_e.dtype)
            bias_e.add_(signs_e, alpha=router.balance.moe_router_bias_update_rate)

    def undo(self) -> None:
        """Undo the last ``update``."""
        for index, before_e in self._before.items():
            bias_e = self._routers[index].expert_bias
            assert bias_e is not None
            bias_e.copy_(before_e)
