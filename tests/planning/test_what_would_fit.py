"""Advice ends when its time is up, says what it did not try, and names the number that decides."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO

import pytest
from command_lines import with_flags
from planning.test_dry_run import config, few

from megatron.config.command_line import parse
from megatron.config.recompute import EVERY_LAYER
from megatron.config.run_config import RunConfig
from megatron.layers.eight_bit_config import EightBitConfig
from megatron.model.distribution import LayerDistribution
from megatron.planning import run_request
from megatron.planning.dry_run import dry_run
from megatron.planning.forecast_run import forecast_run
from megatron.planning.neighbours import neighbours
from megatron.planning.run_costs import planned_costs
from megatron.planning.run_plan import make_run_plan
from megatron.planning.what_would_fit import ALTERNATIVES, _Search, what_would_fit
from megatron.schedules.costs import Costs
from megatron.schedules.plan import Plan
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import GIB, GPUS, USABLE, Gpu, gpu

WITHOUT_LAYERS = "--pipeline-schedule zb-v --vocab-parallel none"


def ticking(step: float) -> Iterator[float]:
    """A clock that goes on by ``step`` seconds whenever it is asked."""
    now = 0.0
    while True:
        yield now
        now += step


def watch(seconds: float, step: float, stream: StringIO | None = None) -> Watch:
    clock = ticking(step)
    return Watch(seconds, stream, lambda: next(clock))


def advised(run: RunConfig, gpu: Gpu, watch: Watch) -> str:
    return what_would_fit(run, gpu, forecast_run(run, make_run_plan(run), gpu).fullest, watch)


def test_what_was_not_tried_is_said_with_its_flags() -> None:
    run = few(config(2, "none", "gpipe"))
    settings = [setting.flags for setting in neighbours(run)]
    stream = StringIO()
    text = advised(run, gpu("A100-40GB"), watch(20.0, 0.1, stream))
    planned = re.findall(r"^(--pipeline-schedule .*) \(\d", stream.getvalue(), re.MULTILINE)
    assert 0 < len(set(planned)) < len(settings)
    [number] = re.findall(
        r"^not tried in 20 s: (\d+) settings \(--advice-seconds N", text, re.MULTILINE
    )
    rows = re.findall(r"^  (--vocab-.*), --pipeline-schedule (.*)$", text, re.MULTILINE)
    left = [f"--pipeline-schedule {s} {others}" for others, all_ in rows for s in all_.split(", ")]
    assert len(left) == int(number)
    assert set(left) <= set(settings)
    assert not set(left) & set(planned)


def test_without_time_nothing_is_tried_and_nothing_said_to_be_impossible() -> None:
    run = config(vocabulary="none", schedule="gpipe")
    run = replace(run, parallel=replace(run.parallel, advice_seconds=0.0))
    text = "\n\n".join(dry_run(run, gpu("RTX4090")))
    assert "nothing nearby fits" not in text, "it was not looked for"
    assert "no setting that fits was found in work of about 0 s\n" in text
    assert f"not tried in work of about 0 s: {len([*neighbours(run)])} settings" in text


def test_a_setting_is_counted_when_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    run, made = few(config(2, "none", "1f1b")), list[str]()
    own = forecast_run(run, make_run_plan(run), gpu("RTX4090")).fullest

    def noted(config: RunConfig, plan: Plan, layers: Sequence[int]) -> Costs:
        made.append(config.parallel.vocab_parallel)
        return planned_costs(config, plan, layers)

    monkeypatch.setattr(run_request, "planned_costs", noted)
    settings = [*neighbours(run)]
    assert not made
    text = what_would_fit(run, gpu("RTX4090"), own, watch(20.0, 1.0))
    assert 0 < len(made) <= 10, "half of the time is for plans"
    [left] = re.findall(r"not tried in 20 s: (\d+) settings \(--advice-seconds N", text)
    assert len(settings) - len(made) <= int(left) < len(settings)


def test_a_setting_that_cannot_train_the_model_is_not_named() -> None:
    """A V of these stages leaves the second rank no layer, which only its plan shows."""
    run = few(config(2, "none", "interleaved"))
    layers = LayerDistribution("explicit", counts=(12, 0, 0, 12))
    run = replace(run, parallel=replace(run.parallel, virtual_stages=2, layers=layers))
    in_v = [each for each in neighbours(run) if each.flags.startswith(WITHOUT_LAYERS)]
    assert in_v
    for setting in in_v:
        with pytest.raises(ValueError, match="leaves rank 1 without a layer"):
            _ = setting.candidate
    search = _Search(gpu("A100"), Watch())
    able = search.bound([*in_v, next(neighbours(run))])
    assert len(able) + len(search.impossible) == 1
    assert not search.unknown


def test_a_search_ends_with_the_advice() -> None:
    """The watch of a plan has no more time than the advice has left."""
    whole = watch(20.0, 1.0)
    assert whole.part(0.5).seconds == 0.5
    for _ in range(17):
        assert not whole.is_over
    part = whole.part(5.0)
    assert part.seconds is not None
    assert part.seconds < 2


def test_the_number_that_decides_is_named() -> None:
    """Some bounds are below the memory and every plan is above; the named memory is enough."""
    run = few(config(4, "vocab-2", "1f1b"))
    bounds = [setting.candidate.least_memory for setting in neighbours(run)]
    least = min(bound.peak + bound.outside for bound in bounds)
    small = replace(gpu("A100"), memory=1.001 * least / USABLE)
    text = advised(run, small, Watch())
    [(named, held)] = re.findall(r"the smallest is (--.*): it holds ([\d.]+) GiB on rank", text)
    [room] = re.findall(r"tensors can use ([\d.]+) GiB of A100", text)
    outside = small.usable - float(room) * GIB
    assert 0 < outside < 0.5 * GIB, "four ranks have few communicators"
    assert float(held) > float(room)
    assert "nothing nearby fits either" in text
    enough = replace(
        small, memory=((float(held) + 0.2) * GIB + outside) / USABLE
    )  # both are rounded to 0.1
    fitting = re.findall(r"^  (--.*): ([\d.]+) GiB, ", advised(run, enough, Watch()), re.MULTILINE)
    assert (named, held) in fitting or len(fitting) == ALTERNATIVES, "others may be faster"
    assert all(float(other) <= float(held) + 0.2 for _, other in fitting)


def test_products_in_8_bits_are_dropped_where_they_gain_nothing() -> None:
    run = config(4, "vocab-2", "1f1b")
    eight = replace(run, train=replace(run.train, eight_bits=EightBitConfig()))
    assert not any("--fp8-format" in setting.flags for setting in neighbours(run))
    dropped = [setting for setting in neighbours(eight) if "--fp8-format" in setting.flags]
    assert dropped
    assert all(setting.flags.endswith(" without --fp8-format") for setting in dropped)
    assert all(setting.candidate.config.train.eight_bits is None for setting in dropped)


def test_plans_of_fewer_microbatches_are_said() -> None:
    run = config(2, "none", "gpipe")
    run = replace(run, train=replace(run.train, global_batch_size=2 * 12))
    text = advised(run, GPUS["A100-40GB"], Watch())
    assert "what would fit, the fastest first:\n" in text
    assert re.search(r"plans have 5( or 6)? microbatches: the interval of their steady", text)
    assert EVERY_LAYER in text or "--vocab-parallel vocab-2" in text


BASE = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 64 --num-attention-heads 8 "
    "--seq-length 1024 --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 999 --mock-data --bf16 --attention-dropout 0 "
    "--device cpu --pipeline-schedule 1f1b"
)


def test_flags_of_a_setting_with_slices_or_on_the_host_make_its_run() -> None:
    """The flags that advice names are those of the run that was counted."""
    run = parse(BASE.split(), 2)
    settings = [
        each
        for each in neighbours(run)
        if "num-seq-splits" in each.flags or "cpu-offload" in each.flags
    ]
    words = " ".join(each.flags for each in settings)
    for flags in ("--num-seq-splits 2", "--num-seq-splits 4", "--num-seq-splits 8"):
        assert f"{flags} --seq-split-strategy balanced {EVERY_LAYER}" in words
    assert "--cpu-offload --offload-chunk-num 1" in words
    for setting in settings[::5]:
        named = parse(with_flags(BASE.split(), setting.flags.split()), 2)
        found = setting.candidate.config
        for field in ("num_seq_splits", "seq_split_strategy", "offloaded", "vocab_parallel"):
            assert getattr(found.parallel, field) == getattr(named.parallel, field), setting.flags
        assert found.train.recomputation == named.train.recomputation
        assert setting.candidate.schedule == named.parallel.pipeline_schedule


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_on_one_rank_no_schedule_but_1f1b_is_named(schedule: str) -> None:
    """One rank has no bubble, and 1F1B holds one microbatch, the least."""
    settings = list(neighbours(few(config(1, "none", schedule))))
    named = {
        word for each in settings for word in re.findall(r"--pipeline-schedule (\S+)", each.flags)
    }
    assert named == (set() if schedule == "1f1b" else {"1f1b"})
    assert not any("--vocab-parallel" in each.flags for each in settings)
    assert len({each.flags for each in settings}) == len(settings)
    assert all(each.flags and each.flags == each.flags.strip() for each in settings)
    assert any(EVERY_LAYER in each.flags for each in settings)
    assert all(each.candidate.schedule == "1f1b" for each in settings[:3])
