"""Every attention that a run may ask for: its time, its speed, and its error against fp32.

Speed counts the scores that queries see, and no others: 4 d operations for each in the forward,
and 10 d in the backward, for heads of d channels. The error of output and gradients is that of the
first key's head and its queries, beside a formula in fp32: the norm of the difference, as a share
of the norm.

Shapes: b batch, a query heads, g key/value heads, s positions of queries, z positions of keys, d
channels of a head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.choose import kernels_for
from megatron.kernels.documents import Documents
from megatron.kernels.face import Kernels
from megatron.kernels.reference.partial_attention import AttentionPart
from megatron.kernels.scores import PLAIN, Scores
from tools.gpu_sections.timing import Scale, Section, in_a_line, laps, reason, table

FORWARD, BACKWARD = 4, 10
"""Operations for a score and a channel: two products in the forward, five in the backward."""

WITHIN: Final = 2e-2
"""Error that rounding to bf16 explains."""


@dataclass(frozen=True)
class Variant:
    """An attention.

    Attributes:
        heads: query heads a.
        groups: key/value heads g.
        queries: positions of queries s, the last ones.
        keys: positions of keys z.
        channels: d.
        scores: how products become scores.
        document: tokens of each document; 0: samples are not divided.
        sinks: whether every head has a sink.
        part: the queries see all keys, or with as many keys as queries those up to their own, and
            the log-sum-exp is returned: a step of a ring.
    """

    heads: int = 32
    groups: int = 8
    queries: int = 4096
    keys: int = 4096
    channels: int = 128
    scores: Scores = PLAIN
    document: int = 0
    sinks: bool = False
    part: bool = False

    def shrunk(self) -> "Variant":
        """Return a variant that a CPU computes at once."""
        window = self.scores.window
        return replace(
            self,
            heads=max(2, self.heads // 8),
            groups=max(1, self.groups // 8),
            queries=self.queries // 64,
            keys=self.keys // 64,
            channels=self.channels // 8,
            scores=replace(
                self.scores,
                window=None if window is None else window // 64,
                slopes_a=self.scores.slopes_a[: max(2, self.heads // 8)],
            ),
            document=self.document // 64,
        )

    def seen_sz(self, device: torch.device) -> Tensor:
        """Return which keys each query sees, booleans [s, z]."""
        key_z = torch.arange(self.keys, device=device)
        if self.part and self.queries != self.keys:
            return torch.ones(self.queries, self.keys, dtype=torch.bool, device=device)
        query_s1 = key_z[self.keys - self.queries :, None]
        seen_sz = key_z <= query_s1
        if self.scores.window is not None:
            seen_sz &= query_s1 - key_z <= self.scores.window
        if self.document:
            seen_sz &= key_z // self.document == query_s1 // self.document
        return seen_sz


_SLOPES: Final = tuple(2.0 ** (-8 * (head + 1) / 32) for head in range(32))

VARIANTS: Final[dict[str, Variant]] = {
    "causal": Variant(),
    "causal, every head its own keys": Variant(groups=32),
    "causal, 32k positions": Variant(heads=8, groups=8, queries=32768, keys=32768),
    "heads of 64": Variant(channels=64),
    "heads of 256": Variant(heads=16, groups=4, channels=256),
    "latent attention (heads of 192)": Variant(heads=16, groups=16, channels=192),
    "the last quarter of queries (slices, gathered context)": Variant(queries=1024),
    "window of 512": Variant(scores=Scores(window=512)),
    "window of 512, the last quarter of queries": Variant(queries=1024, scores=Scores(window=512)),
    "scores capped at 50": Variant(scores=Scores(softcap=50.0)),
    "scores capped at 50, window of 512": Variant(scores=Scores(softcap=50.0, window=512)),
    "ALiBi": Variant(scores=Scores(slopes_a=_SLOPES)),
    "sinks": Variant(sinks=True),
    "sinks, window of 512": Variant(sinks=True, scores=Scores(window=512)),
    "documents of 512": Variant(document=512),
    "documents of 512, window of 256": Variant(document=512, scores=Scores(window=256)),
    "documents of 512, scores capped at 50": Variant(document=512, scores=Scores(softcap=50.0)),
    "a ring's own keys": Variant(part=True),
    "a ring's keys of a lower rank": Variant(keys=2048, part=True),
    "a ring's keys of a higher rank": Variant(queries=2048, part=True),
}
"""All that differ in which kernel computes them, or in what the kernel computes."""


def measure(scale: Scale) -> Section:
    """Time every variant forward and backward, and compare it with the formula.

    Raises:
        RuntimeError: if no variant runs.
    """
    kernels = kernels_for(scale.device, torch.bfloat16)
    rows: list[tuple[object, ...]] = []
    failed: dict[str, str] = {}
    for name, large in VARIANTS.items():
        try:
            row = _row(scale, kernels, large.shrunk() if scale.small else large)
        except Exception as error:  # whatever it is, the others go on
            failed[name] = reason(error)
            print(f"{name}: failed: {failed[name]}", flush=True)
        else:
            rows.append((name, *row))
            print(in_a_line(rows[-1]), flush=True)
        scale.forget_peak()
    if not rows:
        raise RuntimeError(f"no attention runs: {failed}")
    bad = [row[0] for row in rows if float(str(row[-1])) > WITHIN]
    said = [
        "32 heads of 128 channels, 8 of keys, 4,096 positions, bf16, where nothing else is said. "
        f"Errors above {WITHIN:g} are not explained by rounding: "
        f"{', '.join(map(str, bad)) or 'there are none'}.",
    ]
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        said += ["", f"**Failed: {reasons}.**"]
    values = {
        "rows": [dict(zip(_HEAD, row, strict=True)) for row in rows],
        "not within": bad,
        "failed": failed,
    }
    return Section([*said, "", *table(_HEAD, rows)], values)


_HEAD: Final = (
    "attention", "forward, us", "TFLOP/s", "backward, us", "TFLOP/s", "error of the output",
    "largest error",
)  # fmt: skip


def _row(scale: Scale, kernels: Kernels, own: Variant) -> tuple[object, ...]:
    drawn = _Drawn.of(scale, own)
    call = _part_call(kernels, own, drawn) if own.part else _call(kernels, own, drawn)
    kept: dict[str, Any] = {}

    def forward() -> None:
        kept["forward"] = call.forward()

    def backward() -> None:
        kept["found"] = call.backward(kept.pop("forward"))

    ahead, back = laps(scale, [forward, backward])
    errors = _errors(own, drawn, kept["found"])
    scores = int(own.seen_sz(scale.device).sum()) * own.heads
    flops = scores * own.channels
    return (
        1e6 * ahead,
        FORWARD * flops / ahead / 1e12,
        1e6 * back,
        BACKWARD * flops / back / 1e12,
        f"{errors[0]:.1e}",
        f"{max(errors):.1e}",
    )


@dataclass(frozen=True)
class _Drawn:
    """Operands, and the gradient of the output."""

    q_basd: Tensor
    k_bgzd: Tensor
    v_bgzd: Tensor
    grad_basd: Tensor
    sinks_a: Tensor | None
    documents: Documents | None

    @classmethod
    def of(cls, scale: Scale, own: Variant) -> "_Drawn":
        """Draw them; they lie in memory as the layers leave them, position by position."""

        def drawn(heads: int, positions: int) -> Tensor:
            return scale.drawn(1, positions, heads, own.channels).transpose(1, 2)

        documents = None
        if own.document:
            first_bs = (torch.arange(own.keys) // own.document * own.document)[None]
            documents = Documents.of(first_bs, lambda tensor: tensor.to(scale.device))
        return cls(
            drawn(own.heads, own.queries).requires_grad_(),
            drawn(own.groups, own.keys).requires_grad_(),
            drawn(own.groups, own.keys).requires_grad_(),
            drawn(own.heads, own.queries),
            scale.drawn(own.heads).requires_grad_() if own.sinks else None,
            documents,
        )

    @property
    def inputs(self) -> list[Tensor]:
        """Tensors that have gradients."""
        sinks = [] if self.sinks_a is None else [self.sinks_a]
        return [self.q_basd, self.k_bgzd, self.v_bgzd, *sinks]


@dataclass(frozen=True)
class _Call:
    """Attention in two steps.

    Attributes:
        forward: returns what the backward takes.
        backward: returns the output and all gradients.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], Sequence[Tensor]]


def _call(kernels: Kernels, own: Variant, drawn: _Drawn) -> _Call:
    def forward() -> Tensor:
        return kernels.causal_attention(
            drawn.q_basd,
            drawn.k_bgzd,
            drawn.v_bgzd,
            options=AttentionOptions(own.scores, documents=drawn.documents, sinks_a=drawn.sinks_a),
        )

    def backward(out_basd: Tensor) -> Sequence[Tensor]:
        gradients = torch.autograd.grad(out_basd, drawn.inputs, drawn.grad_basd)
        return out_basd.detach(), *gradients

    return _Call(forward, backward)


def _part_call(kernels: Kernels, own: Variant, drawn: _Drawn) -> _Call:
    operands = (drawn.q_basd.detach(), drawn.k_bgzd.detach(), drawn.v_bgzd.detach())
    part = AttentionPart(*operands, own.queries == own.keys, own.channels**-0.5)

    def backward(attended: Any) -> Sequence[Tensor]:
        return attended.out_basd, *kernels.gradients_of_part(part, attended, drawn.grad_basd)

    return _Call(lambda: kernels.attend_to_part(part), backward)


def _errors(own: Variant, drawn: _Drawn, found: Sequence[Tensor]) -> list[float]:
    """Return the errors of the output and of all gradients, in the first key's head."""
    share = own.heads // own.groups
    q_basd, k_bgzd, v_bgzd = (
        tensor.detach()[:, :count].float().requires_grad_()
        for tensor, count in ((drawn.q_basd, share), (drawn.k_bgzd, 1), (drawn.v_bgzd, 1))
    )
    sinks_a = None
    if drawn.sinks_a is not None:
        sinks_a = drawn.sinks_a.detach()[:share].float().requires_grad_()
    out_basd = attention_formula(own, q_basd, k_bgzd, v_bgzd, sinks_a)
    inputs = [q_basd, k_bgzd, v_bgzd, *([] if sinks_a is None else [sinks_a])]
    grad_basd = drawn.grad_basd[:, :share].float()
    expected = [out_basd, *torch.autograd.grad(out_basd, inputs, grad_basd)]
    counts = (share, share, 1, 1)
    cut = [tensor[:, :count] for tensor, count in zip(found, counts, strict=False)]
    cut += [tensor[:share] for tensor in found[len(counts) :]]
    return [
        float((one.float() - other.detach()).norm() / other.detach().norm())
        for one, other in zip(cut, expected, strict=True)
    ]


def attention_formula(
    own: Variant, q_basd: Tensor, k_bgzd: Tensor, v_bgzd: Tensor, sinks_a: Tensor | None
) -> Tensor:
    """Return attention of the first query heads, one after the other, to the only key's head.

    Args:
        own: the variant.
        q_basd: queries of the heads that share a key.
        k_bgzd: keys of one head.
        v_bgzd: values of one head.
        sinks_a: the sink of each head.
    """
    seen_sz, device = own.seen_sz(q_basd.device), q_basd.device
    key_z = torch.arange(own.keys, device=device)
    outputs = []
    for head in range(q_basd.shape[1]):
        score_bsz = q_basd[:, head] @ k_bgzd[:, 0].mT * own.scores.scale_of(own.channels)
        if own.scores.softcap:
            score_bsz = own.scores.softcap * (score_bsz / own.scores.softcap).tanh()
        if own.scores.slopes_a:
            behind_sz = key_z[own.keys - own.queries :, None] - key_z
            score_bsz = score_bsz - own.scores.slopes_a[head] * behind_sz
        score_bsz = score_bsz.masked_fill(~seen_sz, -torch.inf)
        log_bs1 = score_bsz.logsumexp(-1, keepdim=True)
        if sinks_a is not None:
            log_bs1 = torch.logaddexp(log_bs1, sinks_a[head])
        outputs.append((score_bsz - log_bs1).exp() @ v_bgzd[:, 0])
    return torch.stack(outputs, 1)
