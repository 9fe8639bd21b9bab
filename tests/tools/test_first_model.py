"""The model of a first run is as large as two seconds an iteration allow."""

from dataclasses import replace

import pytest
import torch

from tools import first_model
from tools.first_model import SECONDS, SIZES, Job, Speed, allowed, choose, main, measured

JOB = Job(vocab_size=256_000, ranks=2, cores=2, layers=4, seq_length=64, microbatches=6)
FAST, SLOW = Speed(450e9, 12e9), Speed(30e9, 4e9)
"""A core with units for bf16, and an old one."""


def test_the_seconds_by_hand() -> None:
    """6 microbatches of 4 x 64 tokens; a rank has 128,000 columns and two layers of 12 x 256^2."""
    tokens = 1536
    matrices = 2 * 12 * 256 * 256
    multiplied = 6 * tokens * (256 * 128_000 + matrices) / 450e9
    logits = tokens * 128_000 * 2 * 10 / 12e9
    layers = tokens * 2 * 256 * 1000 / 12e9
    step = 30 * (2 * 256 * 128_000 + matrices) / 12e9  # the embedding is as large
    busy = 1.2 * (multiplied + logits + layers + step)
    assert JOB.seconds(256, 4, FAST, 2) == pytest.approx(busy * 8 / 6)  # m + p = 8 intervals
    four = replace(JOB, ranks=4, layers=8, microbatches=12)
    shared = four.seconds(256, 4, FAST, 2) / replace(four, cores=4).seconds(256, 4, FAST, 2)
    assert shared == pytest.approx(2 / (16 / 12)), "of two ranks on a core one waits for the other"


def test_every_size_is_more_work_than_the_one_before() -> None:
    for job in (JOB, replace(JOB, vocab_size=8000)):
        for speed in (FAST, SLOW):
            seconds = [job.seconds(*size, speed, 2) for size in SIZES]
            assert seconds == sorted(seconds)


@pytest.mark.parametrize("vocab_size", [8_000, 32_000, 64_000, 128_000, 256_000])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("cores", [2, 4])
@pytest.mark.parametrize(
    ("speed", "item"), [(FAST, 2), (Speed(100e9, 12e9), 4), (Speed(40e9, 6e9), 4)]
)
def test_thirty_iterations_take_about_a_minute(
    vocab_size: int, ranks: int, cores: int, speed: Speed, item: int
) -> None:
    job = Job(vocab_size, ranks, cores, 2 * ranks, 64, 3 * ranks)
    hidden, samples, seconds = choose(job, speed, item)
    assert (hidden, samples) in SIZES
    assert seconds == job.seconds(hidden, samples, speed, item)
    if (hidden, samples) == SIZES[-1]:
        pytest.skip("a machine that is even faster")
    if (hidden, samples) == SIZES[0] and seconds > SECONDS:
        assert (ranks, cores, speed.flops) == (4, 2, 40e9)
        assert 30 * seconds < 90, "the smallest, and not far from a minute"
        return
    assert 20 < 30 * seconds <= 61, "the next size would take longer than a minute"
    larger = SIZES[SIZES.index((hidden, samples)) + 1]
    assert job.seconds(*larger, speed, item) > SECONDS


def test_a_machine_that_is_too_slow_gets_the_smallest() -> None:
    assert choose(JOB, Speed(1e9, 1e9), 4)[:2] == SIZES[0]


@pytest.mark.parametrize(
    ("hidden", "samples", "heads", "sizes"),
    [
        (None, None, None, list(SIZES)),
        (96, 2, None, [(96, 2)]),
        (None, 3, 16, [(width, 3) for width in (64, 96, 128, 160, 192, 256, 320, 384, 448, 512)]),
        (
            None,
            None,
            64,
            [(128, 1), (128, 2), (128, 3), (128, 4), (256, 4), (384, 4), (512, 4), (512, 6)],
        ),
        (None, None, 7, [(70, 1), (70, 2), (70, 3), (70, 4), (98, 4), (140, 4)]),
    ],
)
def test_explicit_values_stay(
    hidden: int | None, samples: int | None, heads: int | None, sizes: list[tuple[int, int]]
) -> None:
    found = allowed(hidden, samples, heads)
    assert found[: len(sizes)] == sizes
    assert all(width % (2 * (heads or 1)) == 0 for width, _ in found)
    assert {width for width, _ in allowed(96, None, None)} == {96}


def test_the_faster_precision_is_taken_and_the_reason_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A processor without instructions for bf16 multiplies it slowly."""
    speeds = {torch.bfloat16: Speed(14e9, 12e9), torch.float32: Speed(100e9, 12e9)}
    monkeypatch.setattr(first_model, "measured", lambda _, dtype: speeds[dtype])
    words = "--vocab-size 256000 --ranks 2 --cores 2 --layers 4 --seq-length 64 --microbatches 6"
    assert main(words.split()) == 0
    told = capsys.readouterr()
    hidden, samples, seconds = choose(JOB, speeds[torch.float32], 4)
    assert told.out.splitlines() == [
        "PRECISION=fp32",
        f"HIDDEN_SIZE={hidden}",
        f"MICRO_BATCH_SIZE={samples}",
    ]
    assert "14 in bf16, 100 in fp32 (GFLOP/s" in told.err
    assert f"hidden size {hidden} and {samples} samples a microbatch, in fp32" in told.err
    assert f"about {seconds:.1f} s" in told.err
    assert main([*words.split(), "--precision", "bf16", "--hidden-size", "64"]) == 0
    assert "PRECISION=bf16\nHIDDEN_SIZE=64\n" in capsys.readouterr().out


def test_a_timing_has_the_speed_of_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is made up: each product and each copy takes a quarter of a second."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(first_model, "thread_time", lambda: next(ticks) / 4)
    monkeypatch.setattr(first_model, "_COPIED", 1 << 20)
    before = torch.get_num_threads()
    speed = measured(replace(JOB, vocab_size=1000, ranks=1), torch.float32)
    torch.set_num_threads(before)
    assert speed.flops == pytest.approx(2 * 256 * 256 * 1000 / 0.25)
    assert speed.bytes == pytest.approx(2 * (1 << 20) / 0.25)
