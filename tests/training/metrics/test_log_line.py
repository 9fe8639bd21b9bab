"""Printed lines, read back with the patterns that parsers of Megatron's logs use."""

import math
import re
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions
from training.metrics.made_records import generated

from megatron.training.metrics.log_line import (
    evaluation_lines,
    generation_lines,
    introduction,
    iteration_line,
    memory_line,
    vocabulary_words,
)
from megatron.training.metrics.peak_memory import PeakMemory
from megatron.training.metrics.peak_tflops import Peak
from megatron.training.metrics.records import (
    Evaluation,
    GeneratedText,
    Interval,
    RankFigures,
    perplexity,
)

VALUES = Interval(
    time=datetime(2026, 11, 20, 12, 0, 0),
    iteration=5,
    train_iters=30,
    consumed_samples=30,
    consumed_tokens=480,
    seconds_per_iteration=0.12344,
    tflops_per_rank=12.34,
    mfu=0.3449,
    tokens_per_second=777.0,
    learning_rate=1e-4,
    global_batch_size=6,
    lm_loss=10.34567,
    grad_norm=1.2344,
)


def test_the_whole_line() -> None:
    assert iteration_line(VALUES) == (
        " [2026-11-20 12:00:00] iteration        5/      30 | consumed samples:           30 | "
        "elapsed time per iteration (ms): 123.4 | throughput per GPU (TFLOP/s/GPU): 12.3 | "
        "MFU: 34.5% | learning rate: 1.000000E-04 | global batch size:     6 | "
        "lm loss: 1.034567E+01 | loss scale: 1.0 | grad norm: 1.234 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_the_loss_scale_of_fp16() -> None:
    assert " | loss scale: 65536.0 | " in iteration_line(replace(VALUES, loss_scale=65536.0))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_or_norm_that_no_step_had_is_left_out_as_in_megatron(value: float) -> None:
    line = iteration_line(VALUES)
    without_norm = line.replace("grad norm: 1.234 | ", "")
    assert iteration_line(replace(VALUES, grad_norm=value)) == without_norm
    without_both = without_norm.replace("lm loss: 1.034567E+01 | ", "")
    assert iteration_line(replace(VALUES, grad_norm=value, lm_loss=value)) == without_both


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        (r"iteration\s+(\d+)/\s*\d+ \|", 5),
        (r"iteration\s+\d+/\s*(\d+) \|", 30),
        (r"consumed samples:\s+(\d+)", 30),
        (r"elapsed time per iteration \(ms\): (\d+\.\d+)", 123.4),
        (r"throughput per GPU \(TFLOP/s/GPU\): (\d+\.\d+)", 12.3),
        (r"learning rate: (\d\.\d+E[+-]\d+)", 1e-4),
        (r"global batch size:\s+(\d+)", 6),
        (r"lm loss: (\d+\.\d+E[+-]\d+)", 10.34567),
        (r"loss scale: (\d+\.\d+)", 1),
        (r"grad norm: (\d+\.\d+)", 1.234),
        (r"number of skipped iterations:\s+(\d+)", 0),
        (r"number of nan iterations:\s+(\d+)", 0),
    ],
)
def test_parsers_of_megatron_logs_find_every_field(pattern: str, value: Any) -> None:
    found = re.search(pattern, iteration_line(VALUES))
    assert found is not None
    assert found is not None
    assert float(found.group(1)) == value


def test_every_field_splits_at_the_bar_into_name_and_value() -> None:
    fields = iteration_line(VALUES).rstrip(" |").split(" | ")[1:]
    assert all(len(field.rsplit(": ", 1)) == 2 for field in fields)
    assert len(fields) == 11


def test_a_slow_rank_shows_more_than_one_digit() -> None:
    slow = replace(VALUES, tflops_per_rank=0.3414)
    assert "throughput per GPU (TFLOP/s/GPU): 0.341 |" in iteration_line(slow)


def test_what_only_some_runs_know_stands_where_megatron_has_it() -> None:
    line = iteration_line(replace(VALUES, num_zeros=12, params_norm=2.5))
    assert "| grad norm: 1.234 | num zeros: 12.0 | params norm: 2.500 | number of skipped" in line


def test_losses_of_routers_and_the_busiest_expert_stand_behind_the_loss() -> None:
    busiest = replace(VALUES, expert_imbalance=1.5, busiest_layer=3, busiest_expert=7)
    line = iteration_line(replace(busiest, layer_losses={"z_loss": 0.25}))
    words = "| z_loss: 2.500000E-01 | expert imbalance: 1.500 (layer 3, expert 7) | loss scale: "
    assert words in line
    before, after = line.split(words)
    assert f"{before}| loss scale: {after}" == iteration_line(VALUES)


def test_what_is_only_recorded_leaves_the_line_as_it_is() -> None:
    more = replace(VALUES, seconds_in_saves=3.0, ranks=(RankFigures(0, 1 << 30, None, 0.5),))
    assert iteration_line(more) == iteration_line(VALUES)


def evaluation(lm_loss: float, **changes: Any) -> Evaluation:
    plain = Evaluation(
        VALUES.time, 10, 60, "validation", False, lm_loss, perplexity(lm_loss), 1.0, 4, 3
    )
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({}, "10"),
        ({"at_end": True}, "10 on validation set"),
        ({"at_end": True, "dataset": "test"}, "10 on test set"),
    ],
)
def test_the_validation_line(changes: dict[str, Any], where: str) -> None:
    rule, line, end = evaluation_lines(evaluation(2.0, **changes)).split("\n")
    assert line == (
        f" validation loss at iteration {where} | lm loss value: 2.000000E+00 | "
        f"lm loss PPL: 7.389056E+00 | {changes.get('dataset', 'validation')} set, batches 4 to 6 | "
    )
    assert rule == end == "-" * (len(line) + 1)


def test_the_perplexity_of_a_diverged_model_stays_finite() -> None:
    found = re.search(r"lm loss PPL: (\S+) ", evaluation_lines(evaluation(1e6)))
    assert found is not None
    assert float(found.group(1)) == pytest.approx(math.exp(20), rel=1e-6)


def test_memory_lines_say_whose_memory_and_how_much() -> None:
    mib = 1 << 20
    assert memory_line(3, 1, PeakMemory(held=512 * mib, reserved=1024 * mib)) == (
        "[Rank 3] (after 1 iterations) memory (MB) | max allocated: 512.0 | max reserved: 1024.0"
    )
    assert memory_line(0, 1, PeakMemory(held=mib // 2)) == (
        "[Rank 0] (after 1 iterations) memory (MB) | max resident: 0.5"
    )


def test_a_run_says_what_it_is() -> None:
    config = Job(GPTOptions(vocab_size=61), microbatches=3).config(Layout(2, "vocab-1"))
    peak = Peak(0.25, "--peak-tflops")
    words = "60 + 1 for the end of a document", "zb-v (taken by auto)"
    assert list(introduction(config.parallel, config.train, *words, [1000, 2000], 10**9, peak)) == [
        "pipeline of 2 on cpu (gloo), schedule zb-v (taken by auto), vocabulary vocab-1, "
        "3 microbatches, float32",
        "vocabulary 60 + 1 for the end of a document, padded to 64 in 2 shards of 32",
        "parameters: 3,000; by rank: 1,000, 2,000",
        "model FLOPs = 3 x forward matrix products, causal attention counted in full (Megatron-LM "
        "counts half), vocabulary without padding; 1.000E+09 per iteration",
        "peak of a rank: 0.250 TFLOP/s (--peak-tflops)",
    ]


def test_what_the_tokenizer_adds_is_named_apart() -> None:
    assert vocabulary_words(1001, 1) == "1000 + 1 for the end of a document"
    assert vocabulary_words(8000, 0) == "8000"


def test_a_single_microbatch_is_no_microbatches() -> None:
    config = Job(GPTOptions(vocab_size=61), microbatches=1).config(Layout(1, "none"))
    words = "61", "1f1b"
    peak = Peak(0.25, "--peak-tflops")
    layout, vocabulary, *_ = introduction(config.parallel, config.train, *words, [1], 1, peak)
    assert ", 1 microbatch, " in layout
    assert "in 1 shard of " in vocabulary


def test_figures_of_the_model_stand_behind_the_gradient_norm() -> None:
    asked = Interval(**(vars(VALUES) | {"num_zeros": 7, "params_norm": 81.25}))
    assert "| grad norm: 1.234 | num zeros: 7.0 | params norm: 81.250 | number of skipped" in (
        iteration_line(asked)
    )


def test_every_text_has_one_line_with_visible_characters() -> None:
    assert list(generation_lines(generated(5))) == [
        r' text 1 at iteration 5 | "Once\nupon" | " a `time`" |',
        r' text 2 at iteration 5 | "" | "mice\u200b" |',
    ]


def test_texts_of_languages_without_blanks_are_whole() -> None:
    long = "吾輩は猫である" * 100
    record = replace(generated(5), texts=(GeneratedText(long, long, (1,)),))
    assert list(generation_lines(record)) == [f' text 1 at iteration 5 | "{long}" | "{long}" |']
