"""Imported models train as those of ``transformers`` do, from the same weights on the same tokens.

Of dense families, those stand here that have options of layers which no other family has.

Three conventions differ, and the loss here is ours. First, ``transformers`` takes shares of choices
and mean scores over all layers together, with shares that add up to k; here layers add up, and
shares add up to 1. With one layer of experts the two balancing losses are equal up to the factor k:
that of Qwen 3 is compared as ``transformers`` returns it. Second, the bias by which DeepSeek-V3
chooses experts stays as it is in ``transformers``; here its rate is 0. DeepSeek's models have no
balancing loss in ``transformers``, and none here. Third, the embedding of a padding token gets no
gradient in ``transformers``. Some families have such a token if nothing else is said, and the
random tokens here contain its number; so it is taken away.
"""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("transformers", reason="the reference: pip install transformers")

from checkpoint.foreign.known_models import weights
from correctness.agreement import errors
from correctness.rank_runs import assemble, check_agreement, check_copies, train_on_rank
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_loss import Microbatch
from reference.plain_training import AdamWOptions
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megatron.checkpoint.choose import choose, read_model
from megatron.checkpoint.settings import CheckpointSettings
from megatron.commands.convert_checkpoint import main as convert
from megatron.run.run_config import RunConfig
from tools.conversions_table import CONFIGS, VOCABULARY, random_model

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours

BALANCE = 0.3
"""Coefficient of the balancing loss: large, so that a wrong one is seen."""

JOB = Job(
    GPTOptions(num_layers=4, vocab_size=VOCABULARY),
    micro_batch_size=2,
    microbatches=2,
    iterations=6,
    warmup=1,
    sequence=12,
    adamw=AdamWOptions(adam_eps=1e-4, clip_grad=0.5, weight_decay=0.1),
)
"""Five steps: the rate of the first iteration is 0."""

CASES = {
    "mixtral": Layout(2, "vocab-2", "zb-h1"),
    "qwen 2 moe": Layout(1, "none", tensor=2, sequence=True),
    "qwen 3 moe": Layout(1, "none", replicas=2, experts=2, dispatcher="alltoall", sharded=True),
    "olmoe": Layout(2, "vocab-1", "zb-v"),
    "deepseek v2": Layout(2, "vocab-1", "zb-v"),
    "deepseek v2 lite": Layout(1, "none", replicas=2, experts=2),
    "deepseek v3": Layout(1, "vocab-1", tensor=2, sequence=True, expert_tensor=1, experts=2),
    "gpt-oss": Layout(2, "vocab-2"),
    "granite moe": Layout(1, "none", replicas=2, experts=2, dispatcher="alltoall"),
    "glm 4.5": Layout(2, "vocab-2", "zb-h1"),
    "dots.llm1": Layout(1, "vocab-1", tensor=2, sequence=True),
    "minimax m2": Layout(1, "none", tensor=2, sequence=True),
    "llama, biases of attention": Layout(1, "vocab-2", tensor=2, sequence=True),
    "olmo 2": Layout(1, "vocab-2", tensor=2, sequence=True),
    "olmo 3": Layout(2, "vocab-1", "zb-v"),
    "phi 3": Layout(2, "vocab-2"),
    "gpt-neox": Layout(1, "none", tensor=2, sequence=True),
    "granite": Layout(2, "vocab-1", "zb-v"),
    "smollm 3": Layout(2, "none"),
    "starcoder 2": Layout(1, "vocab-2", tensor=2, sequence=True),
    "opt": Layout(2, "vocab-2", "zb-h1"),
    "bloom": Layout(1, "none", replicas=2, sharded=True),
    "falcon 40b": Layout(1, "vocab-1", tensor=2),
    "cohere 2": Layout(2, "vocab-2", tensor=2, sequence=True),
    "glm 4 0414": Layout(2, "none", "zb-h1"),
    "nemotron": Layout(1, "none", tensor=2, sequence=True),
}

QUICK = {
    *("mixtral", "qwen 2 moe", "qwen 3 moe", "olmoe", "deepseek v2", "deepseek v2 lite"),
    *("deepseek v3", "gpt-oss", "minimax m2", "olmo 2", "gpt-neox", "granite", "cohere 2"),
}
"""Families of the default run."""

BALANCED = {"mixtral", "qwen 2 moe", "qwen 3 moe", "olmoe", "gpt-oss", "granite moe"}
"""Families with a balancing loss that is ours but for the conventions."""

CHANGED: dict[str, dict[str, Any]] = {
    "qwen 3 moe": {"decoder_sparse_step": 4},
    "olmoe": {"pad_token_id": None},
    "olmo 2": {"pad_token_id": None},
    "olmo 3": {"pad_token_id": None},
    "cohere 2": {"pad_token_id": None},
    "opt": {"pad_token_id": None, "dropout": 0.0},
    "minimax m2": {"router_aux_loss_coef": 0.0},
}
"""One layer of experts, so that the balancing loss of ``transformers`` is ours up to k; no token
whose embedding gets no gradient; no dropout; and none of MiniMax-M2's balancing loss, which has
shares of a softmax in ``transformers``, and of the sigmoids here."""


@pytest.mark.parametrize("family", [name if name in QUICK else full(name) for name in CASES])
def test_five_steps_are_those_of_transformers(family: str, ranks: RankPool, tmp_path: Path) -> None:
    layout, (kind, fields) = CASES[family], CONFIGS[family]
    with patch.dict(CONFIGS, {family: (kind, fields | CHANGED.get(family, {}))}):
        scale = 0.0 if family == "nemotron" else 1.0  # Nemotron keeps the distance from 1
        theirs = with_known_vectors(random_model(family), scale)
    theirs.save_pretrained(tmp_path / "start")
    convert(["import", str(tmp_path / "start"), str(tmp_path / "ours")])
    config = config_of(layout, tmp_path / "ours")
    runs = ranks.run(train_on_rank, layout.world_size, config=config, batches=JOB.batches())
    check_agreement(runs)
    check_copies(runs)

    balances = bool(config.model.balance.losses)
    assert balances == (family in BALANCED)
    losses, norms, first = train(theirs, balances=balances)
    assert runs[0].losses == pytest.approx([loss for loss, _ in losses], rel=1e-5)
    if balances:
        found = [own["load_balancing_loss"] for own in runs[0].layer_losses]
        assert found == pytest.approx([balance for _, balance in losses], rel=1e-5)
    assert runs[0].gradient_norms == pytest.approx(norms, rel=1e-5)
    gradients = assemble([own.first_gradients for own in runs])
    assert max(errors(gradients, in_our_words(first, tmp_path / "gradients")).values()) < 1e-5
    final = assemble([own.final for own in runs])
    assert max(errors(final, in_our_words(theirs, tmp_path / "end")).values()) < 1e-5


def with_known_vectors(model: Any, scale: float) -> Any:
    """Set biases, norms and sinks, which otherwise depend on memory that nobody has written.

    Weights of norms lie around ``scale``, all others around 0.
    """
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, own in model.named_parameters():
            if own.dim() == 1:
                mean = scale if "norm" in name else 0.0
                own.copy_(mean + 0.2 * torch.randn(own.shape, generator=generator))
    return model


def config_of(layout: Layout, where: Path) -> RunConfig:
    """The run of a model that was imported, with its balancing loss made large."""
    model = read_model(choose(where, None))
    if model.balance.losses:
        model = model.replaced(moe_aux_loss_coeff=(BALANCE,))
    model = model.replaced(seq_length=JOB.sequence, moe_router_bias_update_rate=0.0)
    loaded = CheckpointSettings(load=where, finetune=True)
    return replace(JOB.config(layout), model=model, checkpoint=loaded)


def train(model: Any, *, balances: bool) -> tuple[list[tuple[float, float]], list[float], Any]:
    """Train a model of ``transformers`` with PyTorch's AdamW.

    Returns:
        Of every iteration the loss and the mean balancing loss of the layers; the norms of the
        gradients before clipping; and a copy of the model whose weights are the first gradients.
    """
    model.train()
    matrices = {
        name for name, own in model.named_parameters() if own.dim() > 1 and "bias" not in name
    }
    decayed = [own for name, own in model.named_parameters() if name in matrices]
    others = [own for name, own in model.named_parameters() if name not in matrices]
    options = JOB.adamw
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
        weight_decay=options.weight_decay,
    )
    losses, norms, first = [], [], None
    for batch, rate in zip(JOB.batches(), JOB.learning_rates(), strict=True):
        optimizer.zero_grad()
        tokens = sum(float(own.loss_mask.sum()) for own in batch)
        parts = [of_microbatch(model, own, tokens, balances=balances) for own in batch]
        losses.append((sum(loss for loss, _ in parts), sum(balance for _, balance in parts)))
        first = first or with_gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        norms.append(float(norm))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return losses, norms, first


def of_microbatch(
    model: Any, microbatch: Microbatch, tokens: float, *, balances: bool
) -> tuple[float, float]:
    """Add a microbatch's gradients; return its part of the iteration's two losses."""
    given = {"output_router_logits": True} if balances else {}
    found = model(microbatch.tokens, **given)
    mask_bs = microbatch.loss_mask
    losses_n = torch.nn.functional.cross_entropy(
        found.logits.flatten(0, 1), microbatch.labels.flatten(), reduction="none"
    )
    loss = (losses_n * mask_bs.flatten()).sum() / tokens
    share = float(mask_bs.sum()) / tokens
    balance = torch.zeros(())
    if balances:
        values = model.config.to_dict()
        experts = values.get("num_experts", values.get("num_local_experts"))
        balance = share * balancing_loss(found, experts, values["num_experts_per_tok"])
    (loss + BALANCE * balance).backward()
    return float(loss), float(balance) / max(len(found.get("router_logits") or ()), 1)


def balancing_loss(found: Any, experts: int, topk: int) -> torch.Tensor:
    """The sum over layers, with shares that add up to 1; ``found`` is a forward's result."""
    logits = found.router_logits
    if len(logits) == 1:
        whole: torch.Tensor = found.aux_loss
        return whole / topk
    of_layers = [load_balancing_loss_func((own,), experts, topk) / topk for own in logits]
    return torch.stack(of_layers).sum()


def with_gradients(model: Any) -> Any:
    """A copy of a model whose weights are its gradients."""
    copy = deepcopy(model)
    with torch.no_grad():
        for own, other in zip(copy.parameters(), model.parameters(), strict=True):
            own.copy_(other.grad)
    return copy


def in_our_words(model: Any, folder: Path) -> Parameters:
    """The weights of a model of ``transformers`` by our names."""
    model.save_pretrained(folder / "theirs")
    convert(["import", str(folder / "theirs"), str(folder / "ours")])
    found = weights(choose(folder / "ours", None))
    return {name: own for name, own in found.items() if not name.endswith("expert_bias")}
