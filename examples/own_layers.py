"""Layers of one's own in a pipeline: ZB-V with vocabulary parallelism on two ranks.

PyTorch's transformer layers are the stages. PipelineRunner has this project's executor run them by
a plan: two chunks a rank in a V, weight gradients as passes of their own, embedding and output
layer spread over both ranks. The optimizer is PyTorch's.

    python examples/own_layers.py

You should see the losses of five steps beside those of the same model in one process: equal but for
rounding errors.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megatron.library.plans import own_stages, plan
from megatron.library.runner import PipelineRunner
from megatron.library.vocabulary import VocabParallelEmbedding, VocabParallelHead

RANKS, MICROBATCHES, STAGES = 2, 4, 4
VOCABULARY, HIDDEN, HEADS, SEQUENCE, STEPS = 503, 32, 4, 16, 5


class Layer(nn.Module):
    """A causal transformer layer: whatever turns [b, s, h] into [b, s, h] may be a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, x_bsh: Tensor) -> Tensor:
        """Run the layer; what else it wants, here its mask, it makes itself."""
        mask = nn.Transformer.generate_square_subsequent_mask(x_bsh.shape[1], dtype=x_bsh.dtype)
        y_bsh: Tensor = self.layer(x_bsh, src_mask=mask, is_causal=True)
        return y_bsh


def initial() -> tuple[Tensor, Tensor, list[nn.Module]]:
    """Return embedding [V, h], output matrix [V, h] and all stages: the same in every process."""
    torch.manual_seed(0)
    embedding_vh, output_vh = (
        torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64) * 0.1 for _ in range(2)
    )
    return embedding_vh, output_vh, [Layer().double() for _ in range(STAGES)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and labels of a step, [samples, s]."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (2 * MICROBATCHES, SEQUENCE + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def pipeline_losses(rank: int, ranks: int) -> list[float]:
    """Train on this rank of the pipeline, together with the others."""
    made = plan("zb-v", ranks, MICROBATCHES, vocabulary="vocab-2")
    embedding_vh, output_vh, whole = initial()
    stages = [whole[stage] for stage in own_stages(made, rank)]
    embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN, dtype=torch.float64)
    head = VocabParallelHead(HIDDEN, VOCABULARY, dtype=torch.float64)
    embedding.load_whole(embedding_vh)
    head.load_whole(output_vh)
    runner = PipelineRunner(made, stages, hidden_size=HIDDEN, embedding=embedding, head=head)
    own = nn.ModuleList([*stages, embedding, head])
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        losses.append(float(runner.step(*batch(step))))
        optimizer.step()
        optimizer.zero_grad()
    runner.close()
    return losses


def whole_losses() -> list[float]:
    """Train the same model in this process."""
    embedding_vh, output_vh, stages = initial()
    embedding, output = nn.Parameter(embedding_vh), nn.Parameter(output_vh)
    body = nn.Sequential(*stages)
    optimizer = torch.optim.AdamW([embedding, output, *body.parameters()], lr=0.01)
    losses = []
    for step in range(STEPS):
        tokens, labels = batch(step)
        logits = body(functional.embedding(tokens, embedding)) @ output.T
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def play(rank: int, meeting_place: str) -> None:
    """Be one rank: meet the other, train, and let rank 0 print."""
    dist.init_process_group("gloo", f"file://{meeting_place}", rank=rank, world_size=RANKS)
    losses = pipeline_losses(rank, RANKS)
    if rank == 0:
        for step, (split, whole) in enumerate(zip(losses, whole_losses(), strict=True)):
            print(f"step {step}: loss {split:.8f} in the pipeline, {whole:.8f} in one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(play, (f"{folder}/meeting",), nprocs=RANKS)
