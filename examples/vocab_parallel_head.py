"""A language model of one's own whose vocabulary is split over two ranks: loss.backward() works.

The body is any PyTorch code, here one layer that every rank has whole (it could be
tensor-parallel). Embedding and head are split by VocabParallelEmbedding and VocabParallelHead, tied
to one matrix. No rank ever has the logits of all tokens over the whole vocabulary.

    python examples/vocab_parallel_head.py

You should see the losses of ten steps, which fall, beside those of the same model in one process
with torch.nn.functional.cross_entropy: equal in all digits. Then the log-probabilities of some
tokens, as reinforcement learning needs them.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megatron.library.vocabulary import VocabParallelEmbedding, VocabParallelHead

RANKS, VOCABULARY, HIDDEN, STEPS = 2, 1001, 32, 10


def data() -> tuple[Tensor, Tensor]:
    """Return tokens and the token after each, [b, s]."""
    ids = torch.randint(VOCABULARY, (4, 33), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def split_losses() -> tuple[list[float], Tensor]:
    """Train with a split vocabulary; return the losses, and log-probabilities at the end."""
    whole_vh, body = initial()
    embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN, dtype=torch.float64)
    embedding.load_whole(whole_vh)
    head = VocabParallelHead(HIDDEN, VOCABULARY, weight=embedding.weight)
    optimizer = torch.optim.AdamW([embedding.weight, *body.parameters()], lr=0.01)
    tokens, targets = data()
    losses = []
    for _ in range(STEPS):
        loss = head(body(embedding(tokens)), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        return losses, head.log_probs(body(embedding(tokens)), targets)


def whole_losses() -> tuple[list[float], Tensor]:
    """Train the same model with the whole matrix in this process."""
    whole_vh, body = initial()
    weight = nn.Parameter(whole_vh)
    optimizer = torch.optim.AdamW([weight, *body.parameters()], lr=0.01)
    tokens, targets = data()
    losses = []
    for _ in range(STEPS):
        logits = body(functional.embedding(tokens, weight)) @ weight.T
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        logits = body(functional.embedding(tokens, weight)) @ weight.T
        return losses, logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def initial() -> tuple[Tensor, nn.Module]:
    """Return the matrix [V, h] and the body that every process begins with."""
    torch.manual_seed(0)
    whole_vh = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64) * 0.1
    return whole_vh, nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()).double()


def play(rank: int, meeting_place: str) -> None:
    """Be one rank: meet the other, train, and let rank 0 print."""
    dist.init_process_group("gloo", f"file://{meeting_place}", rank=rank, world_size=RANKS)
    losses, log_probs = split_losses()
    if rank == 0:
        expected, expected_log_probs = whole_losses()
        for step, (split, whole) in enumerate(zip(losses, expected, strict=True)):
            print(f"step {step}: loss {split:.10f} split, {whole:.10f} whole")
        print(f"log-probabilities: {log_probs[0, :4].tolist()}")
        print(f"differ by {float((log_probs - expected_log_probs).abs().max()):.0e} at most")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(play, (f"{folder}/meeting",), nprocs=RANKS)
