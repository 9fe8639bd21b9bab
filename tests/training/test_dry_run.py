"""A dry run tells what would run: its plan, its time and its bytes, and what to do if they miss."""

import re
from dataclasses import replace

import pytest
import torch
from correctness.job import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.schedules.catalogue import SCHEDULES
from megatron.simulator.costs.gpus import GIB, GPUS, gpu
from megatron.training.config import RunConfig
from megatron.training.dry_run import USABLE, dry_run

BYTES_PER_PARAMETER = 18
"""bf16 weight; fp32 gradient, master weight and both moments."""


def config(ranks: int = 4, vocabulary: str = "vocab-2", schedule: str = "1f1b") -> RunConfig:
    """A GPT of 1.3 G parameters and 256k entries."""
    options = GPTOptions(num_layers=24, vocab_size=64)
    job = Job(options, micro_batch_size=2, microbatches=8, iterations=1)
    made = job.config(Layout(ranks, vocabulary, schedule), torch.bfloat16)
    model = replace(
        made.model,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=16,
        num_query_groups=16,
        kv_channels=128,
        seq_length=2048,
        vocab_size=256_000,
        tie_embeddings=False,
    )
    return replace(made, model=model)


def report(run: RunConfig, name: str = "A100") -> str:
    return "\n\n".join(dry_run(run, gpu(name)))


def rank_figures(text: str) -> list[tuple[float, float]]:
    """(peak, static) GiB of every rank."""
    found = re.findall(r"^rank \d+: peak ([\d.]+) GiB \(.* ([\d.]+)\)", text, re.MULTILINE)
    return [(float(peak), float(static)) for peak, static in found]


@pytest.mark.parametrize("vocabulary", ["none", "vocab-2"])
def test_all_parameters_are_somewhere(vocabulary: str) -> None:
    ranks = rank_figures(report(config(vocabulary=vocabulary)))
    parameters = 24 * 12 * 2048**2 + 2 * 2048 * 256_000
    workspace = 4 * 2 * 2048 * 16384  # one tile of fp32 logits of every rank that has some
    tiles = 1 if vocabulary == "none" else 4
    expected = (BYTES_PER_PARAMETER * parameters + tiles * workspace) / GIB
    assert sum(static for _, static in ranks) == pytest.approx(expected, abs=0.05 * len(ranks))
    assert all(peak > static for peak, static in ranks)


def test_the_mfu_is_that_of_the_time() -> None:
    text = report(config())
    [seconds] = re.findall(r"^iteration ([\d.]+) s", text, re.MULTILINE)
    [mfu] = re.findall(r"MFU ([\d.]+)%", text)
    b, s, h, v, layers, m = 2, 2048, 2048, 256_000, 24, 8
    flops = 3 * m * (2 * b * s * h * v + layers * (24 * b * s * h * h + 4 * b * s * s * h))
    assert float(mfu) / 100 == pytest.approx(flops / (4 * 312e12 * float(seconds)), rel=5e-3)


def test_a_faster_gpu_is_faster() -> None:
    times = [
        float(re.findall(r"^iteration ([\d.]+) s", report(config(), name), re.MULTILINE)[0])
        for name in ("RTX4090", "A100", "H100", "B200")
    ]
    assert times == sorted(times, reverse=True)


def test_what_does_not_fit_is_said_with_settings_that_do() -> None:
    run = config(vocabulary="none", schedule="gpipe")
    text = report(run, "RTX4090")
    usable = USABLE * GPUS["RTX4090"].memory / GIB
    too_full = [peak > usable for peak, _ in rank_figures(text)]
    assert any(too_full)
    assert text.count("does not fit") == sum(too_full)
    options = re.findall(
        r"--pipeline-schedule (\S+) --vocab-parallel (\S+?)(?: --micro-batch-size (\d+))?: ", text
    )
    assert options
    schedule, treatment, micro_batch_size = options[0]
    other = config(vocabulary=treatment, schedule=schedule)
    if micro_batch_size:
        train = replace(other.train, micro_batch_size=int(micro_batch_size))
        other = replace(other, train=train)
    assert "does not fit" not in report(other, "RTX4090")


def test_nothing_nearby_fits() -> None:
    text = report(config(ranks=1, vocabulary="none"), "RTX4090")
    assert "nothing nearby fits either" in text


def test_auto_shows_what_it_compared() -> None:
    text = report(config(schedule="auto", ranks=2))
    lines = text.split("in flight\n")[1].splitlines()
    assert {line.split()[0] for line in lines} == set(SCHEDULES)
    assert [*dry_run(config(schedule="auto", ranks=2), gpu("A100"))][3] in text


def test_refusals() -> None:
    run = config()
    with pytest.raises(ValueError, match="add --bf16"):
        report(replace(run, train=replace(run.train, dtype=torch.float32)))
    with pytest.raises(ValueError, match="--dry-run-gpu H1000 is not known: choose one of A100"):
        gpu("H1000")
