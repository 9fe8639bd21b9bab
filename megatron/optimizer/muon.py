"""Muon: orthogonalized momentum as the update, for all matrices but those of the vocabulary.

An update has the singular vectors of the running mean of gradients, and singular values near 1
(``newton_schulz``). An update therefore needs the whole matrix. Tensor-parallel ranks gather the
matrices that they share (``whole_matrices``), or each keeps its slice (``sliced_matrices``). With a
sharded optimizer each replica has whole matrices (``bucket_layouts``). As in Megatron, the fused
matrix of queries, keys and values counts as three matrices, and the fused matrix of SwiGLU's gate
and up projections counts as one. The matrices of experts lie one below the other in one parameter,
and each counts by itself.

Sources: https://kellerjordan.github.io/posts/muon, arXiv 2502.16982 (lengths of updates).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from megatron.kernels.reference.optimizer import divide
from megatron.model.settings import ModelSettings
from megatron.optimizer.mixed_precision import Master, Step
from megatron.optimizer.newton_schulz import coefficients, orthogonalized
from megatron.optimizer.settings import MuonSettings, ScaleMode
from megatron.optimizer.sliced_matrices import cut_dimension, orthogonalized_slice
from megatron.optimizer.whole_matrices import WholeMatrices
from megatron.parallel.groups import ConnectedAxis

FUSED_QKV: Final = "self_attention.linear_qkv.weight"
"""End of the name of the fused matrix of queries, keys and values."""

_ELEMENTS_AT_ONCE: Final = 1 << 26
"""Of matrices of experts that are multiplied together: enough to fill a GPU, and 0.8 GB for the
largest matrices that the iteration holds at a time."""


@dataclass(frozen=True)
class QKVRows:
    """Rows of one query group in the fused matrix, which has all groups one after the other.

    Attributes:
        query: rows of the group's query heads.
        key: rows of the group's key head.
        value: rows of the group's value head.
    """

    query: int
    key: int
    value: int

    @property
    def split(self) -> tuple[int, int, int]:
        """The three numbers in their order."""
        return self.query, self.key, self.value


def qkv_rows(model: ModelSettings) -> QKVRows:
    """Return how queries, keys and values lie in the fused matrix of a layer."""
    attention = model.attention
    heads = attention.num_attention_heads // attention.num_query_groups
    return QKVRows(heads * attention.kv_channels, attention.kv_channels, attention.kv_channels)


class Muon:
    """Muon for some matrices; a ``Rule`` that keeps their mean gradient, ``momentum_buffer``.

    Args:
        masters: matrices, or this rank's parts of them.
        config: settings.
        qkv: how queries, keys and values lie in the fused matrices.
        tensor: the ranks that share the matrices; all call ``step`` together.
    """

    rounds = False

    def __init__(
        self,
        masters: Sequence[Master],
        config: MuonSettings,
        qkv: QKVRows,
        tensor: ConnectedAxis,
    ) -> None:
        gathers = config.muon_tp_mode == "duplicated"
        parts = [master.part for master in masters]
        self._whole = WholeMatrices(parts, tensor) if gathers else None
        slices = config.muon_tp_mode == "distributed"
        self._cut = {part.name: cut_dimension(part) for part in parts} if slices else {}
        self._tensor = tensor
        self._masters = masters
        self._gradients = [master.gradient for master in masters]
        self._config = config
        self._qkv = qkv
        self._steps = coefficients(config.muon_coefficient_type, config.muon_num_ns_steps)
        self.kept = {
            master.name: {"momentum_buffer": torch.zeros_like(master.weight)} for master in masters
        }

    def step(self, step: Step) -> None:
        """As in ``Rule``."""
        rates = step.rates
        divide(self._gradients, step.divisors)
        for master in self._masters:
            decay = rates.weight_decay if master.decays else 0.0
            # Decoupled decay is of the old weight (arXiv 1711.05101), so it precedes the update.
            master.weight.mul_(1.0 - rates.lr * decay)
            master.weight.sub_(self._update(master), alpha=rates.lr)

    def _update(self, master: Master) -> Tensor:
        """Add the gradient to the mean, and return the update."""
        config, momentum = self._config, self.kept[master.name]["momentum_buffer"]
        momentum.lerp_(master.gradient, 1.0 - config.muon_momentum)
        direction = momentum
        if config.muon_nesterov:
            # Nesterov: the mean that would follow if the same gradient came once more.
            direction = master.gradient.lerp(momentum, config.muon_momentum)
        # The mean is linear, so ranks keep it for their parts. Orthogonalizing is not: it comes
        # after the gathering.
        if self._whole is None:
            return self._orthogonal(master, direction)
        whole = self._orthogonal(master, self._whole.gathered(master.part, direction))
        return self._whole.own_part(master.part, whole)

    def _orthogonal(self, master: Master, direction: Tensor) -> Tensor:
        """Return the update of a matrix, of this rank's slice of it, or of matrices of experts."""
        cut = self._cut.get(master.name)
        if (matrices := master.owned.matrices) > 1:
            by_expert = direction.unflatten(0, (matrices, -1))
            some = by_expert.split(max(1, _ELEMENTS_AT_ONCE // by_expert[0].numel()))
            return torch.cat([self._scaled(each, cut) for each in some]).flatten(0, 1)
        if not self._config.muon_split_qkv or not master.name.endswith(FUSED_QKV):
            return self._scaled(direction, cut)
        # Every rank has whole groups, so queries, keys and values are cut as the fused matrix is.
        rows, columns = self._qkv.split, direction.shape[1]
        by_group = direction.view(-1, sum(rows), columns).split(rows, dim=1)
        updates = [self._scaled(own.reshape(-1, columns), cut).view_as(own) for own in by_group]
        return torch.cat(updates, dim=1).view_as(direction)

    def _scaled(self, matrix: Tensor, cut: int | None) -> Tensor:
        """Return the orthogonal matrix near ``matrix``, times the length for its shape.

        Args:
            matrix: [m, n], or several matrices [e, m, n]; or this rank's slices of them.
            cut: the dimension along which tensor-parallel ranks have slices, 0 for m and 1 for n;
                ``None``: ``matrix`` is whole, or is taken for a matrix of its own.
        """
        config, size = self._config, [matrix.shape[-2], matrix.shape[-1]]
        precision = config.muon_fp32_matmul_prec
        if cut is None:
            found = orthogonalized(matrix, self._steps, precision)
        else:
            size[cut] *= self._tensor.size
            found = orthogonalized_slice(matrix, cut, self._tensor, self._steps, precision)
        length = update_length(size[0], size[1], config.muon_scale_mode)
        return found * (config.muon_extra_scale_factor * length)


def update_length(rows: int, columns: int, mode: ScaleMode) -> float:
    """Return the factor of an orthogonal update of this shape.

    ``spectral`` makes updates of all shapes as long as Adam's, times a constant (arXiv 2502.16982);
    ``unit_rms_norm`` keeps the norm of a layer's output (arXiv 2502.07529); ``shape_scaling`` is
    the rule of the original Muon.
    """
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    if mode == "unit_rms_norm":
        return math.sqrt(rows / columns)
    return math.sqrt(max(1.0, rows / columns))
