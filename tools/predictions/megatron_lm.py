"""The differences between the kernels that Megatron-LM launches and those of this project.

The published runs (docs/reference/published_runs.csv) ran Megatron-LM at some time. A difference
changes the count of a pass, so that the time of the count is the time of Megatron-LM's pass. None
is a share of a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from megatron.simulator.costs.count import (
    AWAIT,
    FULL,
    HALF,
    Await,
    Begin,
    Collective,
    Launch,
    Product,
    Step,
    Work,
    product,
)
from tools.predictions.counted_layer import Shape

LOSS_FORWARD: Final = 38
LOSS_BACKWARD: Final = 14
"""Bytes of a logit in Megatron-LM's cross-entropy, ``core/tensor_parallel/cross_entropy.py``: to
fp32 (6), maximum (4), subtraction, exponentials and division in place (8 each), sum (4); back, the
product with the loss's gradient (8) and the way to 16 bits (6)."""

WAIT: Final = 327.7e-6
"""Seconds that a transfer between stages takes besides its bytes: both sides wait for each other,
and for the GPU (``torch.cuda.synchronize`` in ``p2p_communication.py``). Measured on 8 A100s
(docs/reference/a100_8gpu_seq2048.csv, column ``p2p_us``, without the bytes over NVLink)."""

DROPOUT: Final = {"native_dropout", "native_dropout_backward", "new_ones", "ne", "mul"}
"""Kernels of this project's dropout. Where ranks have parts of the sequence, each of them draws the
mask of all tokens and multiplies by its part."""

NORMS: Final = {"norm", "native_layer_norm"}
"""Norms: this project's, and PyTorch's, which forms those of wide activations."""

FUSED_STEP: Final = 54
SEPARATE_STEP: Final = 60
"""Bytes of a parameter in the step of ``Float16OptimizerWithFloat16Params`` with apex' Adam: scale
and look for infinities (8), norm (4), clip (8), Adam (16 and 12), weights in 16 bits (6); where
gradients are in 16 bits, their copy in fp32 (6)."""


@dataclass(frozen=True)
class Version:
    """Megatron-LM as a source ran it.

    Attributes:
        flash: attention is one kernel; else its matrices are in memory.
        fused_sums: products add weight gradients to fp32 sums (``--gradient-accumulation-fusion``,
            2022); else a kernel of their own adds them, in 16 bits.
        beside: collectives of the tensor ranks run beside the backward's products (2022).
        overlapped: those of the forward too (``--tp-comm-overlap``, Transformer Engine), and the
            exchange between replicas (``--overlap-grad-reduce``, ``--overlap-param-gather``).
        sharded: the optimizer is (``--use-distributed-optimizer``).
        blocking: transfers run between passes, not beside them.
        dropout: the published command line has it.
        tied: the first and the last stage share the embedding.
    """

    flash: bool = False
    fused_sums: bool = True
    beside: bool = True
    overlapped: bool = False
    sharded: bool = False
    blocking: bool = True
    dropout: bool = True
    tied: bool = True

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient on its way to replicas."""
        return FULL if self.fused_sums else HALF

    @property
    def step_bytes(self) -> int:
        """Bytes that the optimizer's step moves for a parameter."""
        return FUSED_STEP if self.fused_sums else SEPARATE_STEP

    def of(self, gpt: Shape, work: Work) -> Work:
        """Return a pass of a layer as this version runs it."""
        work = unfused_norms(gpt, without_copies(gpt, work))
        if not self.flash:
            work = unfused_attention(gpt, work)
        if not self.fused_sums:
            work = separate_sums(work)
        if not self.beside:
            work = waiting(work)
        return overlapping(work) if self.overlapped else work


def without_copies(gpt: Shape, work: Work) -> Work:
    """Leave out copies into the order of the stream, and biases that are added to sums.

    Megatron-LM reduces and scatters in the order of the stream, and ``unfused_norms`` adds biases.
    """

    def change(launch: Launch) -> Iterator[Launch]:
        if launch.name != "clone" and not (launch.name == "add_" and launch.bytes > gpt.own):
            yield launch

    return _changed(work, change)


def unfused_norms(gpt: Shape, work: Work) -> Work:
    """Return a pass in which a branch joins the stream before the norm reads the stream.

    Bias, dropout and addition are one kernel (``fused_bias_dropout.py``): it reads a branch and the
    stream, and writes the stream and the mask. This project's norm does all that by itself, but for
    widths that PyTorch's takes; then the addition stands alone, as that of two gradients does.
    """
    joined = Launch("bias_dropout_add", (7 * gpt.own if gpt.dropout else 6 * gpt.own) // 2)

    forward = any(launch.name in NORMS for launch in work.launches)

    def change(launch: Launch) -> Iterator[Launch]:
        if launch.name in DROPOUT:
            return
        if launch.name == "norm" and launch.bytes > 3 * gpt.own:
            yield joined
            yield launch._replace(bytes=launch.bytes - 2 * gpt.own)
        else:
            yield joined if forward and launch.name == "add" else launch

    return _changed(work, change)


def unfused_attention(gpt: Shape, work: Work) -> Work:
    """Return a pass with attention as Megatron-LM ran it before flash attention.

    The forward is the product of queries and keys, a softmax with scale and mask
    (``fused_softmax.py``), dropout, and the product with the values. Kernels read and write
    matrices [s, s] of every head in 16 bits. Products compute all of a matrix, mask or not.
    """
    heads = gpt.micro_batch_size * gpt.num_attention_heads // gpt.tensor
    s, width = gpt.seq_length, gpt.hidden_size // gpt.num_attention_heads
    scores = HALF * heads * s * s
    to_scores, from_scores = _batched(heads, s, s, width), _batched(heads, s, width, s)
    dropped = [Launch("native_dropout", 5 * scores // 2)] if gpt.dropout else []
    kernels = {
        "_scaled_dot_product_flash_attention": [
            to_scores,
            Launch("scaled_masked_softmax", 2 * scores),
            *dropped,
            from_scores,
        ],
        "_scaled_dot_product_flash_attention_backward": [
            to_scores,
            from_scores,
            *dropped,
            Launch("scaled_masked_softmax_backward", 3 * scores),
            from_scores,
            from_scores,
        ],
    }
    return _changed(work, lambda launch: iter(kernels.get(launch.name, [launch])))


def separate_sums(work: Work) -> Work:
    """Return a pass whose weight gradients are written in 16 bits and then added to their sums.

    ``distributed.py`` of 2021 did so in a hook of every parameter: ``main_grad.add_(grad)``.
    """

    def change(launch: Launch) -> Iterator[Launch]:
        sizes = launch.product
        if sizes is None or not _adds(launch, sizes):
            yield launch
        else:
            yield product(sizes.m, sizes.n, sizes.k)
            yield Launch("add_", 3 * HALF * sizes.m * sizes.n)

    return _changed(work, change)


def waiting(work: Work) -> Work:
    """Return a pass that waits for every collective at once, as before 2022."""
    steps: list[Step] = []
    for step in work.steps:
        if isinstance(step, Begin):
            steps += step.collectives
        elif not isinstance(step, Await):
            steps.append(step)
    return Work(tuple(steps), work.left, work.peak)


def overlapping(work: Work) -> Work:
    """Return a pass in which a collective runs beside the product that it feeds or that feeds it.

    Transformer Engine cuts both into pieces (``--tp-comm-overlap``). That the first piece is not
    hidden is left out.
    """
    steps: list[Step] = []
    for step in work.steps:
        before = steps[-1] if steps else None
        if isinstance(step, Launch) and step.product and isinstance(before, Collective):
            steps[-1:] = [Begin((before,)), step, AWAIT]
        elif isinstance(step, Collective) and isinstance(before, Launch) and before.product:
            steps[-1:] = [Begin((step,)), before, AWAIT]
        else:
            steps.append(step)
    return Work(tuple(steps), work.left, work.peak)


def whole_output_layer(gpt: Shape, version: Version) -> tuple[Work, Work]:
    """Return what the output layer adds to F and to B of the last stage.

    Logits are in 16 bits and the loss in fp32. The tensor ranks reduce a maximum, a sum and the
    target's logit in three all-reduces.
    """
    n, h, rows, t = gpt.tokens, gpt.hidden_size, gpt.vocab_size // gpt.tensor, gpt.tensor
    entering: list[Step] = []
    leaving: list[Step] = []
    numbers: list[Step] = []
    if t > 1:
        numbers = [Collective("all_reduce", "tensor", t, FULL * n)] * 3
        leaving = [Collective("all_reduce", "tensor", t, gpt.activation)]
    if t > 1 and gpt.sequence_parallel:
        entering = [Collective("all_gather", "tensor", t, gpt.activation)]
        leaving = [Collective("reduce_scatter", "tensor", t, gpt.activation)]
    loss, gradient = LOSS_FORWARD * n * rows, LOSS_BACKWARD * n * rows
    forward = [*entering, product(n, rows, h), Launch("cross_entropy", loss), *numbers]
    backward = [
        Launch("cross_entropy_backward", gradient),
        product(n, h, rows),
        *leaving,
        product(rows, h, n, written=2 * FULL),
    ]
    return version.of(gpt, Work(tuple(forward))), version.of(gpt, Work(tuple(backward)))


def _adds(launch: Launch, sizes: Product) -> bool:
    """Return whether a product reads and writes a sum in fp32."""
    factors = HALF * sizes.batch * (sizes.m * sizes.k + sizes.k * sizes.n)
    return launch.bytes - factors == 2 * FULL * sizes.batch * sizes.m * sizes.n


def _batched(heads: int, m: int, n: int, k: int) -> Launch:
    size = HALF * heads * (m * k + k * n + m * n)
    return Launch("bmm", size, 2 * heads * m * n * k, Product(m, n, k, heads))


def _changed(work: Work, change: Callable[[Launch], Iterator[Launch]]) -> Work:
    """Return a pass with each kernel replaced."""
    steps: list[Step] = []
    for step in work.steps:
        steps += change(step) if isinstance(step, Launch) else [step]
    return Work(tuple(steps), work.left, work.peak)
