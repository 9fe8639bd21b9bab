"""Hugging Face's Llama layers as stages: every plan trains like the unsplit model."""

import copy
import re
from collections.abc import Mapping
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from harness.rank_pool import RankPool
from torch import Tensor, nn

from megatron.library.plans import Plan, own_stages, plan
from megatron.library.runner import PipelineRunner
from megatron.library.vocabulary import IGNORED, VocabParallelEmbedding, VocabParallelHead

pytest.importorskip("transformers")

V, H, LAYERS, MICROBATCHES, SAMPLES, SEQUENCE = 37, 16, 4, 4, 8, 6
PLANS: Final[Mapping[str, tuple[str, str]]] = {
    f"{schedule}, {vocabulary}": (schedule, vocabulary)
    for schedule in ("1f1b", "interleaved", "zb-v")
    for vocabulary in ("none", "vocab-2")
} | {"zb-h1, naive": ("zb-h1", "naive"), "v-half, vocab-1": ("v-half", "vocab-1")}


def whole_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double()


class LlamaStage(nn.Module):
    """Some layers of a model; the last stage has the final norm too."""

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        count = LAYERS // stages
        self.layers = model.layers[stage * count : (stage + 1) * count]
        self.norm = model.norm if stage == stages - 1 else nn.Identity()
        self.rotation = model.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        turns = self.rotation(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=turns)
        y: Tensor = self.norm(x)
        return y


class PlainHead(nn.Module):
    """Any head: all logits, and PyTorch's cross entropy."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x).flatten(0, 1), labels.flatten())


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels; every microbatch has as many labels that count."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (SAMPLES, SEQUENCE + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[::2, 2] = IGNORED
    return ids[:, :-1], labels


def expected(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_runner(made: Plan, model: Any, rank: int) -> PipelineRunner:
    """The runner of a rank; a vocabulary that is not split has modules of no special kind."""
    stages = [LlamaStage(model.model, s, len(made.stages)) for s in own_stages(made, rank)]
    if not made.treatment.is_sharded:
        embedding, plain = model.model.embed_tokens, PlainHead(model.lm_head)
        return PipelineRunner(made, stages, hidden_size=H, embedding=embedding, head=plain)
    embedding = VocabParallelEmbedding(V, H, dtype=torch.float64)
    head = VocabParallelHead(H, V, dtype=torch.float64)
    embedding.load_whole(model.model.embed_tokens.weight)
    head.load_whole(model.lm_head.weight)
    return PipelineRunner(made, stages, hidden_size=H, embedding=embedding, head=head)


def rows_of_shard(module: Any, reference: Tensor) -> tuple[Tensor, Tensor]:
    first, real = module.shard.first_real_row, module.shard.real_rows
    return module.weight.grad[:real], reference[first : first + real]


def faults(rank: int, world_size: int, schedule: str, vocabulary: str) -> tuple[float, int]:
    """Return the largest relative fault of losses and gradients, and the number of gradients."""
    made = plan(schedule, world_size, MICROBATCHES, vocabulary=vocabulary)
    reference, model = whole_model(), whole_model()
    tokens, labels = batch()
    runner = make_runner(made, model, rank)
    before = runner.evaluate(tokens, labels)
    losses = [runner.step(tokens, labels) for _ in range(2)]  # gradients add up
    runner.close()
    loss = expected(reference, tokens, labels)
    (2 * loss).backward()
    pairs = [(own.detach(), loss.detach()) for own in (*losses, before)]
    theirs = dict(reference.named_parameters())
    own_layers = {
        f"layers.{layer}."
        for stage in own_stages(made, rank)
        for layer in range(
            LAYERS // len(made.stages) * stage, LAYERS // len(made.stages) * (stage + 1)
        )
    }
    ends = {name for name, place in (("norm", -1),) if made.stages[place][0] == rank}
    if not made.treatment.is_sharded:
        ends |= {"embed_tokens"} if made.stages[0][0] == rank else set()
        ends |= {"lm_head"} if made.stages[-1][0] == rank else set()
    else:
        pairs.append(rows_of_shard(runner._head, theirs["lm_head.weight"].grad))
        pairs.append(rows_of_shard(runner._embedding, theirs["model.embed_tokens.weight"].grad))
    for name, parameter in model.named_parameters():
        inner = name.removeprefix("model.")
        mine = inner.split(".")[0] in ends or any(inner.startswith(own) for own in own_layers)
        assert (parameter.grad is not None) == mine, name
        if parameter.grad is not None:
            pairs.append((parameter.grad, theirs[name].grad))
    return max(float((a - b).norm() / b.norm().clamp_min(1e-9)) for a, b in pairs), len(pairs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PLANS)
def test_a_pipeline_of_llama_layers_is_the_unsplit_model(ranks: RankPool, name: str) -> None:
    schedule, vocabulary = PLANS[name]
    found = ranks.run(faults, 2, schedule=schedule, vocabulary=vocabulary)
    assert max(fault for fault, _ in found) < 1e-9
    # 13 gradients of a layer, 3 losses a rank, the norm, embedding and head (a part on each rank)
    parts = 2 if vocabulary == "none" else 4
    assert sum(count for _, count in found) == 13 * LAYERS + 3 * 2 + 1 + parts


class Block(nn.Module):
    """A layer whose weight is used outside of any ``nn.Linear`` too, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.frozen = nn.Linear(H, H).requires_grad_(False)
        self.free = nn.Parameter(torch.randn(H, H) / H)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.frozen(torch.tanh(self.linear(x) @ self.free + x @ self.linear.weight))
        return y


def test_any_module_may_be_split_on_one_rank() -> None:
    torch.manual_seed(0)
    blocks = [Block().double() for _ in range(2)]
    embedding, head = nn.Embedding(V, H).double(), PlainHead(nn.Linear(H, V).double())
    reference = copy.deepcopy(nn.ModuleList([embedding, *blocks, head]))
    tokens, labels = batch()
    made = plan("zb-v", 1, MICROBATCHES)
    runner = PipelineRunner(made, blocks, hidden_size=H, embedding=embedding, head=head)
    losses = [float(runner.step(tokens, labels)) for _ in range(2)]
    runner.close()
    plain_embedding, first, second, plain_head = reference
    loss = plain_head(second(first(plain_embedding(tokens))), labels)
    (2 * loss).backward()
    assert losses == pytest.approx(2 * [float(loss.detach())], abs=1e-12)
    mine = nn.ModuleList([embedding, *blocks, head])
    for (name, own), plain in zip(mine.named_parameters(), reference.parameters(), strict=True):
        assert (own.grad is None) == (plain.grad is None), name
        if own.grad is not None and plain.grad is not None:
            assert torch.allclose(own.grad, plain.grad, rtol=0, atol=1e-12), name
    out = blocks[0](torch.ones(1, H, dtype=torch.float64)).sum()
    grad = torch.autograd.grad(out, blocks[0].linear.weight)
    assert grad[0].any(), "closed, a layer forms its own gradients again"


def test_w_does_the_products_of_the_weights() -> None:
    """Between B and W a linear layer's gradient is not there yet."""
    made = plan("zb-h1", 1, 1)
    assert [item.kind for item in made.rows[0]] == ["F", "B", "W"]
    stage = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.LayerNorm(H))
    runner = PipelineRunner(
        made,
        [stage],
        hidden_size=H,
        embedding=nn.Embedding(V, H),
        head=PlainHead(nn.Linear(H, V)),
    )
    seen: dict[str, tuple[bool, bool]] = {}
    table = dict(runner._passes.table)

    def watched(kind: Any) -> Any:
        def run(item: Any) -> None:
            table[kind](item)
            linear, norm = stage[0], stage[2]
            assert isinstance(linear, nn.Linear)
            assert isinstance(norm, nn.LayerNorm)
            has_norm = norm.weight.grad is not None and bool(norm.weight.grad.any())
            has_linear = linear.weight.grad is not None and bool(linear.weight.grad.any())
            seen[kind] = has_norm, has_linear

        return run

    runner._passes.table = {kind: watched(kind) for kind in table}
    tokens, labels = batch()
    runner.step(tokens, labels)
    assert {kind: seen[kind] for kind in "FBW"} == {
        "F": (False, False),
        "B": (True, False),
        "W": (True, True),
    }


def test_bf16_gradients_add_up_in_fp32() -> None:
    torch.manual_seed(0)
    stage, head = nn.Linear(H, H).bfloat16(), PlainHead(nn.Linear(H, V).bfloat16())
    runner = PipelineRunner(
        plan("zb-h1", 1, SAMPLES),
        [stage],
        hidden_size=H,
        embedding=nn.Embedding(V, H).bfloat16(),
        head=head,
    )
    tokens, labels = batch()
    assert runner.step(tokens, labels).dtype == torch.float32
    assert stage.weight.grad is not None
    assert stage.weight.grad.dtype == torch.bfloat16
    once = stage.weight.grad.clone()
    runner.step(tokens, labels)
    assert torch.equal(stage.weight.grad, once + once)
    assert not hasattr(stage.weight, "main_grad")


class Wider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, 2 * H)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def test_a_stage_that_changes_the_shape_is_refused() -> None:
    runner = PipelineRunner(
        plan("1f1b", 1, MICROBATCHES),
        [Wider()],
        hidden_size=H,
        embedding=nn.Embedding(V, H),
        head=PlainHead(nn.Linear(H, V)),
    )
    with pytest.raises(ValueError, match=re.escape("chunk 0 makes (2, 6, 32)")):
        runner.step(*batch())


@pytest.mark.parametrize(
    ("made", "parts", "message"),
    [
        (("1f1b", 2), {}, "the plan is for 2 ranks, the process group has 1"),
        (("zb-v", 1), {}, "1 stages for 2 chunks of rank 0"),
        (("1f1b", 1), {"embedding": None}, "rank 0 has the stage of the embedding: give it"),
        (("1f1b", 1), {"head": None}, "rank 0 has the stage of the head: give it"),
        (("1f1b", 1), {"stages": [nn.Identity()]}, "the stages have no parameter"),
    ],
)
def test_what_does_not_fit_the_plan_is_refused(
    made: tuple[str, int], parts: dict[str, Any], message: str
) -> None:
    whole: dict[str, Any] = {
        "stages": [nn.Linear(H, H)],
        "embedding": nn.Embedding(V, H),
        "head": PlainHead(nn.Linear(H, V)),
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        PipelineRunner(plan(*made, MICROBATCHES), hidden_size=H, **whole | parts)


def test_a_split_vocabulary_wants_its_layers() -> None:
    made = plan("1f1b", 1, MICROBATCHES, vocabulary="vocab-2")
    embedding, head = VocabParallelEmbedding(V, H), VocabParallelHead(H, V)
    stage = nn.Linear(H, H)
    runner = PipelineRunner(made, [stage], hidden_size=H, embedding=embedding, head=head)
    tokens, labels = batch()
    loss = runner.step(tokens, labels)
    plain = head(stage(embedding(tokens)), labels)
    assert float(loss) == pytest.approx(float(plain.detach()), rel=1e-5)
    with pytest.raises(ValueError, match=r"give both as \[samples, tokens\], with a multiple of"):
        runner.step(tokens[:3], labels[:3])
    with pytest.raises(ValueError, match="give every rank a VocabParallelHead over the pipeline"):
        PipelineRunner(
            made, [stage], hidden_size=H, embedding=embedding, head=PlainHead(nn.Linear(H, V))
        )
