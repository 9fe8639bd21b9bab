"""Peak memory of the runs of arXiv 2411.05288, from the tensors that Megatron-LM holds.

What the first stage and the passes of the vocabulary hold follows the authors' code
(github.com/sail-sg/VocabularyParallelism; of V-Half sail-sg/zero-bubble-pipeline-parallelism) and
Megatron-LM's.
"""

from typing import Final

from megatron.schedules.passes import PassKind
from megatron.simulator.costs.count import FULL, HALF
from megatron.simulator.costs.peak_bytes import Sizes, peak_bytes
from tools.predictions.counted_layer import Shape
from tools.predictions.vocabulary_runs import VocabularyRun

PARAMETER: Final = 16
"""Bytes of a parameter with ``--fp16``: weight and gradient (2 each), Adam's fp32 weight, mean and
variance (12)."""

STEP: Final = 4
"""Bytes of a parameter that the optimizer's step takes beside: fp32 copies of its gradient
(``_copy_model_grads_to_main_grads``), when no activations are held."""

HELD_LOGIT: Final = 4
WORKING_LOGIT: Final = 2
"""Bytes of a logit: its exponential in fp32 is kept from S to T; the logit and its gradient in 16
bits come and go. Where W is apart, B leaves the gradient in 16 bits to W."""

B_ACTIVATIONS: Final = 9
"""Activations u that B works with: the gradients of the MLP's inner activation (4 u) before and
after GELU, and that of the stage's output."""

DENSE: Final = 2
"""Bytes of a parameter of a matrix of the vocabulary whose gradient is formed densely, in 16 bits,
before it is added: of the input layer at the end of B or in IB, and of the output layer in T."""

UNSORTED: Final = 3072
SUMMED_AT_ONCE: Final = 10
"""Tokens up to which PyTorch adds an embedding's gradient token by token; it sorts more of them by
word, and sums at most ten of a word at once (``embedding_dense_backward_cuda`` in its
``Embedding.cu``, ``NROWS_PER_THREAD`` in ``EmbeddingBackwardKernel.cu``)."""

LOOKED_UP: Final = 1
"""Activations u that the first stage keeps for B where the vocabulary is split: the embeddings as
they were received, beside what positions were added to."""

RECEIVED: Final = 2
"""Activations u that C0 brings: it is in fp32."""


def peak(run: VocabularyRun) -> float:
    """Return the bytes of the fullest rank of a run."""
    step = (PARAMETER + STEP) * max(parameters(run))
    return max(step, *peak_bytes(run.program, sizes(run)))


def sizes(run: VocabularyRun) -> Sizes:
    """Return the sizes of the tensors that the ranks of a run hold."""
    gpt = run.gpt
    u, logits = gpt.activation, gpt.tokens * gpt.vocab_size // run.shards
    working: dict[PassKind, list[list[float]]] = {
        kind: [[0.0] * run.chunks for _ in range(run.ranks)] for kind in ("F", "B", "W")
    }
    kept = [[0.0] * run.chunks for _ in range(run.ranks)]
    for (rank, chunk), layers in zip(run.stages, run.stage_layers, strict=True):
        kept[rank][chunk] = layers * gpt.kept
        working["B"][rank][chunk] = B_ACTIVATIONS * u
    first, last = run.stages[0], run.stages[-1]
    rows = gpt.vocab_size // run.shards
    dense = DENSE * rows * gpt.hidden_size
    embedded = dense + partial_sums(gpt, rows)
    kept[last[0]][last[1]] += u  # the final norm keeps its input
    exponentials = u + HELD_LOGIT * logits
    held = [float(PARAMETER * count) for count in parameters(run)]
    if not run.treatment.is_sharded:
        kept[last[0]][last[1]] += exponentials
        for kind in ("F", "B"):
            working[kind][last[0]][last[1]] += WORKING_LOGIT * logits
        # By then B has let go of the layers, unless ``WeightGradStore`` keeps their factors for W.
        at_end = embedded - (kept[first[0]][first[1]] if run.chunks == 1 else 0)
        working["B"][first[0]][first[1]] = max(working["B"][first[0]][first[1]], at_end)
        factors = [list(own) for own in kept]
        factors[last[0]][last[1]] -= (HELD_LOGIT - HALF) * logits
        return Sizes(held, kept, factors=factors, working=working)
    kept[first[0]][first[1]] += LOOKED_UP * u
    work = WORKING_LOGIT * logits
    received = 0 if run.treatment.synchronous else RECEIVED * u
    return Sizes(
        held,
        kept,
        exponentials=float(exponentials + received),
        embedding=[float(u) if rank == first[0] else 0.0 for rank in range(run.ranks)],
        embedding_gradient=float(u),
        working={
            **working,
            "S": float(work),
            "T": float(max(work, dense)),
            "IB": float(embedded),
        },
    )


def partial_sums(gpt: Shape, rows: int) -> int:
    """Return the bytes that PyTorch needs beside the gradient of an embedding with ``rows`` rows.

    These are sums in fp32, and there is room for as many as there could be.
    """
    if gpt.tokens <= UNSORTED:
        return 0
    return FULL * gpt.hidden_size * (gpt.tokens // SUMMED_AT_ONCE + min(gpt.tokens, rows))


def parameters(run: VocabularyRun) -> list[int]:
    """Return the parameters of every rank; positions are embedded on the first stage."""
    gpt = run.gpt
    counts = [0] * run.ranks
    for (rank, _), layers in zip(run.stages, run.stage_layers, strict=True):
        counts[rank] += layers * gpt.parameters
    matrix = gpt.vocab_size * gpt.hidden_size
    counts[run.stages[0][0]] += gpt.seq_length * gpt.hidden_size
    if run.treatment.is_sharded:
        return [own + 2 * matrix // run.ranks for own in counts]
    counts[run.stages[0][0]] += matrix
    counts[run.stages[-1][0]] += matrix
    return counts
