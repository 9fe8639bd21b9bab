"""A dry run tells what would run: its plan, its time and its bytes, and what to do if they miss."""

import re
from dataclasses import replace
from io import StringIO
from itertools import islice, takewhile
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from command_lines import with_flags
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.precisions import precision
from harness.still_watch import still_watch
from reference.plain_gpt import GPTOptions

from megatron.flags.words import split
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.recompute import Recomputation
from megatron.layers.vocabulary.settings import ShardSettings
from megatron.model.distribution import LayerDistribution
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.settings import ReplicaSettings, TensorRankSettings
from megatron.planning.dry_run import dry_run
from megatron.planning.forecast_run import forecast_run
from megatron.planning.run_plan import candidates, make_run_plan
from megatron.run.command_line import parse
from megatron.run.dry_run import DryRunSettings
from megatron.run.run_config import RunConfig
from megatron.schedules.catalogue import SCHEDULES, TRAITS
from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.make_plan import make_plan
from megatron.schedules.search.watch import Watch
from megatron.schedules.settings import OffloadSettings, PlanSettings, ScheduleSettings
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.accuracy import OWN, PUBLISHED, SHARED, RunClass
from megatron.simulator.costs.cost_file import save_costs
from megatron.simulator.costs.gpus import GIB, GPUS, USABLE, gpu
from megatron.simulator.costs.settings import ClusterSettings

BYTES_PER_PARAMETER = 18
"""bf16 weight; fp32 gradient, master weight and both moments."""


LINE = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--vocab-size 256000 --micro-batch-size 2 --global-batch-size 16 --bf16 "
    "--make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights --lr 1e-3 "
    "--attention-dropout 0 --hidden-dropout 0 --train-iters 1 --tokenizer-type NullTokenizer "
    "--mock-data --device cpu"
)
"""The command line of ``config``, without the flags that its arguments stand for."""


def config(ranks: int = 4, vocabulary: str = "vocab-2", schedule: str = "1f1b") -> RunConfig:
    """A GPT of 1.3 G parameters and 256k entries."""
    options = GPTOptions(num_layers=24, vocab_size=64)
    job = Job(options, micro_batch_size=2, microbatches=8, iterations=1)
    made = job.config(Layout(ranks, vocabulary, schedule), torch.bfloat16)
    model = made.model.replaced(
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=16,
        num_query_groups=16,
        kv_channels=128,
        seq_length=2048,
        max_position_embeddings=2048,
        vocab_size=256_000,
        tie_embeddings=False,
    )
    shards = made.parallel.vocab_shards
    parallel = replace(made.parallel, padded_vocab_size=-(-256_000 // shards) * shards)
    words = {
        "--pipeline-model-parallel-size": (str(ranks),),
        "--vocab-parallel": (vocabulary,),
        "--pipeline-schedule": (schedule,),
    }
    given = {option: tuple(own) for option, own in split(LINE.split())} | words
    return replace(made, model=model, parallel=parallel, given=given, world_size=ranks)


def asking(run: RunConfig, *words: str) -> RunConfig:
    """The run as if its command line had some more words; advice begins with these."""
    more = {option: tuple(own) for option, own in split(words)}
    return replace(run, given={**run.given, **more})


def report(run: RunConfig, name: str = "A100") -> str:
    return "\n\n".join(dry_run(run, gpu(name), still_watch()))


def with_microbatches(run: RunConfig, number: int) -> RunConfig:
    """The run with so many microbatches in a global batch."""
    samples = number * run.train.micro_batch_size
    run = asking(run, "--global-batch-size", str(samples))
    return replace(run, train=replace(run.train, global_batch_size=samples))


def few(run: RunConfig) -> RunConfig:
    """The run with a global batch of four microbatches, of which plans are found sooner."""
    return with_microbatches(run, 4)


def rank_figures(text: str) -> list[tuple[float, float]]:
    """(peak, static) GiB of every rank."""
    found = re.findall(r"^rank \d+: peak ([\d.]+) GiB \(.* ([\d.]+) GiB\)", text, re.MULTILINE)
    return [(float(peak), float(static)) for peak, static in found]


@pytest.mark.parametrize("ffn", [8192, 1024], ids=["wide", "narrow"])
@pytest.mark.parametrize("vocabulary", ["none", "vocab-2"])
def test_all_parameters_are_somewhere(vocabulary: str, ffn: int) -> None:
    run = config(vocabulary=vocabulary)
    run = replace(run, model=run.model.replaced(ffn_hidden_size=ffn))
    ranks = rank_figures(report(run))
    parameters = 24 * 2048 * (4 * 2048 + 2 * ffn) + 2 * 2048 * 256_000
    x = 2 * 2048 * 2048  # elements of X
    sent = 2 * 2 * x * (2 * 3)  # twice X, and its gradient, for each of three links
    expected = (BYTES_PER_PARAMETER * parameters + sent) / GIB
    assert sum(static for _, static in ranks) == pytest.approx(expected, abs=0.05 * len(ranks))
    assert all(peak > static for peak, static in ranks)


def test_buffers_of_the_host_are_said_if_activations_wait_there() -> None:
    run = config(4, "none")
    assert "activations on the host" not in report(run)
    moving = replace(run, parallel=replace(run.parallel, offload=OffloadSettings(True, 1, 1000.0)))
    buffers = max(forecast_run(moving, make_run_plan(moving), gpu("A100")).activations_on_host)
    text = report(moving)
    assert buffers > GIB
    assert f"activations on the host: up to {buffers / GIB:.1f} GiB a rank" in text


def test_the_mfu_is_that_of_the_time() -> None:
    text = report(config())
    [seconds] = re.findall(r"^iteration ([\d.]+) s", text, re.MULTILINE)
    [mfu] = re.findall(r"MFU ([\d.]+)%", text)
    b, s, h, v, layers, m = 2, 2048, 2048, 256_000, 24, 8
    flops = 3 * m * (2 * b * s * h * v + layers * (24 * b * s * h * h + 4 * b * s * s * h))
    assert float(mfu) / 100 == pytest.approx(flops / (4 * 312e12 * float(seconds)), rel=5e-3)


def test_what_predictions_were_off_by_is_said() -> None:
    """In one line, from the figures that tests of tools/predict_published.py and others guard."""
    [line] = [line for line in report(config()).splitlines() if line.startswith("checked: ")]
    errors = PUBLISHED[RunClass("A100", shared=False, across=False)]
    assert f"{errors.runs} runs of Megatron-LM that others published" in line
    assert f"off by {errors.mean:g}% in the mean, {errors.most:g}% at most" in line


def test_runs_of_this_code_are_always_named() -> None:
    """They had one H200: alike for one H200, else beside the others or the nearest."""
    errors = OWN[RunClass("H200", shared=False, across=False)]
    words = (
        f"{errors.runs} runs of this code on one H200, for seconds, were off by {errors.mean:g}% "
        f"in the mean, {errors.most:g}% at most"
    )
    alone, two = (few(config(ranks, "none")) for ranks in (1, 2))
    assert f"checked: {words}" in report(alone, "H200")
    assert f"measured; the nearest: {words}" in report(two, "H200")
    assert f"; {words}" in report(alone, "A100")


def test_a_run_is_checked_by_runs_of_its_class() -> None:
    """One row of H100s with t = 1 across machines is published, and nothing was fitted to it."""
    kind = RunClass("H100", shared=False, across=True)
    run = few(config(4, "none"))
    placed = replace(run.parallel, cluster=ClusterSettings(2))
    text = report(replace(run, parallel=placed), "H100")
    off = (
        f"1 run of Megatron-LM that others published ({kind}) was off by {PUBLISHED[kind].most:g}%"
    )
    assert f"checked: {off}" in text


def test_the_speed_of_products_in_8_bits_is_that_of_the_gpu() -> None:
    """An A100 has no tensor cores for 8 bits, so a dry run of it promises nothing by them."""
    run = few(config(1, "none"))
    narrow = replace(run, train=replace(run.train, eight_bits=EightBitSettings("hybrid")))
    for name, words in (
        ("A100", "A100 has no tensor cores for 8 bits, and a run on it is refused"),
        ("H100", "cuBLAS's products in 8 bits are taken for 1.7 times as fast"),
    ):
        usual, found = report(run, name), report(narrow, name)
        mfu, of_narrow = (float(re.findall(r"MFU ([\d.]+)%", text)[0]) for text in (usual, found))
        assert f"--fp8-format: {words}" in found
        assert (of_narrow > mfu) == (name == "H100")


def test_communicators_are_counted_and_taken_off_what_tensors_can_use() -> None:
    """Two ranks and no replicas: the world, which is the pipeline, the column, and two links."""
    text = report(few(config(2, "vocab-2", "1f1b")), "H100")
    assert "NCCL: up to 4 communicators a rank" in text
    [taken] = re.findall(r"take ([\d.]+) MiB by estimate", text)
    [room] = re.findall(r"of the ([\d.]+) GiB of H100 that tensors can use", text)
    assert float(room) == pytest.approx(0.95 * 80 - float(taken) / 1024, abs=0.06)
    alone = report(config(ranks=1, vocabulary="none"), "H200")
    assert "NCCL" not in alone
    assert f"{GPUS['H200'].usable / GIB:.1f} GiB" in alone


def test_messages_that_pytorch_keeps_are_said_beside_the_peaks() -> None:
    """A rank between two others has four messages of [2, 2048, 2048] in bf16 a microbatch."""
    of_rank_1 = 4 * 8 * 2 * 2048 * 2048 * 2 / 2**20
    text = report(config())
    assert f"PyTorch may keep up to {of_rank_1:.1f} MiB on rank 1 while" in text
    assert "PyTorch may keep" not in report(config(ranks=1, vocabulary="none"))


def test_a_faster_gpu_is_faster() -> None:
    times = [
        float(re.findall(r"^iteration ([\d.]+) s", report(config(), name), re.MULTILINE)[0])
        for name in ("RTX4090", "A100", "H100", "B200")
    ]
    assert times == sorted(times, reverse=True)


def test_what_does_not_fit_is_said_with_settings_that_do() -> None:
    run = few(config(2, "none", "gpipe"))
    text = report(run, "A100-40GB")
    [communicators] = re.findall(r"^NCCL: .* take ([\d.]+) MiB by estimate", text, re.MULTILINE)
    room = (GPUS["A100-40GB"].usable / GIB) - float(communicators) / 1024
    too_full = [peak > room for peak, _ in rank_figures(text)]
    assert any(too_full)
    assert text.count("does not fit") == sum(too_full)
    [named, *_] = re.findall(r"^  (--.*?): [\d.]+ GiB, ", text, re.MULTILINE)
    line = [word for option, words in run.given.items() for word in (option, *words)]
    other = parse(with_flags(line, named.split(" without ")[0].split()), 2, speak=False)
    assert "does not fit" not in report(other, "A100-40GB")


def recomputing(run: RunConfig, **how: Any) -> RunConfig:
    return replace(run, train=replace(run.train, recomputation=Recomputation(**how)))


@pytest.mark.full
def test_recomputation_is_proposed() -> None:
    """Long sequences, of one sample each."""
    run = config(4, "vocab-2", "gpipe")
    run = replace(
        run,
        model=run.model.replaced(seq_length=32768, max_position_embeddings=32768),
        train=replace(run.train, micro_batch_size=1, global_batch_size=4),
    )
    run = asking(run, "--seq-length", "32768", "--micro-batch-size", "1")
    run = asking(run, "--global-batch-size", "4")
    text = report(run, "A100-40GB")
    [lines] = re.findall(r"what would fit, the fastest first:\n((?:  .*\n?)+)", text)
    assert "--recompute-granularity full --recompute-method uniform" in lines
    again = replace(run, parallel=replace(run.parallel, schedule=ScheduleSettings("1f1b")))
    text = report(recomputing(again, group=1), "A100-40GB")
    assert "does not fit" not in text
    assert "more FLOPs than the model's, which alone count for the MFU" in text


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_recomputation_takes_time_and_saves_memory(schedule: str) -> None:
    run = config(4, "vocab-2", schedule)
    plain, core, full = (
        forecast_run(each, make_run_plan(each), gpu("A100"))
        for each in (run, recomputing(run, parts=frozenset({"mlp"})), recomputing(run, group=1))
    )
    assert plain.outcome.seconds < core.outcome.seconds < full.outcome.seconds
    # Not on every rank: under zb-h1 the last one keeps the MLPs of some B until their W.
    assert sum(plain.outcome.peak) > sum(core.outcome.peak)
    assert plain.repeated_flops == 0 < core.repeated_flops < full.repeated_flops
    assert plain.model_flops == full.model_flops
    assert full.outcome.mfu / plain.outcome.mfu == pytest.approx(
        plain.outcome.seconds / full.outcome.seconds
    )
    saved = sum(plain.outcome.peak) - sum(full.outcome.peak)
    assert saved > 0


@pytest.mark.parametrize("schedule", ["1f1b", full("zb-h1")])
def test_recomputation_ahead_of_the_backward_takes_memory_and_saves_time(schedule: str) -> None:
    """Beside what F keeps there is one chunk whole, or two, and not a group of its layers."""
    run = recomputing(config(4, "vocab-2", schedule), group=1)
    first, second = (
        replace(run, parallel=replace(run.parallel, recompute_ahead=ahead)) for ahead in (1, 2)
    )
    within, one, two = (
        forecast_run(each, make_run_plan(each), gpu("A100")) for each in (run, first, second)
    )
    assert max(one.outcome.seconds, two.outcome.seconds) < within.outcome.seconds
    if schedule == "1f1b":  # what W needs weighs more, and depends on the plan
        assert max(within.outcome.peak) < max(one.outcome.peak)
    assert within.repeated_flops == one.repeated_flops
    assert "(in passes R, up to 2 chunks ahead of B)" in report(second, "A100")


def test_logits_formed_again_are_proposed_before_layers_computed_again() -> None:
    """With a large vocabulary on one rank, they cost one product of four, and little besides."""
    run = config(1, "none")
    run = replace(run, train=replace(run.train, micro_batch_size=1, global_batch_size=2))
    run = asking(run, "--micro-batch-size", "1", "--global-batch-size", "2")
    parallel = replace(run.parallel, vocabulary=ShardSettings(vocab_recompute=True))
    again = replace(run, parallel=parallel)
    kept, less = (
        forecast_run(each, make_run_plan(each), gpu("A100")).outcome for each in (run, again)
    )
    exponentials = 2 * 2048 * 256_000
    [held] = [most - now for most, now in zip(kept.peak, less.peak, strict=True)]
    assert 0.75 * exponentials < held < exponentials  # all but a tile
    assert kept.seconds < less.seconds < 1.1 * kept.seconds
    small = replace(gpu("A100"), memory=(less.peak[0] + held / 4) / USABLE)
    text = "\n\n".join(dry_run(run, small, still_watch()))
    fitting = text.split("what would fit, the fastest first:\n")[1]
    proposed = re.findall(r"^  (--.*?): ", fitting, re.MULTILINE)
    assert len(proposed) > 1
    quick = next(at for at, words in enumerate(proposed) if "--vocab-recompute" in words)
    assert all("granularity full" not in other for other in proposed[: quick + 1])
    assert "vocabulary none with recomputed logits;" in next(dry_run(again, small))


def test_nothing_nearby_fits() -> None:
    text = report(config(ranks=1, vocabulary="none"), "RTX4090")
    assert "nothing nearby fits either" in text
    [least] = [float(gib) for gib in re.findall(r": it holds ([\d.]+) GiB", text)]
    [named] = re.findall(r"GPUs with that much memory \(([^)]+)\)", text)
    assert {*named.split(" or ")} == {n for n, g in GPUS.items() if g.usable / GIB >= least}


def test_what_can_never_fit_is_said_without_a_search() -> None:
    """All schedules of this vocabulary are too large for the GPU; they fit one of 40 GiB."""
    stream, run = StringIO(), config(2, "none", "auto")
    with patch("megatron.planning.run_request.plan_for", side_effect=AssertionError):
        said, *_ = islice(dry_run(run, gpu("RTX4090"), Watch(None, stream)), 1)
    found = re.search(r"it can never fit: .* less than ([\d.]+) GiB on rank (\d)", said)
    assert found is not None
    assert float(found[1]) > GPUS["RTX4090"].usable / GIB
    narrow = "--use-precision-aware-optimizer --main-grads-dtype bf16"
    assert f"\ngradients add up in fp32; {narrow} takes half of their memory" in said
    assert stream.getvalue() == ""
    larger = report(run, "A100-40GB")
    assert "can never fit" not in larger
    assert max(peak for peak, _ in rank_figures(larger)) >= float(found[1])


@pytest.mark.parametrize(
    "vocabulary",
    [name if name in ("none", "vocab-2", "interlaced") else full(name) for name in TREATMENTS],
)
def test_no_plan_holds_less_than_the_least(vocabulary: str) -> None:
    run = config(2, vocabulary, "auto")
    run = replace(run, train=replace(run.train, global_batch_size=2 * 3))
    for candidate in candidates(run):
        least = candidate.least_memory
        found = forecast_run(run, candidate.run_plan, gpu("A100"))
        least = least._replace(peak=least.peak + gpu("A100").workspaces)  # the run names no GPU
        assert found.outcome.peak[least.rank] >= least.peak > least.static > 0
        one = replace(run, train=replace(run.train, global_batch_size=2))
        alone = next(c for c in candidates(one) if c.schedule == candidate.schedule)
        held = forecast_run(one, alone.run_plan, gpu("A100")).outcome.peak
        come = (
            2 * run.model.seq_length * 2 * run.model.hidden_size
        )  # embeddings' gradient, during T
        assert least.peak <= max(held) <= least.peak + come, "one microbatch needs no more"


@pytest.mark.full
def test_what_would_fit_is_said_of_a_run_with_measured_costs(tmp_path: Path) -> None:
    """They are those of its own schedule: what is nearby is planned by FLOPs."""
    file = tmp_path / "costs.json"
    save_costs(file, Costs({"F": [[1.0]] * 2, "B": [[2.0]] * 2}), [[12]] * 2)
    run = config(2, "none", "gpipe")
    planning = PlanSettings(measured_costs=file)
    measured = replace(run, parallel=replace(run.parallel, planning=planning))
    [fitting] = [
        part for part in dry_run(run, gpu("RTX4090"), still_watch()) if "what would fit" in part
    ]
    assert fitting in dry_run(measured, gpu("RTX4090"), still_watch())


def test_without_time_the_dry_run_names_what_it_has_planned_and_says_so() -> None:
    stream = StringIO()
    run = config(schedule="auto", ranks=2)
    planning = PlanSettings(advice_seconds=0.0)
    run = replace(run, parallel=replace(run.parallel, planning=planning))
    text = "\n\n".join(dry_run(run, gpu("A100"), Watch(0.0, stream)))
    assert "not planned in work of about 0 s (--advice-seconds), with the least time that" in text
    assert "a longer search (--search-seconds) may find a faster plan" in text
    assert "the search ends after 0 s: " in stream.getvalue()
    assert 1 <= len(ranked(text)) < len(SCHEDULES)


def test_advice_takes_another_schedule_in_place_of_a_file(tmp_path: Path) -> None:
    """The flags that make way are named."""
    file = tmp_path / "plan.txt"
    file.write_text(make_plan("interleaved", "none", 2, 8, chunks=4).to_text())
    run = config(2, "none", "file")
    layers = LayerDistribution("explicit", counts=(3,) * 8)
    planning = PlanSettings(schedule_file=file)
    run = replace(run, parallel=replace(run.parallel, planning=planning, layers=layers))
    run = asking(run, *f"--schedule-file {file} --layer-distribution 3,3,3,3,3,3,3,3".split())
    advice = report(run, "RTX4090").split("what would fit, the fastest first:\n")[1]
    named = re.findall(r"^  (--.*?): ", advice, re.MULTILINE)
    assert named
    for words in named:
        assert "--pipeline-schedule file" not in words
        assert words.endswith(" without --schedule-file --layer-distribution")


def ranked(text: str) -> list[list[str]]:
    """The words of every line of the table of ``auto``."""
    lines = (line.split() for line in text.split("in flight\n")[1].splitlines())
    return [*takewhile(lambda words: words and words[0] in TRAITS, lines)]


def on(run: RunConfig, name: str) -> RunConfig:
    """The run on GPUs of that name."""
    return replace(run, parallel=replace(run.parallel, gpu=gpu(name)))


def test_auto_shows_what_it_compared() -> None:
    run = few(config(schedule="auto", ranks=2))
    text = report(run)
    rows = ranked(text)
    assert {row[0] for row in rows} == set(SCHEDULES)
    others = [float(row[2]) for row in rows[1:]]
    assert others == sorted(others)
    assert "auto compares by the seconds of A100, and takes the first: no other that fits" in text
    [(schedule, held, seconds)] = re.findall(
        r"^schedule auto takes (\S+): ([\d.]+) microbatch(?:es)? in flight, ([\d.]+) s an iter",
        text,
        re.M,
    )
    assert rows[0][0] == schedule
    assert float(rows[0][2]) == float(seconds)
    taken = make_run_plan(on(run, "A100"))
    assert taken.schedule == schedule
    assert float(held) == pytest.approx(max(in_flight(taken.plan)), abs=5e-3)


@pytest.mark.parametrize(
    ("vocabulary", "name"),
    [
        ("none", "A100"),
        full("vocab-2", "L40S"),
        full("redis", "L40S"),
        full("vocab-1", "H100"),
    ],
)
def test_the_table_of_auto_agrees_with_what_it_takes(vocabulary: str, name: str) -> None:
    """Its order, its seconds and its words are those of the GPU."""
    run = config(2, vocabulary, "auto")
    planning = PlanSettings(zero_bubble_max_pending_backward=4.0)
    run = replace(run, parallel=replace(run.parallel, planning=planning))
    run = on(run, name)  # whose seconds plans are made by
    plans = {c.schedule: c.run_plan for c in candidates(run)}
    forecasts = {s: forecast_run(run, found, gpu(name)) for s, found in plans.items()}
    fits = {
        schedule: max(in_flight(found.plan)) <= 4 and forecasts[schedule].fits
        for schedule, found in plans.items()
    }
    text = report(run, name)
    rows = ranked(text)
    first, *others = (row[0] for row in rows)
    assert plans[first] == make_run_plan(run)
    assert fits[first]
    impossible = re.findall(r"no plan fits of (.*)", text)
    left_out = {named.split(" with ")[0] for line in impossible for named in line.split("; ")}
    assert {first, *others, *left_out} == set(plans)
    assert not any(forecasts[schedule].fits for schedule in left_out)
    by_time = [(not fits[s], forecasts[s].outcome.seconds) for s in others]
    assert by_time == sorted(by_time)
    for schedule, treatment, seconds, mfu, *_ in rows:
        outcome = forecasts[schedule].outcome
        assert treatment == vocabulary
        assert float(seconds) == pytest.approx(outcome.seconds, abs=6e-4)
        assert float(mfu.rstrip("%")) == pytest.approx(100 * outcome.mfu, abs=6e-2)
    fastest = min(forecasts[s].outcome.seconds for s in plans if fits[s])
    assert forecasts[first].outcome.seconds * 0.99 <= fastest
    assert "would be faster with" not in text


def test_replicas_share_the_global_batch() -> None:
    """Two replicas train twice as much as one in its time, and what their link adds to it."""
    alone = config()
    train = replace(alone.train, global_batch_size=2 * alone.train.global_batch_size, replicas=2)
    parallel = replace(alone.parallel, replicas=ReplicaSettings(size=2))
    both = replace(alone, train=train, parallel=parallel)
    free = DryRunSettings(dry_run_replica_bandwidth=inf, dry_run_replica_latency=0.0)
    one, two, linked = report(alone), report(replace(both, dry_run=free)), report(both)
    assert "1 replica of 4 x A100 (312 TFLOP/s, 80 GiB); --dry-run-replicas N plans more" in one
    assert "2 replicas of 4 x A100 (312 TFLOP/s, 80 GiB)\n" in two
    assert "global batch 32: 8 microbatches of 2 samples for each replica" in two
    assert make_run_plan(both) == make_run_plan(alone)
    now, same, longer = (re.findall(r"^iteration ([\d.]+)", t, re.M)[0] for t in (one, two, linked))
    assert now == same
    assert float(longer) > float(same)


@pytest.mark.parametrize("sequence", [False, True])
def test_the_gpus_of_tensor_parallel_ranks_count(sequence: bool) -> None:
    run = config()
    parallel = replace(run.parallel, tensor=TensorRankSettings(2, sequence))
    text = report(replace(run, parallel=parallel))
    assert "1 replica of 8 x A100" in text
    also = " and the sequence" if sequence else ""
    assert f"pipeline of 4 x 2 tensor-parallel ranks that share the layers{also};" in text
    assert len(rank_figures(text)) == 4
    assert "tensor-parallel" not in report(run)


def test_ranks_that_share_every_sequence_need_less_time_and_memory_each() -> None:
    alone = config()
    parallel = replace(
        alone.parallel, context=ContextRankSettings(2), replicas=ReplicaSettings(size=2)
    )
    free = DryRunSettings(dry_run_replica_bandwidth=inf, dry_run_replica_latency=0.0)
    shared = replace(alone, parallel=parallel, dry_run=free)
    text = report(shared)
    assert "1 replica of 8 x A100" in text
    assert "pipeline of 4 x 2 context-parallel ranks that share every sequence; a rank" in text
    assert "2 ranks with the same parameters: a rank sends up to" in text
    one, both = (forecast_run(run, make_run_plan(run), gpu("A100")) for run in (alone, shared))
    assert both.model_flops == one.model_flops
    assert 0.5 < both.outcome.schedule / one.outcome.schedule < 0.65
    assert max(both.outcome.peak) < max(one.outcome.peak)


def test_no_figure_of_a_small_model_reads_zero() -> None:
    """Times are too short for seconds and memory too little for GiB."""
    run = config(2, "vocab-2", "auto")
    model = run.model.replaced(
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        seq_length=32,
        vocab_size=512,
    )
    text = report(replace(run, model=model))
    figures = text.split("in flight\n")[0].split("\n\n")[2:] + [
        " ".join(words[1:5] + words[5:]) for words in ranked(text)
    ]
    numbers = re.findall(r"(?<![\w.])(\d+\.\d+)", " ".join(figures))
    assert len(numbers) > 20
    assert all(float(number) > 0 for number in numbers)


def test_refusals() -> None:
    run = config()
    with pytest.raises(ValueError, match="add --bf16"):
        report(replace(run, train=replace(run.train, precision=precision(torch.float32))))
    with pytest.raises(ValueError, match="--dry-run-gpu H1000 is not known: choose one of A100"):
        gpu("H1000")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("H100", "H100, bf16, dense"), ("H200", "H100, bf16, dense"), ("GB200", "Blackwell, 8 bits")],
)
def test_errors_by_families_of_models_are_said_with_their_direction(name: str, kind: str) -> None:
    """The nearest class: of Blackwell no dense model in 16 bits is published."""
    [own] = [own for own in SHARED if str(own).startswith(kind) and not own.experts]
    errors = SHARED[own]
    aside = "faster" if errors.signed > 0 else "slower"
    text = report(few(config(1, "none")), name)
    assert (
        f"{errors.runs} iterations of NeMo and Megatron-Bridge with {errors.families} families of "
        f"models ({own}) were off by {errors.mean:g}% in the mean, {abs(errors.most):g}% at most, "
        f"and in the mean {abs(errors.signed):g}% {aside} than predicted, every family by "
        "constants that were fitted to the other families. No constant was fitted to the other runs"
    ) in text
    assert "NeMo" not in report(few(config(1, "none")), "A100")
