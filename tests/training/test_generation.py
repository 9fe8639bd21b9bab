"""Text that is written in training: the same in every layout, and training does not notice.

The reference is another program: the model for inference, with cached keys, from the checkpoint
that the run saves at the same iteration.
"""

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from hashlib import sha1
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from correctness.rank_runs import ListLoader, connected
from correctness.short_runs import EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA, Job, Layout
from correctness.test_experts import DEEPSEEK, MIXTRAL
from harness.marks import full
from harness.rank_pool import RankPool
from inference.imported import opened
from reference.plain_gpt import GPTOptions

from megatron.checkpoint.settings import CheckpointSettings
from megatron.inference.generate import answers, generate
from megatron.inference.sampling import Sampling
from megatron.inference.words import Words
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.run.generate import GenerateSettings
from megatron.run.records import RecordSettings
from megatron.run.run_config import RunConfig
from megatron.training.generation import MOST_SHORT_ROWS, rows_at_once
from megatron.training.loop import train
from megatron.training.open_data import Data
from megatron.training.open_prompts import Prompts
from megatron.training.own_tokens import kept_tokens
from megatron.training.setup import build_train_state

PROMPTS = ((5, 17, 33, 8, 21, 36, 3, 11, 12), (7,), (23, 23, 30, 14), (1, 2), (30, 29, 28))
NEW, END = 7, 9
LENGTH = 96
"""Tokens of a sample; prompts and their answers need fewer, so that rows are shorter."""

GPT = replace(
    EIGHT_LAYER_GPT,
    num_layers=4,
    logit_softcap=3.0,
    max_position_embeddings=LENGTH,
)
LLAMA = replace(EIGHT_LAYER_LLAMA, num_layers=4, num_query_groups=2)
WINDOWS = replace(LLAMA, window_size=5, window_pattern=(1, 0))
AHEAD = replace(LLAMA, mtp_num_layers=1)


class Loader(ListLoader):
    """Batches, as a run that saves reads them."""

    def digest(self, sample: int) -> str:
        return str(sample)


def run_on_rank(rank: int, world_size: int, *, job: Job, config: RunConfig) -> str:
    groups = connected(config)
    state = build_train_state(config, groups)
    mine = groups.replica, kept_tokens(config, groups.context.rank)
    depths = config.model.further.mtp_num_layers
    words = Words(Words.ids(config.model.vocab_size - 1).tokenizer, END, are_ids=True)
    texts = tuple(" ".join(map(str, prompt)) for prompt in PROMPTS)
    data = Data(Loader(job.batches(), *mine, depths), prompts=Prompts(words, texts, PROMPTS))
    with redirect_stdout(io.StringIO()) as out:
        train(config, state, data)
    assert not len(state.pipeline.store)
    return out.getvalue()


def config_of(
    job: Job, layout: Layout, folder: Path | None, *, interval: int | None, **how: Any
) -> RunConfig:
    config = job.config(layout)
    records = RecordSettings(log_jsonl=None if folder is None else folder / "run.jsonl")
    own = GenerateSettings(interval, generate_max_new_tokens=NEW, **how)
    return replace(
        config,
        train=replace(config.train, eval_interval=None),
        log=replace(config.log, peak_tflops=1.0, records=records, generate=own),
        checkpoint=CheckpointSettings(save=folder),
    )


def job_of(options: GPTOptions, samples: int = 1, dropout: float = 0.0) -> Job:
    return Job(
        options,
        samples,
        microbatches=4,
        iterations=3,
        warmup=1,
        sequence=LENGTH,
        dropout=dropout,
        lr=1e-3,
        init_method_std=0.5,
    )


def written(folder: Path) -> dict[int, list[list[int]]]:
    """The tokens of all texts in a run's records, by iteration."""
    records = map(json.loads, (folder / "run.jsonl").read_text().splitlines())
    return {
        own["iteration"]: [text["tokens"] for text in own["texts"]]
        for own in records
        if own["event"] == "generation"
    }


def from_checkpoint(folder: Path, how: Sampling) -> list[list[int]]:
    model = opened(folder / "iter_0000003")
    return answers(generate(model, PROMPTS, how, NEW, end=END), len(PROMPTS))


QUICK = [
    (Layout(1, "none"), GPT, 2),
    (Layout(2, "vocab-2", "zb-v", tensor=1), LLAMA, 1),
    (Layout(1, "vocab-1", tensor=2, sequence=True), GPT, 1),
    (Layout(2, "none", "interleaved"), AHEAD, 1),
    (Layout(1, "none", context=2, exchange="p2p"), WINDOWS, 1),
    (Layout(2, "naive", slices=2), LLAMA, 1),
    (Layout(1, "vocab-2", "zb-h1", replicas=2, sharded=True, overlap=True), GPT, 1),
]
MORE = [
    (Layout(2, "interlaced"), GPT, 1),
    (Layout(4, "redis"), GPT, 1),
    (Layout(2, "vocab-2", tensor=2, sequence=True, slices=3), LLAMA, 1),
    (Layout(2, "vocab-1", context=2, exchange="a2a"), WINDOWS, 2),
    (Layout(2, "none", context=2, slices=2), LLAMA, 1),
    (Layout(2, "vocab-2", replicas=2, order="tp-pp-dp"), AHEAD, 1),
    (Layout(1, "none", tensor=2), AHEAD, 1),
    (Layout(1, "none", replicas=2, experts=2, dispatcher="alltoall"), MIXTRAL, 1),
    (Layout(2, "vocab-2", replicas=2, experts=2), DEEPSEEK, 1),
    (
        Layout(1, "vocab-2", tensor=2, sequence=True, expert_tensor=1),
        replace(MIXTRAL, moe_expert_capacity_factor=0.5),
        1,
    ),
]


@pytest.mark.parametrize(
    ("layout", "options", "samples"),
    [*QUICK, *(full(*case) for case in MORE)],
    ids=lambda own: str(own) if isinstance(own, Layout) else "",
)
def test_texts_are_those_of_the_checkpoint(
    layout: Layout, options: GPTOptions, samples: int, ranks: RankPool, tmp_path: Path
) -> None:
    job = job_of(options, samples)
    config = config_of(job, layout, tmp_path, interval=3)
    ranks.run(run_on_rank, layout.world_size, job=job, config=config)
    found = written(tmp_path)
    assert list(found) == [3]
    assert found[3] == from_checkpoint(tmp_path, Sampling())
    assert len({tuple(answer) for answer in found[3]}) > 2, "the prompts matter"


@pytest.mark.parametrize(
    ("prompts", "length", "samples", "sample", "rows"),
    [
        (5, 32, 1, 96, 3),  # the tokens of a microbatch
        (5, 64, 1, 96, 1),
        (5, 32, 4, 96, 5),  # all prompts
        (900, 32, 2, 131_072, MOST_SHORT_ROWS),
        (3, 96, 200, 96, 200),  # whole rows make a microbatch as in training, with empty rows
        (900, 96, 200, 96, 200),
    ],
)
def test_rows_at_once_fit_the_memory_of_a_microbatch(
    prompts: int, length: int, samples: int, sample: int, rows: int
) -> None:
    assert rows_at_once(prompts, length, samples, sample) == rows


DRAWN = [Sampling(1.3, seed=1234), Sampling(0.9, top_k=6, seed=1234), Sampling(2.0, 0, 0.7, 1234)]


@pytest.mark.parametrize("how", [DRAWN[0], *map(full, DRAWN[1:])], ids=["all", "top-k", "top-p"])
def test_drawn_texts_are_those_of_the_checkpoint(
    how: Sampling, ranks: RankPool, tmp_path: Path
) -> None:
    job, layout = job_of(LLAMA), Layout(2, "vocab-1", tensor=2)
    drawn = {
        "generate_temperature": how.temperature,
        "generate_top_k": how.top_k,
        "generate_top_p": how.top_p,
    }
    config = config_of(job, layout, tmp_path, interval=3, **drawn)
    ranks.run(run_on_rank, layout.world_size, job=job, config=config)
    assert written(tmp_path)[3] == from_checkpoint(tmp_path, how)
    assert written(tmp_path)[3] != from_checkpoint(tmp_path, Sampling())


def collections_on_rank(rank: int, world_size: int, *, job: Job, config: RunConfig) -> int:
    with patch("gc.collect") as collect:
        run_on_rank(rank, world_size, job=job, config=config)
    return collect.call_count


def test_garbage_is_collected_before_and_after_texts(ranks: RankPool) -> None:
    job, layout, counts = job_of(GPT), Layout(1, "none"), []
    for interval in (None, 1):
        config = config_of(job, layout, None, interval=interval)
        config = replace(config, guard=replace(config.guard, manual_gc=True))
        [count] = ranks.run(collections_on_rank, 1, job=job, config=config)
        counts.append(count)
    assert counts[1] - counts[0] == 2 * 3


DELAYED = EightBitSettings("hybrid", fp8_amax_history_len=2, fp8_amax_compute_algo="max")
BIASED = replace(
    DEEPSEEK, num_experts=4, moe_router_topk=2, moe_router_group_topk=1, moe_router_num_groups=2,
    mtp_num_layers=1, moe_expert_capacity_factor=1.25,
)  # fmt: skip


class Case(NamedTuple):
    """A run that is trained with and without texts."""

    layout: Layout
    options: GPTOptions
    dropout: float = 0.0
    post_validation: bool = False
    eight_bits: EightBitSettings | None = None


CASES = {
    "dropout": Case(Layout(2, "vocab-2", "zb-v"), GPT, dropout=0.2),
    "8 bits": Case(
        Layout(1, "vocab-2", replicas=2, sharded=True, overlap=True),
        replace(LLAMA, hidden_size=32, ffn_hidden_size=32, kv_channels=8),
        eight_bits=DELAYED,
    ),
    "experts": Case(Layout(1, "none", replicas=2, experts=2, dispatcher="alltoall"), BIASED),
    "post-validation": Case(Layout(2, "vocab-1"), GPT, post_validation=True),
    "slices": Case(Layout(2, "none", slices=2, offloaded=1), LLAMA),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_does_not_notice(case: Case, ranks: RankPool, tmp_path: Path) -> None:
    """Losses, gradient norms and the weights at the end are the same to the last bit."""
    job = job_of(case.options, dropout=case.dropout)
    seen = []
    for interval in (None, 1):
        folder = tmp_path / str(interval)
        folder.mkdir()
        config = config_of(job, case.layout, folder, interval=interval)
        config = replace(
            config,
            train=replace(config.train, eight_bits=case.eight_bits),
            optimizer=replace(config.optimizer, post_validation=case.post_validation),
        )
        said = ranks.run(run_on_rank, case.layout.world_size, job=job, config=config)[0]
        assert len(written(folder)) == (3 if interval else 0)
        assert said.count(" text 1 at iteration ") == (3 if interval else 0)
        records = map(json.loads, (folder / "run.jsonl").read_text().splitlines())
        trained = [
            (own["lm_loss"], own["grad_norm"], own["mtp_losses"], own["layers"])
            for own in records
            if own["event"] == "iterations"
        ]
        assert len(trained) == 3
        seen.append((trained, digests(folder / "iter_0000003")))
    assert seen[0] == seen[1]


def digests(where: Path) -> dict[str, str]:
    """A digest of every file of a checkpoint with numbers: weights, moments, biases and scales."""
    found = {own.name: sha1(own.read_bytes()).hexdigest() for own in where.glob("*.distcp")}
    assert found
    return found
