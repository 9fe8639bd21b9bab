"""SGD and Muon for the plain GPT, written from their formulas for the whole model at once.

Muon takes singular value decompositions: the Newton-Schulz iteration applies a polynomial to every
singular value and leaves the singular vectors alone, so that is what is done here.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

Weights = Mapping[str, torch.Tensor]

QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


@dataclass
class PlainSGD:
    """Momentum SGD with the weight decay in the gradient.

    Attributes:
        momentum: share of the sum of gradients that is kept.
        weight_decay: of matrices.
    """

    momentum: float
    weight_decay: float
    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    def step(self, weights: Weights, learning_rate: float) -> None:
        """Update weights from their ``.grad``."""
        for name, weight in weights.items():
            assert weight.grad is not None
            gradient = weight.grad + (self.weight_decay * weight if weight.dim() > 1 else 0.0)
            self.sums[name] = self.momentum * self.sums.get(name, 0.0) + gradient
            weight.sub_(learning_rate * self.sums[name])


@dataclass
class PlainMuon:
    """Muon for the matrices but those of the vocabulary, and AdamW by its formulas for the rest.

    Attributes:
        qkv: rows of a group's queries, key and value, which are matrices of their own.
        momentum: share of the mean of gradients that is kept.
        nesterov: mix the gradient with the new mean.
        weight_decay: of matrices.
        adam: first-moment decay, second-moment decay and epsilon.
        experts: matrices of experts that lie one below the other.
    """

    qkv: tuple[int, int, int]
    momentum: float
    nesterov: bool
    weight_decay: float
    adam: tuple[float, float, float]
    experts: int = 1
    means: dict[str, torch.Tensor] = field(default_factory=dict)
    squares: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: int = 0

    def step(self, weights: Weights, learning_rate: float) -> None:
        """Update weights from their ``.grad``."""
        self.steps += 1
        for name, weight in weights.items():
            if weight.dim() > 1:
                weight.mul_(1 - learning_rate * self.weight_decay)
            if weight.dim() > 1 and not name.startswith(("embedding.word", "output_layer")):
                weight.sub_(learning_rate * self._orthogonal(name, weight))
            else:
                weight.sub_(learning_rate * self._adaptive(name, weight))

    def _orthogonal(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        assert weight.grad is not None
        mean = self.momentum * self.means.get(name, 0.0) + (1 - self.momentum) * weight.grad
        self.means[name] = mean
        if self.nesterov:
            mean = self.momentum * mean + (1 - self.momentum) * weight.grad
        update = torch.empty_like(mean)
        for rows in self._matrices(name, len(weight)):
            own = mean[rows]
            update[rows] = polar(own) * math.sqrt(max(own.shape))
        return update

    def _matrices(self, name: str, rows: int) -> Iterator[list[int]]:
        """The rows of every matrix that lies in a fused one."""
        if ".experts." in name:
            own = rows // self.experts
            yield from (list(range(first, first + own)) for first in range(0, rows, own))
            return
        if "linear_qkv" not in name:
            yield list(range(rows))
            return
        query, key, _ = self.qkv
        group = sum(self.qkv)
        for begin, end in ((0, query), (query, query + key), (query + key, group)):
            yield [row for row in range(rows) if begin <= row % group < end]

    def _adaptive(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        assert weight.grad is not None
        beta1, beta2, epsilon = self.adam
        mean = beta1 * self.means.get(name, 0.0) + (1 - beta1) * weight.grad
        square = beta2 * self.squares.get(name, 0.0) + (1 - beta2) * weight.grad**2
        self.means[name], self.squares[name] = mean, square
        root = (square / (1 - beta2**self.steps)).sqrt() + epsilon
        return mean / (1 - beta1**self.steps) / root


def polar(
    matrix: torch.Tensor, steps: tuple[tuple[float, float, float], ...] = QUINTIC
) -> torch.Tensor:
    """U p(S) Vᵀ of a matrix U S Vᵀ divided by its norm, p being the steps one after the other."""
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm().clamp_min(1e-7)
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    found: torch.Tensor = (u * s) @ vt
    return found
