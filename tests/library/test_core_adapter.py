"""Megatron-Core's GPT under our plans, beside its own schedules and the unsplit model, on CPUs.

The package is not among what the tests need: ``pip install megatron-core`` in an environment of
one's own, or its folder on ``PYTHONPATH``.
"""

from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import pytest
import torch
from harness.megatron_core import core_on_cpu, core_ranks, needs_core
from harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.nn import functional

from megatron.library.megatron_core import REFUSED, check_arguments, forward_backward_func
from megatron.library.plans import Plan, own_stages, plan
from megatron.library.runner import PipelineRunner
from megatron.library.vocabulary import VocabParallelEmbedding, VocabParallelHead

V, H, S, B, LAYERS, MICROBATCHES = 37, 16, 8, 2, 4, 6


def config(ranks: int, chunks: int) -> Any:
    made = import_module("megatron.core.transformer.transformer_config").TransformerConfig
    return made(
        num_layers=LAYERS,
        hidden_size=H,
        num_attention_heads=4,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        # Of two ranks one is before and after the other, and a batch would mix the messages up.
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def whole_model(made: Plan) -> list[Any]:
    """A GPT of Megatron-Core as its stages, in the order of the data, the same on every rank."""
    model = import_module("megatron.core.models.gpt.gpt_model").GPTModel
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    torch.manual_seed(0)
    own, last = config(made.ranks, made.chunks), len(made.stages) - 1
    return [
        model(
            own,
            specs.get_gpt_layer_local_spec(),
            vocab_size=V,
            max_sequence_length=S,
            pre_process=stage == 0,
            post_process=stage == last,
            share_embeddings_and_output_weights=False,
            vp_stage=chunk if made.chunks > 1 else None,
        )
        for stage, (_, chunk) in enumerate(made.stages)
    ]


def batch() -> list[dict[str, Tensor]]:
    """Microbatches, each with another number of tokens that count."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for i in range(MICROBATCHES):
        ids = torch.randint(V, (B, S + 1), generator=generator)
        mask = (torch.arange(B * S).view(B, S) % (i + 2) != 0).float()
        made.append({"tokens": ids[:, :-1], "labels": ids[:, 1:], "mask": mask})
    return made


def output_of(model: Any, own: dict[str, Tensor]) -> Tensor:
    later = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(S)[None].expand(B, S)
    found: Tensor = model(own["tokens"], positions, later, labels=own["labels"])
    return found


def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """As Megatron-LM's pretrain_gpt.py has it."""
    own = next(iterator)
    return output_of(model, own), partial(loss_of, own["mask"])


def loss_of(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, tokens = (losses * mask).sum(), mask.sum().int()
    return total, tokens, {"loss": torch.stack([total.detach(), tokens.float()])}


def run(step: Any, chunks: list[Any], *, forward_only: bool = False) -> list[dict[str, Tensor]]:
    """What a forward_backward_func reports; gradients are in the chunks."""
    for chunk in chunks:
        chunk.zero_grad()
    with torch.set_grad_enabled(not forward_only):
        found: list[dict[str, Tensor]] = step(
            forward_step_func=forward_step,
            data_iterator=[iter(batch()) for _ in chunks] if len(chunks) > 1 else iter(batch()),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=MICROBATCHES,
            seq_length=S,
            micro_batch_size=B,
            forward_only=forward_only,
        )
    return found


def train_whole(stages: list[Any]) -> list[Tensor]:
    """Return what is reported by the unsplit model; gradients are in its stages."""
    reported = []
    for own in batch():
        x: Tensor | None = None
        for stage in stages:
            stage.set_input_tensor(x)
            x = output_of(stage, own)
        assert x is not None
        total, tokens, report = loss_of(own["mask"], x)
        (total / tokens / MICROBATCHES).backward()
        reported.append(report["loss"])
    return reported


def gradients(chunks: list[Any]) -> list[Tensor]:
    """Copies of all gradients; there is one of every parameter."""
    found = [parameter.grad for chunk in chunks for parameter in chunk.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient.clone() for gradient in found if gradient is not None]


class Found(NamedTuple):
    """What a rank has found.

    Attributes:
        parameters: of this rank.
        core: largest difference of gradients and reports from Megatron-Core's own schedule.
        whole: largest relative difference from the unsplit model.
        reports: of the loss function in training, and in evaluation.
    """

    parameters: int
    core: float
    whole: float
    reports: tuple[int, int]


def compare(
    rank: int, world_size: int, *, schedule: str, chunks: int, frees: bool, beside: bool
) -> Found:
    """Train by our plan, by Megatron-Core's own function, and without a pipeline."""
    made = plan(schedule, world_size, MICROBATCHES, chunks=chunks if chunks > 1 else None)
    with core_on_cpu(), core_ranks(chunks):
        core = import_module("megatron.core.pipeline_parallel.schedules")
        whole = whole_model(made)
        again = whole_model(made)
        own = [again[stage] for stage in own_stages(made, rank)]
        own[0].config.deallocate_pipeline_outputs = frees
        ours = forward_backward_func(schedule)
        evaluated = run(ours, own, forward_only=True)
        reports = run(ours, own)
        found = gradients(own)
        expected = train_whole(whole)
        theirs = gradients([whole[stage] for stage in own_stages(made, rank)])
        pairs = list(zip(found, theirs, strict=True))
        for several_reports in (reports, evaluated) if reports else ():
            pairs += list(zip((r["loss"] for r in several_reports), expected, strict=True))
        distance = 0.0
        if beside:
            their_reports = run(core.get_forward_backward_func(), own)
            told = zip(reports, their_reports, strict=True)
            both = list(zip(found, gradients(own), strict=True))
            both += [(one["loss"], other["loss"]) for one, other in told]
            distance = max(float((one - other).abs().max()) for one, other in both)
    faults = [float((one - other).norm() / other.norm()) for one, other in pairs]
    return Found(len(found), distance, max(faults), (len(reports), len(evaluated)))


CASES: Final[dict[str, dict[str, Any]]] = {
    "1f1b": {"schedule": "1f1b", "chunks": 1, "frees": False, "beside": True},
    "1f1b, outputs freed": {"schedule": "1f1b", "chunks": 1, "frees": True, "beside": True},
    "interleaved": {"schedule": "interleaved", "chunks": 2, "frees": False, "beside": True},
    "gpipe": {"schedule": "gpipe", "chunks": 1, "frees": False, "beside": False},
    "1f1b-v": {"schedule": "1f1b-v", "chunks": 2, "frees": False, "beside": False},
    "zb-h1": {"schedule": "zb-h1", "chunks": 1, "frees": False, "beside": False},
    "zb-2p": {"schedule": "zb-2p", "chunks": 1, "frees": True, "beside": False},
    "zb-v": {"schedule": "zb-v", "chunks": 2, "frees": True, "beside": False},
    "v-half": {"schedule": "v-half", "chunks": 2, "frees": False, "beside": False},
    "v-min": {"schedule": "v-min", "chunks": 2, "frees": False, "beside": False},
    "dualpipe-v": {"schedule": "dualpipe-v", "chunks": 2, "frees": True, "beside": False},
    "hanayo": {"schedule": "hanayo", "chunks": 2, "frees": False, "beside": False},
}
"""Those that Megatron-Core has itself are compared with its own, too."""


@pytest.mark.parametrize("case", CASES)
def test_a_gpt_of_megatron_core_is_trained_by_our_plan(ranks: RankPool, case: str) -> None:
    needs_core()
    found = ranks.run(compare, 2, **CASES[case])
    assert sum(own.parameters for own in found) == 12 * LAYERS + 5
    assert max(own.core for own in found) == 0
    assert max(own.whole for own in found) < 1e-5
    last, _ = plan(CASES[case]["schedule"], 2, MICROBATCHES).stages[-1]
    assert found[last].reports == (MICROBATCHES, MICROBATCHES)
    assert found[1 - last].reports == (0, 0)


class BlockStage(nn.Module):
    """A ``TransformerBlock`` of Megatron-Core as a stage of ``PipelineRunner``."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block
        block.pre_process = True  # it is given its input

    def forward(self, x_bsh: Tensor) -> Tensor:
        later = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
        y_sbh: Tensor = self.block(x_bsh.transpose(0, 1).contiguous(), later)
        return y_sbh.transpose(0, 1)


def blocks_fault(
    rank: int, world_size: int, *, schedule: str, vocabulary: str
) -> tuple[float, int]:
    """Return the largest relative fault of loss and gradients, and how many were compared."""
    made = plan(schedule, world_size, MICROBATCHES, vocabulary=vocabulary)
    with core_on_cpu(), core_ranks(made.chunks):
        whole, again = ([BlockStage(s.decoder) for s in whole_model(made)] for _ in range(2))
        numbers = own_stages(made, rank)
        mine = [again[number] for number in numbers]
        embedding, head = VocabParallelEmbedding(V, H), VocabParallelHead(H, V)
        generator = torch.Generator().manual_seed(3)
        table, matrix = (torch.randn(V, H, generator=generator) for _ in range(2))
        embedding.load_whole(table)
        head.load_whole(matrix)
        ids = torch.randint(V, (B * MICROBATCHES, S + 1), generator=generator)
        tokens, labels = ids[:, :-1], ids[:, 1:]
        runner = PipelineRunner(made, mine, hidden_size=H, embedding=embedding, head=head)
        loss = runner.step(tokens, labels)
        runner.close()
        x = functional.embedding(tokens, table)
        for stage in whole:
            x = stage(x)
        matrix.requires_grad_()
        expected = functional.cross_entropy((x @ matrix.T).flatten(0, 1), labels.flatten())
        expected.backward()
    first, rows = head.shard.first_real_row, head.shard.real_rows
    assert matrix.grad is not None
    assert head.weight.grad is not None
    pairs = [
        (loss, expected.detach()),
        (head.weight.grad[:rows], matrix.grad[first : first + rows]),
    ]
    for number, stage in zip(numbers, mine, strict=True):
        own, theirs = (gradients([one]) for one in (stage, whole[number]))
        pairs += list(zip(own, theirs, strict=True))
    return max(float((a - b).norm() / b.norm()) for a, b in pairs), len(pairs)


@pytest.mark.parametrize(
    ("schedule", "vocabulary"),
    [
        ("zb-v", "vocab-2"),
        ("1f1b", "vocab-1"),
        ("interleaved", "naive"),
        ("v-half", "interlaced"),
        ("zb-h1", "vocab-2"),
    ],
)
def test_transformer_blocks_train_with_a_split_vocabulary(
    ranks: RankPool, schedule: str, vocabulary: str
) -> None:
    needs_core()
    found = ranks.run(blocks_fault, 2, schedule=schedule, vocabulary=vocabulary)
    assert max(fault for fault, _ in found) < 1e-4
    assert sum(count for _, count in found) == 12 * LAYERS + 2 + 2 * 2


@pytest.mark.parametrize(
    ("made", "microbatches", "chunks", "message"),
    [
        (plan("1f1b", 2, 4), 6, 1, "4 microbatches and 1 chunks .* the run has 2, 6 and 1: make"),
        (plan("1f1b", 2, 6, vocabulary="vocab-2"), 6, 1, "splits the vocabulary .*vocab-2"),
        (plan("zb-v", 2, 6), 6, 1, "and 2 chunks of the model on each, the run has 2, 6 and 1"),
    ],
    ids=["microbatches", "vocabulary", "chunks"],
)
def test_a_plan_that_does_not_fit_is_refused(
    made: Plan, microbatches: int, chunks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        forward_backward_func(made).plan(2, microbatches, chunks)


def test_microbatches_out_of_order_are_refused() -> None:
    made = plan("1f1b", 1, 2)
    (row,) = made.rows
    later = tuple(item._replace(microbatch=1 - item.microbatch) for item in row)
    with pytest.raises(ValueError, match=r"chunk 0 on rank 0 out of order.*take another schedule"):
        forward_backward_func(replace(made, rows=(later,))).plan(1, 2, 1)


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_whose_effect_would_be_missing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"has {name}: .*(leave|pad)"):
        check_arguments(SimpleNamespace(**{name: True}), None, None, None)


def test_arguments_whose_effect_would_be_missing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"adjust_tensor_shapes_fn: .* leave it out"):
        check_arguments(SimpleNamespace(), None, print, None)
    with pytest.raises(ValueError, match=r"cuda_graph_impl 'local': .* use 'none'"):
        check_arguments(SimpleNamespace(cuda_graph_impl="local"), None, None, None)
