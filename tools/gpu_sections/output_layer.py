"""S and T of a shard against the matrix products in them, with kept logits and with logits again.

Shapes: n tokens, h hidden, v rows of the shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from megatron.kernels.choose import kernels_for
from megatron.layers.main_grad import give_main_grad
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.layers.vocabulary.output_s import LossOptions
from megatron.layers.vocabulary.shard import VocabularyShard
from tools.gpu_sections.timing import Scale, Section, laps, table

SHARDS: Final = (8, 16, 32)

AGAIN: Final = ((1, 2048), (8, 4096), (16, 4096))
"""Shards of a vocabulary whose logits are formed again, and n = h."""


@dataclass(frozen=True)
class TimedShard:
    """A shard that is timed.

    Attributes:
        entries: of the whole vocabulary.
        shards: of equal size.
        tokens: n.
        hidden: h.
        in_s: S forms A, as with vocab-2; else T does, as with vocab-1.
        again: T forms the logits again.
    """

    entries: int
    shards: int
    tokens: int
    hidden: int
    in_s: bool = True
    again: bool = False

    @property
    def rows(self) -> int:
        """Return v."""
        return self.entries // self.shards

    def drawn(
        self, device: torch.device
    ) -> tuple[OutputLayer, nn.Parameter, Tensor, Tensor, Tensor]:
        """Return a layer of bf16, its matrix, and x [n, h], targets [n] and weights [n] for it."""
        padded, dtype = -(-self.entries // self.shards) * self.shards, torch.bfloat16
        shard = VocabularyShard.of(self.entries, padded, 0, self.shards)
        size = (shard.rows, self.hidden)
        weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device).normal_(0, 0.02))
        give_main_grad(weight, torch.full(size, 0.0, device=device))  # its memory is allocated now
        options, kernels = LossOptions(self.entries), kernels_for(device, dtype)
        return (
            OutputLayer(shard, weight, options, kernels, self.again),
            weight,
            torch.randn(self.tokens, self.hidden, device=device).to(dtype),
            torch.randint(self.entries, (self.tokens,), device=device),
            torch.full((self.tokens,), 1 / self.tokens, device=device),
        )

    def products(self, logits: float, a: float, weights: float) -> tuple[float, float]:
        """Return the seconds of the products in S and in T, given those of single products."""
        again = logits if self.again else 0.0
        return (logits + a, again + weights) if self.in_s else (logits, again + a + weights)


def measure(scale: Scale) -> Section:
    """Time S, C1's arithmetic and T: several numbers of shards of 256k, two ways of the logits."""
    vocab_size, size = (2560, 64) if scale.small else (256_000, 4096)
    kept = [_of_kept(scale, TimedShard(vocab_size, shards, size, size)) for shards in SHARDS]
    again = [
        _of_again(scale, TimedShard(vocab_size, shards, least, least, in_s, again=True))
        for shards, wanted in AGAIN
        for least in [min(size, wanted)]
        for in_s in (True, False)
    ]
    head = (
        "shards", "rows", "S, ms", "S / 2 products", "C1, ms", "T, ms", "T / 1 product",
        "S + T, ms", "S + T / 3 products", "all",
    )  # fmt: skip
    head_again = ("S forms A", "rows", "n = h", "S, ms", "S / products", "T, ms", "T / products")
    said = (
        f"A shard of {vocab_size:,} entries, n = {size}, h = {size}, bf16, vocab-2. C1 is its "
        "arithmetic without communication; *all* is S + C1 + T over the three products, timed "
        "alone."
    )
    said_again = (
        "With `--vocab-recompute`: *yes* as with vocab-2, *no* as with vocab-1. One of T's "
        "products forms the logits again."
    )
    values = {
        "rows": [dict(zip(head, row, strict=True)) for row in kept],
        "again": [dict(zip(head_again, row, strict=True)) for row in again],
    }
    lines = [said, "", *table(head, kept), "", said_again, "", *table(head_again, again)]
    return Section(lines, values)


def _of_kept(scale: Scale, own: TimedShard) -> Sequence[str | int | float]:
    s, c1, t, products = _seconds(scale, own)
    in_s, in_t = own.products(*products)
    return (
        own.shards,
        own.rows,
        1e3 * s,
        s / in_s,
        1e3 * c1,
        1e3 * t,
        t / in_t,
        1e3 * (s + t),
        (s + t) / sum(products),
        (s + c1 + t) / sum(products),
    )


def _of_again(scale: Scale, own: TimedShard) -> Sequence[str | int | float]:
    s, _, t, products = _seconds(scale, own)
    in_s, in_t = own.products(*products)
    forms = "yes" if own.in_s else "no"
    return forms, own.rows, own.tokens, 1e3 * s, s / in_s, 1e3 * t, t / in_t


def _seconds(scale: Scale, own: TimedShard) -> tuple[float, float, float, Sequence[float]]:
    """Return the seconds of S, C1 and T, and of the products for logits, A and weights."""
    layer, weight, x_nh, targets_n, weight_n = own.drawn(scale.device)
    gathered_p4n = torch.ones(own.shards, 4, own.tokens, device=scale.device)
    kept: dict[str, Any] = {}

    def s() -> None:
        kept["state"] = layer.s(x_nh, targets_n, form_gradient=own.in_s)

    def c1() -> None:
        state = kept["state"]
        kept["merged"], _ = layer.merge(gathered_p4n, state, weight_n)
        state.drop_gradient()

    def t() -> None:
        layer.t(kept.pop("state"), kept.pop("merged"), weight_n, form_gradient=not own.in_s)

    with torch.no_grad():
        of_s, of_c1, of_t = laps(scale, [s, c1, t])
        return of_s, of_c1, of_t, _of_products(scale, x_nh, weight)


def _of_products(scale: Scale, x_nh: Tensor, weight: Tensor) -> Sequence[float]:
    y_nv, out_nh = torch.mm(x_nh, weight.T), torch.empty_like(x_nh)
    out_vh = torch.empty_like(weight)
    return laps(
        scale,
        [
            lambda: torch.mm(x_nh, weight.T, out=y_nv),
            lambda: torch.mm(y_nv, weight, out=out_nh),
            lambda: torch.mm(y_nv.T, x_nh, out=out_vh),
        ],
    )
