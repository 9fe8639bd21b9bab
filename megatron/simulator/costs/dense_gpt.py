"""The counts of a layer of a dense GPT in closed form, for the explorer, which has no torch.

The layer is that of a plain GPT (LayerNorm, attention, LayerNorm, MLP; all linear layers have
biases) or of a Llama. It is launched as this project's GPU kernels launch it. Activations are those
of table 2 of arXiv 2205.05198 with flash attention, communications those of its section 4. All
other models are counted from the code (``training/planning/count``), and a test holds both equal.
``dense_counts.py`` puts layers together to ranks.

n tokens, h hidden size; u = 2nh bytes is one activation.
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

SEEDS: Final = 1024
"""Bytes that attention's seed and offset take: CUDA's allocator gives multiples of 512."""

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
        llama: RMSNorm, no biases, rotated queries and keys, and a gated MLP (SwiGLU).
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
    llama: bool = False
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
        return self.ffn_width * (2 if self.llama else 1)

    @property
    def rotated_width(self) -> int:
        """Width of a rank's rotated queries and keys, which are kept beside those before."""
        return (self.query_width + self.qkv_width) // 2 * self.llama

    @property
    def factors(self) -> int:
        """Bytes of the factors of a layer's weight gradients."""
        widths = self.qkv_width + self.query_width + self.inner_width + self.ffn_width
        return 4 * self.own + HALF * self.tokens * widths

    @property
    def stored(self) -> int:
        """Bytes that the backward of a layer reads (arXiv 2205.05198, table 2)."""
        masks = self.dropout * self.own
        norms = 4 * FULL * self.own_tokens
        rotated = HALF * self.tokens * self.rotated_width
        return self.factors + rotated + masks + norms + _statistics(self) + SEEDS

    @property
    def kept(self) -> int:
        """Bytes that a layer keeps from F to B."""
        return self.own if self.recomputation == "full" else self.stored

    @property
    def matrices(self) -> int:
        """Elements of a rank's matrices in a layer."""
        widths = self.qkv_width + self.query_width + self.inner_width + self.ffn_width
        return self.hidden_size * widths

    @property
    def vectors(self) -> int:
        """Elements of a rank's norms and biases in a layer."""
        biases = 0 if self.llama else self.qkv_width + self.inner_width + 2 * self.hidden_size
        return biases + 2 * self.norm_vectors * self.hidden_size

    @property
    def norm_vectors(self) -> int:
        """Vectors of a norm: a LayerNorm has a bias."""
        return 1 if self.llama else 2

    @property
    def parameters(self) -> int:
        """Elements of a rank's parameters in a layer."""
        return self.matrices + self.vectors

    @property
    def splits_tokens(self) -> bool:
        """Whether ranks gather tokens before they multiply."""
        return self.tensor > 1 and self.sequence_parallel


def layer(gpt: DenseGpt, *, split: bool = False) -> dict[PassKind, Work]:
    """Return F and B of a layer; W where ``split``; R where the whole layer is computed again.

    Memory is exact where the MLP is as wide as the layer or wider.
    """
    forward = _forward(gpt)
    again = [_attention(gpt)] if gpt.recomputation == "selective" else []
    own, peak = gpt.own, gpt.stored + max(gpt.own + gpt.activation, _drawn(gpt))
    if gpt.recomputation == "full":
        wide = HALF * gpt.tokens * (gpt.inner_width + gpt.ffn_width)
        peak = (3 + gpt.splits_tokens) * own + wide + gpt.activation
    factors = gpt.factors if split else 0
    passes: dict[PassKind, Work] = {
        "F": Work(tuple(forward), gpt.kept, peak),
        "B": Work((*again, *_backward(gpt, not split)), factors - gpt.stored, _room(gpt, split)),
    }
    if split:
        gathered = gpt.activation * gpt.splits_tokens
        passes["W"] = Work(tuple(_weight_gradients(gpt)), -factors, gathered)
    if gpt.recomputation == "full":
        passes["R"] = Work(tuple(forward), gpt.stored - own, gpt.stored)
    return passes


def _drawn(gpt: DenseGpt) -> int:
    """Return the bytes that F takes while it draws the mask of all tokens, beside those kept."""
    return (5 * gpt.activation + gpt.own) // 2 * (gpt.dropout and gpt.splits_tokens)


def _room(gpt: DenseGpt, split: bool) -> int:
    """Return the bytes that a layer's B takes at most: in the MLP, whose tensors are the widest.

    A product gives the gradient of the narrow side; the activation that of the wide side; a second
    product that of the MLP's input, and the norm passes it on. Without W, each factor goes as soon
    as it was used.
    """
    narrow, wide = HALF * gpt.tokens * gpt.ffn_width, HALF * gpt.tokens * gpt.inner_width
    gathered, summed = gpt.activation * gpt.splits_tokens, gpt.own * (gpt.tensor > 1)
    first = gathered + narrow + gpt.dropout * gpt.own // 2 + _bias_bytes(gpt)
    second = wide + _activation_sums(gpt) + narrow * split
    third = (
        gpt.activation + summed + (0 if split else gathered - narrow - gpt.dropout * gpt.own // 2)
    )
    fourth = 2 * gpt.own + norm_sums(gpt) if split else 0
    return max(first, second, third, fourth)


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
    name, widths, executed = "_scaled_dot_product_flash_attention", 2 * query + keys, flops // 2
    if backward:
        # Scores are computed again, so the backward does five products, and four of them count.
        name, widths = f"{name}_backward", 4 * query + 2 * keys
        flops, executed = 2 * flops, 5 * executed // 2
    return Launch(name, HALF * n * widths + _statistics(gpt) + 24, flops, None, executed)


def _rotations(gpt: DenseGpt) -> Steps:
    """Return the rotations of queries and keys; angles are in fp32."""
    angles = FULL * gpt.seq_length * gpt.hidden_size // gpt.num_attention_heads
    widths = (gpt.query_width, (gpt.qkv_width - gpt.query_width) // 2) if gpt.llama else ()
    return [Launch("rotate", 2 * HALF * gpt.tokens * width + angles) for width in widths]


def norm(gpt: DenseGpt, tensors: int) -> Launch:
    """Return a norm that reads and writes so many activations, mean and deviation of each token."""
    vectors = gpt.norm_vectors * HALF * gpt.hidden_size
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


def dropped(gpt: DenseGpt, *, backward: bool = False) -> Steps:
    """Return a dropout: an activation is read and written, and a byte of each element's mask.

    Where ranks have parts of the sequence, each draws the mask of all tokens and takes its part.
    """
    if not gpt.dropout:
        return []
    if not gpt.splits_tokens:
        return [Launch("native_dropout", 5 * gpt.own // 2)]
    drawn = [Launch("native_dropout", (7 * gpt.activation + 5 * gpt.own) // 2)]
    return [*([] if backward else drawn), Launch("native_dropout", 9 * gpt.own // 2)]


def scattered(gpt: DenseGpt) -> Steps:
    """Return the copy into the order of the stream of tokens that were reduced and scattered."""
    return [Launch("clone", 2 * gpt.own)] if gpt.splits_tokens else []


def _row_parallel(gpt: DenseGpt, width: int) -> Steps:
    """Return the forward of the linear layer from ``width`` to h; a sum gets its bias last."""
    n, h = gpt.tokens, gpt.hidden_size
    if gpt.tensor == 1:
        return [_linear(gpt, h, width)]
    bias = [] if gpt.llama else [Launch("add_", 2 * gpt.own + HALF * h)]
    return [product("mm", n, h, width), *leaving(gpt), *scattered(gpt), *bias]


def _linear(gpt: DenseGpt, m: int, k: int) -> Launch:
    """Return the launch of a linear layer with its bias, if any."""
    if gpt.llama:
        return product("mm", gpt.tokens, m, k)
    return product("addmm", gpt.tokens, m, k, bias=m)


def _forward(gpt: DenseGpt) -> Steps:
    n, h = gpt.tokens, gpt.hidden_size
    activation = Launch("activation", HALF * n * (gpt.inner_width + gpt.ffn_width))
    # Queries that share keys do not lie next to each other, so they are copied to be rotated.
    grouped = gpt.llama and gpt.num_query_groups not in (0, gpt.num_attention_heads)
    copied = [Launch("clone", 2 * HALF * n * gpt.query_width)] if grouped else []
    return [
        norm(gpt, 2),
        *entering(gpt),
        _linear(gpt, gpt.qkv_width, h),
        *copied,
        *_rotations(gpt),
        _attention(gpt),
        *_row_parallel(gpt, gpt.query_width),
        *dropped(gpt),
        norm(gpt, 4),
        *entering(gpt),
        _linear(gpt, gpt.inner_width, h),
        activation,
        *_row_parallel(gpt, gpt.ffn_width),
        *dropped(gpt),
        Launch("add", 3 * gpt.own),
    ]


def _activation_sums(gpt: DenseGpt) -> int:
    """Return the bytes of partial sums of the gradient of the MLP's first bias."""
    return 0 if gpt.llama else FULL * gpt.inner_width * (gpt.tokens // ACTIVATION_SPAN)


def _bias_bytes(gpt: DenseGpt) -> int:
    return 0 if gpt.llama else HALF * gpt.hidden_size


def _backward(gpt: DenseGpt, unsplit: bool) -> Steps:
    """Return a layer's B, with its weight gradients where ``unsplit``."""
    n = gpt.tokens
    inner, qkv = gpt.inner_width, gpt.qkv_width
    sums = _activation_sums(gpt)
    moved = HALF * n * (2 * inner + gpt.ffn_width)
    biases = [] if gpt.llama else [Launch("column_sums", sums + HALF * inner), _added(inner)]
    summed = [] if gpt.llama else [Launch("sum", HALF * n * qkv + HALF * qkv)]
    return [
        *_row_parallel_backward(gpt, gpt.ffn_width, unsplit),
        Launch("activation_backward", moved + sums),
        *biases,
        *_column_parallel_backward(gpt, inner, unsplit),
        *norm_backward(gpt, 4),
        *_row_parallel_backward(gpt, gpt.query_width, unsplit),
        _attention(gpt, backward=True),
        *_rotations(gpt),
        Launch("cat", 2 * HALF * n * qkv),
        *summed,
        *_column_parallel_backward(gpt, qkv, unsplit),
        *([] if gpt.llama else [_added(qkv)]),
        *norm_backward(gpt, 4),
    ]


def _row_parallel_backward(gpt: DenseGpt, width: int, unsplit: bool) -> Steps:
    """Return the backward of the linear layer from ``width`` to h, with its bias's gradient."""
    n, h = gpt.tokens, gpt.hidden_size
    weights: Steps = [product("addmm", width, h, n, adds=True)] if unsplit else []
    return [
        *dropped(gpt, backward=True),
        *([] if gpt.llama else [Launch("sum", gpt.own + HALF * h)]),
        *entering(gpt),
        product("mm", n, width, h),
        *weights,
        *([] if gpt.llama else [_added(h)]),
    ]


def _column_parallel_backward(gpt: DenseGpt, width: int, unsplit: bool) -> Steps:
    """Return the backward of the linear layer from h to ``width``.

    Its input is gathered again beside the product of the input's gradient, and this gradient is
    summed beside the product of the weight's (arXiv 2205.05198, section 4.2.2).
    """
    n, h = gpt.tokens, gpt.hidden_size
    gathered, summed = tuple(entering(gpt)), tuple(leaving(gpt))
    multiplied: Steps = [product("mm", n, h, width)]
    if unsplit and gathered:
        multiplied = [Begin(gathered), *multiplied, AWAIT]
    weights: Steps = [product("addmm", h, width, n, adds=True)] if unsplit else []
    if not summed:
        return [*multiplied, *weights]
    return [*multiplied, *scattered(gpt), Begin(summed), *weights, AWAIT]


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


def norm_sums(gpt: DenseGpt) -> int:
    """Return the bytes of partial sums of the gradients of a norm's vectors."""
    return gpt.norm_vectors * FULL * gpt.hidden_size * (gpt.own_tokens // NORM_SPAN)


def norm_backward(gpt: DenseGpt, tensors: int) -> Steps:
    """Return the backward of a norm that reads and writes so many activations."""
    h, n, vectors, sums = gpt.hidden_size, gpt.own_tokens, gpt.norm_vectors, norm_sums(gpt)
    moved = tensors * gpt.own + sums + HALF * h + 2 * FULL * n
    reduced = Launch("column_sums", sums + vectors * HALF * h)
    return [Launch("norm_backward", moved), reduced, *vectors * [_added(h)]]
