"""S and T of a shard against the matrix products in them.

Shapes: n tokens, h hidden, v rows of the shard.
"""

from typing import Any, Final

import torch
from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.layers.main_grad import give_main_grad
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.layers.vocabulary.output_s import LossOptions
from megatron.layers.vocabulary.shard import VocabularyShard
from tools.gpu_sections.timing import Scale, Section, laps, table

SHARDS: Final = (8, 16, 32)


def measure(scale: Scale) -> Section:
    """Time S, C1's arithmetic and T with vocab-2 for several numbers of shards of 256k."""
    vocab_size, h, n = (2560, 64, 64) if scale.small else (256_000, 4096, 4096)
    rows = [_of_shard(scale, vocab_size, shards, n, h) for shards in SHARDS]
    head = ("shards", "rows", "S, ms", "S / 2 products", "C1, ms", "T, ms", "T / 1 product", "all")
    said = (
        f"A shard of {vocab_size:,} entries, n = {n}, h = {h}, bf16, vocab-2. C1 is its arithmetic "
        "without communication; *all* is S + C1 + T over the three products, timed alone."
    )
    values = {"rows": [dict(zip(head, row, strict=True)) for row in rows]}
    return Section([said, "", *table(head, rows)], values)


def _of_shard(
    scale: Scale, vocab_size: int, shards: int, n: int, h: int
) -> tuple[str | int | float, ...]:
    device, dtype = scale.device, torch.bfloat16
    padded = -(-vocab_size // shards) * shards
    shard = VocabularyShard.of(vocab_size, padded, 0, shards)
    weight = nn.Parameter(torch.randn(shard.rows, h, device=device, dtype=dtype) * 0.02)
    give_main_grad(weight, torch.zeros(shard.rows, h, device=device))
    layer = OutputLayer(shard, weight, LossOptions(vocab_size), kernels_for(device, dtype), False)
    x_nh = torch.randn(n, h, device=device, dtype=dtype)
    targets_n = torch.randint(vocab_size, (n,), device=device)
    weight_n = torch.full((n,), 1 / n, device=device)
    gathered_p4n = torch.ones(shards, 4, n, device=device)
    kept: dict[str, Any] = {}

    def s() -> None:
        kept["state"] = layer.s(x_nh, targets_n, form_gradient=True)

    def c1() -> None:
        state = kept["state"]
        kept["merged"], _ = layer.merge(gathered_p4n, state, weight_n)
        state.drop_gradient()

    def t() -> None:
        layer.t(kept.pop("state"), kept.pop("merged"), weight_n)

    with torch.no_grad():
        taken = laps(scale, [s, c1, t])
        y_nv, out_nh = torch.mm(x_nh, weight.T), torch.empty_like(x_nh)
        out_vh = torch.empty_like(weight)
        products = laps(
            scale,
            [
                lambda: torch.mm(x_nh, weight.T, out=y_nv),
                lambda: torch.mm(y_nv, weight, out=out_nh),
                lambda: torch.mm(y_nv.T, x_nh, out=out_vh),
            ],
        )
    return (
        shards,
        shard.rows,
        1e3 * taken[0],
        taken[0] / sum(products[:2]),
        1e3 * taken[1],
        1e3 * taken[2],
        taken[2] / products[2],
        sum(taken) / sum(products),
    )
