"""The counts of a dense GPT in closed form, for the explorer, which has no torch.

The layer is a plain GPT's: LayerNorm, attention, LayerNorm, MLP, all linear layers with biases. It
is launched as this project's GPU kernels launch it. Activations are those of table 2 of arXiv
2205.05198 with flash attention, communications those of its section 4. All other models are counted
from the code (``training/planning/count``), and a test holds both equal.

n tokens, h hidden size; u = 2nh bytes is one activation.
The vocabulary is in ``dense_vocabulary.py``.
"""

from dataclasses import dataclass
from typing import Final, Literal

from megatron.schedules.passes import PassKind
from megatron.simulator.costs.count import (
    AWAIT,
    Begin,
    Collective,
    Launch,
    Product,
    Step,
    Work,
)

HALF: Final = 2
FULL: Final = 4
"""Bytes of an element: of activations and weights, and of gradients of weights and statistics."""

NORM_SPAN: Final = 16
ACTIVATION_SPAN: Final = 64
"""Tokens whose part of a vector's gradient one program of a kernel adds up."""

Steps = list[Step]
Recomputation = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class DenseGpt:
    """A dense GPT, one microbatch and the ranks that share a layer.

    Attributes:
        hidden_size: h.
        num_attention_heads: query heads a.
        seq_length: tokens of a sequence s.
        vocab_size: padded vocabulary V.
        micro_batch_size: sequences of a microbatch.
        ffn_hidden_size: inner width of the MLP, of each half where it is gated; 0 stands for 4h.
        num_query_groups: key and value heads; 0 stands for a.
        gated_mlp: the MLP has a gate (SwiGLU).
        dropout: of both branches, on the residual stream.
        tensor: ranks t that share a layer.
        sequence_parallel: outside of attention and MLP they have parts of the sequence.
        recomputation: what B computes again: nothing, attention, or the layer.
    """

    hidden_size: int
    num_attention_heads: int
    seq_length: int
    vocab_size: int
    micro_batch_size: int = 1
    ffn_hidden_size: int = 0
    num_query_groups: int = 0
    gated_mlp: bool = False
    dropout: bool = False
    tensor: int = 1
    sequence_parallel: bool = False
    recomputation: Recomputation = "none"

    @property
    def tokens(self) -> int:
        """Tokens n of a microbatch."""
        return self.micro_batch_size * self.seq_length

    @property
    def own_tokens(self) -> int:
        """Tokens of a rank outside of attention and MLP."""
        return self.tokens // (self.tensor if self.sequence_parallel else 1)

    @property
    def activation(self) -> int:
        """Bytes u of an activation of all tokens."""
        return HALF * self.tokens * self.hidden_size

    @property
    def own(self) -> int:
        """Bytes of a rank's part of an activation outside of attention and MLP."""
        return HALF * self.own_tokens * self.hidden_size

    @property
    def query_width(self) -> int:
        """Width of a rank's query heads."""
        return self.hidden_size // self.tensor

    @property
    def qkv_width(self) -> int:
        """Width of a rank's queries, keys and values."""
        groups = self.num_query_groups or self.num_attention_heads
        return self.query_width + 2 * self.query_width * groups // self.num_attention_heads

    @property
    def ffn_width(self) -> int:
        """Inner width of a rank's MLP."""
        return (self.ffn_hidden_size or 4 * self.hidden_size) // self.tensor

    @property
    def inner_width(self) -> int:
        """Width of the MLP's first product: both halves where it is gated."""
        return self.ffn_width * (2 if self.gated_mlp else 1)

    @property
    def kept(self) -> int:
        """Bytes that a layer keeps from F to B (arXiv 2205.05198, table 2)."""
        if self.recomputation == "full":
            return self.own
        outside = 4 * self.own + self.dropout * 2 * self.own // HALF
        widths = self.qkv_width + self.query_width + self.inner_width + self.ffn_width
        return outside + HALF * self.tokens * widths + _statistics(self)

    @property
    def parameters(self) -> int:
        """Elements of a rank's parameters in a layer."""
        h = self.hidden_size
        matrices = h * (self.qkv_width + self.query_width + self.inner_width + self.ffn_width)
        return matrices + self.qkv_width + self.inner_width + 6 * h


def layer(gpt: DenseGpt, *, split: bool = False) -> dict[PassKind, Work]:
    """Return F and B of a layer; W where ``split``; R where the whole layer is computed again."""
    forward = _forward(gpt)
    backward = _backward(gpt, not split)
    again = [_attention(gpt)] if gpt.recomputation == "selective" else []
    passes: dict[PassKind, Work] = {
        "F": Work(tuple(forward), gpt.kept, gpt.kept),
        "B": Work((*again, *backward), -gpt.kept),
    }
    if split:
        passes["W"] = Work(tuple(_weight_gradients(gpt)))
    if gpt.recomputation == "full":
        passes["R"] = Work(tuple(forward))
    return passes


def product(name: str, m: int, n: int, k: int, *, bias: int = 0, adds: bool = False) -> Launch:
    """Return the launch of a product [m, k] x [k, n] in 16 bits.

    Args:
        name: of the operator.
        m: rows.
        n: columns.
        k: depth.
        bias: elements of a bias that it adds.
        adds: whether the result is added to an fp32 sum.
    """
    written = 2 * FULL if adds else HALF
    size = HALF * (m * k + k * n + bias) + written * m * n
    return Launch(name, size, 2 * m * n * k, Product(m, n, k))


def _statistics(gpt: DenseGpt) -> int:
    """Return the bytes of attention's log-sum-exps, which come with two seeds and two offsets."""
    return FULL * gpt.tokens * gpt.num_attention_heads // gpt.tensor


def _attention(gpt: DenseGpt, *, backward: bool = False) -> Launch:
    n, query = gpt.tokens, gpt.query_width
    keys = gpt.qkv_width - query
    flops = 4 * n * gpt.seq_length * query
    name, widths = "_scaled_dot_product_flash_attention", 2 * query + keys
    if backward:
        # Scores are computed again, so the backward has five products where the forward has two.
        name, widths, flops = f"{name}_backward", 4 * query + 2 * keys, 5 * flops // 2
    return Launch(name, HALF * n * widths + _statistics(gpt) + 24, flops, None, flops // 2)


def _norm(gpt: DenseGpt, tensors: int) -> Launch:
    """Return a norm that reads and writes so many activations, mean and deviation of each token."""
    vectors = 2 * HALF * gpt.hidden_size
    return Launch("norm", tensors * gpt.own + vectors + 2 * FULL * gpt.own_tokens)


def entering(gpt: DenseGpt) -> list[Collective]:
    """Return what all ranks need before a column-parallel product: tokens of the others."""
    if gpt.tensor == 1 or not gpt.sequence_parallel:
        return []
    return [Collective("all_gather", "tensor", gpt.tensor, gpt.activation)]


def leaving(gpt: DenseGpt) -> list[Collective]:
    """Return the sum of the parts after a row-parallel product."""
    if gpt.tensor == 1:
        return []
    kind: Literal["reduce_scatter", "all_reduce"]
    kind = "reduce_scatter" if gpt.sequence_parallel else "all_reduce"
    return [Collective(kind, "tensor", gpt.tensor, gpt.activation)]


def _dropped(gpt: DenseGpt) -> Steps:
    """Return a dropout: an activation is read and written, and a byte of each element's mask."""
    return [Launch("native_dropout", 5 * gpt.own // 2)] if gpt.dropout else []


def _forward(gpt: DenseGpt) -> Steps:
    n, h = gpt.tokens, gpt.hidden_size
    activation = Launch("activation", HALF * n * (gpt.inner_width + gpt.ffn_width))
    return [
        _norm(gpt, 2),
        *entering(gpt),
        product("addmm", n, gpt.qkv_width, h, bias=gpt.qkv_width),
        _attention(gpt),
        product("addmm", n, h, gpt.query_width, bias=h),
        *leaving(gpt),
        *_dropped(gpt),
        _norm(gpt, 4),
        *entering(gpt),
        product("addmm", n, gpt.inner_width, h, bias=gpt.inner_width),
        activation,
        product("addmm", n, h, gpt.ffn_width, bias=h),
        *leaving(gpt),
        *_dropped(gpt),
        Launch("add", 3 * gpt.own),
    ]


def _backward(gpt: DenseGpt, unsplit: bool) -> Steps:
    """Return a layer's B, with its weight gradients where ``unsplit``."""
    n = gpt.tokens
    inner, qkv = gpt.inner_width, gpt.qkv_width
    sums = FULL * inner * (n // ACTIVATION_SPAN)
    moved = HALF * n * (2 * inner + gpt.ffn_width)
    return [
        *_row_parallel_backward(gpt, gpt.ffn_width, unsplit),
        Launch("activation_backward", moved + sums),
        Launch("column_sums", sums + HALF * inner),
        _added(inner),
        *_column_parallel_backward(gpt, inner, unsplit),
        *_norm_backward(gpt),
        *_row_parallel_backward(gpt, gpt.query_width, unsplit),
        _attention(gpt, backward=True),
        Launch("cat", 2 * HALF * n * qkv),
        Launch("sum", HALF * n * qkv + HALF * qkv),
        *_column_parallel_backward(gpt, qkv, unsplit, _added(qkv)),
        *_norm_backward(gpt),
    ]


def _row_parallel_backward(gpt: DenseGpt, width: int, unsplit: bool) -> Steps:
    """Return the backward of the linear layer from ``width`` to h, with its bias's gradient."""
    n, h = gpt.tokens, gpt.hidden_size
    weights: Steps = [product("addmm", width, h, n, adds=True)] if unsplit else []
    bias = Launch("sum", gpt.own + HALF * h)
    return [
        *_dropped(gpt),
        bias,
        *entering(gpt),
        product("mm", n, width, h),
        *weights,
        _added(h),
    ]


def _column_parallel_backward(gpt: DenseGpt, width: int, unsplit: bool, *adds: Launch) -> Steps:
    """Return the backward of the linear layer from h to ``width``.

    Its input is gathered again beside the product of the input's gradient, and this gradient is
    summed beside the product of the weight's (arXiv 2205.05198, section 4.2.2).
    """
    n, h = gpt.tokens, gpt.hidden_size
    gathered, summed = entering(gpt), leaving(gpt)
    if not unsplit:
        return [product("mm", n, h, width), *summed, *adds]
    steps: Steps = [Begin(tuple(gathered))] if gathered else []
    steps.append(product("mm", n, h, width))
    steps += [AWAIT] if gathered else []
    steps += [Begin(tuple(summed))] if summed else []
    steps.append(product("addmm", h, width, n, adds=True))
    steps += adds
    return steps + ([AWAIT] if summed else [])


def _weight_gradients(gpt: DenseGpt) -> Steps:
    """Return W, which gathers its factors again where ranks have parts of the sequence."""
    n, h = gpt.tokens, gpt.hidden_size
    widths = (gpt.ffn_width, gpt.inner_width, gpt.query_width, gpt.qkv_width)
    steps: Steps = []
    for width in widths:
        steps += [*entering(gpt), product("addmm", h, width, n, adds=True)]
    return steps


def _added(elements: int) -> Launch:
    """Return the addition of a vector's gradient in 16 bits to its fp32 sum."""
    return Launch("add_", (HALF + 2 * FULL) * elements)


def _norm_backward(gpt: DenseGpt) -> Steps:
    h, n = gpt.hidden_size, gpt.own_tokens
    sums = 2 * FULL * h * (n // NORM_SPAN)
    moved = 4 * gpt.own + sums + HALF * h + 2 * FULL * n
    return [
        Launch("norm_backward", moved),
        Launch("column_sums", sums + 2 * HALF * h),
        _added(h),
        _added(h),
    ]
