"""What the flags of the pipeline ask for, and which of them contradict each other."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import with_flags

from megatron.data.indexed import IndexedWriter
from megatron.model.distribution import LayerDistribution
from megatron.planning.run_plan import make_run_plan
from megatron.run.cluster import gpu_with_memory
from megatron.run.command_line import parse
from megatron.run.dry_run import DryRunSettings
from megatron.run.run_config import RunConfig
from megatron.schedules.block_options import BlockOptions
from megatron.schedules.catalogue import TRAINABLE_SCHEDULES
from megatron.schedules.limits import Gib, Percent
from megatron.schedules.make_plan import make_plan
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.gpus import GIB, GPUS

BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 20 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--vocab-size 999 --device cpu --pipeline-model-parallel-size 2"
)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    with IndexedWriter(prefix, 1000) as writer:
        writer.add_document(list(range(100)))
    return prefix


@pytest.fixture
def run(prefix: Path) -> Callable[..., Any]:
    """Parses the flags under test beside those that every run of two ranks needs."""

    def parse_with(flags: str = "") -> RunConfig:
        usual = [*BASE.split(), "--data-path", str(prefix)]
        return parse(with_flags(usual, flags.split()), world_size=2)

    return parse_with


@pytest.mark.parametrize(
    ("flags", "schedule", "limit"),
    [
        ("", "1f1b", None),
        ("--pipeline-schedule v-min", "v-min", None),
        ("--pipeline-schedule auto", "auto", None),
        ("--pipeline-schedule auto --zero-bubble-max-pending-backward 2.5", "auto", 2.5),
        ("--pipeline-schedule zb-auto --zero-bubble-max-pending-backward 4", "zb-auto", 4),
        ("--pipeline-schedule zb-h2 --zero-bubble-max-pending-backward 4", "zb-h2", 4),
        ("--enable-zero-bubble", "zb-1p", None),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 4", "zb-auto", 4),
        ("--zero-bubble-v-schedule", "zb-v", None),
        ("--enable-zero-bubble --zero-bubble-v-schedule", "zb-v", None),
        (
            "--enable-zero-bubble --zero-bubble-v-schedule --zero-bubble-max-pending-backward 4",
            "zb-v",
            None,
        ),
        ("--pipeline-schedule zb-v --zero-bubble-max-pending-backward 4", "zb-v", 4),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup zb", "zb-v", None),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup half", "v-half", None),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup min", "v-min", None),
        ("--zero-bubble-v-schedule --pipeline-schedule zb-v", "zb-v", None),
        ("--num-virtual-stages-per-pipeline-rank 2", "interleaved", None),
        ("--num-layers-per-virtual-pipeline-stage 1", "interleaved", None),
    ],
)
def test_schedules(run: Callable[..., Any], flags: str, schedule: str, limit: float | None) -> None:
    parallel = run(flags).parallel
    assert (parallel.pipeline_schedule, parallel.planning.memory_limit) == (schedule, limit)


PENDING = "--zero-bubble-max-pending-backward"
PERCENT = "--zero-bubble-adaptive-memory-limit-percentile"
IN_GIB = "--zero-bubble-memory-limit-gib"


@pytest.mark.parametrize(
    ("flags", "schedule", "limits", "noted"),
    [
        (f"--enable-zero-bubble {PENDING} auto", "zb-auto", (None, 85), []),
        (f"--enable-zero-bubble {PERCENT} 60", "zb-auto", (None, 60), []),
        (f"--enable-zero-bubble {PENDING} auto {PERCENT} 60.5", "zb-auto", (None, 60.5), []),
        (f"--enable-zero-bubble {PENDING} 4 {PERCENT} 60", "zb-auto", (4, None), [PERCENT]),
        (f"--pipeline-schedule zb-auto {PERCENT} 100", "zb-auto", (None, 100), []),
        (f"--pipeline-schedule auto {PERCENT} 1", "auto", (None, 1), []),
        (f"--pipeline-schedule zb-v {PENDING} auto", "zb-v", (None, 85), []),
        (f"--zero-bubble-v-schedule {PENDING} auto", "zb-v", (None, None), [PENDING]),
        (f"--zero-bubble-v-schedule {PERCENT} 60", "zb-v", (None, None), [PERCENT]),
        (f"{PENDING} auto {PERCENT} 60", "1f1b", (None, None), [PENDING, PERCENT]),
        (f"--pipeline-schedule zb-h1 {PERCENT} 60", "zb-h1", (None, None), [PERCENT]),
    ],
)
def test_a_limit_by_memory_acts_or_is_noted(
    run: Callable[..., Any],
    flags: str,
    schedule: str,
    limits: tuple[float | None, float | None],
    noted: list[str],
) -> None:
    found = run(flags)
    planning = found.parallel.planning
    assert found.parallel.pipeline_schedule == schedule
    microbatches, percent = limits
    assert planning.memory_limit == microbatches
    assert planning.limit_by_memory == (None if percent is None else Percent(percent))
    assert [note.split()[0] for note in found.notes] == noted
    assert all("changes nothing" in note for note in found.notes)


@pytest.mark.parametrize(
    ("flags", "schedule", "gib", "noted"),
    [
        (f"--enable-zero-bubble {IN_GIB} 48", "zb-auto", 48, []),
        (f"--enable-zero-bubble {PENDING} auto {IN_GIB} 0.5", "zb-auto", 0.5, []),
        (f"--pipeline-schedule zb-v {IN_GIB} 48", "zb-v", 48, []),
        (f"--pipeline-schedule zb-h1 {IN_GIB} 48", "zb-h1", None, [IN_GIB]),
        (f"{PENDING} auto {IN_GIB} 48", "1f1b", None, [PENDING, IN_GIB]),
    ],
)
def test_a_limit_in_gib_acts_or_is_noted(
    run: Callable[..., Any], flags: str, schedule: str, gib: float | None, noted: list[str]
) -> None:
    found = run(flags)
    planning = found.parallel.planning
    assert found.parallel.pipeline_schedule == schedule
    assert planning.memory_limit is None
    assert planning.limit_by_memory == (None if gib is None else Gib(gib))
    assert [note.split()[0] for note in found.notes] == noted


@pytest.mark.parametrize("schedule", sorted({*TRAINABLE_SCHEDULES} - {"zb-auto", "file"}))
def test_every_schedule_has_its_name(run: Callable[..., Any], schedule: str) -> None:
    assert run(f"--pipeline-schedule {schedule}").parallel.pipeline_schedule == schedule


@pytest.mark.parametrize("flags", ["", "--pipeline-schedule file "])
def test_a_plan_of_a_file(run: Callable[..., Any], flags: str, tmp_path: Path) -> None:
    file = tmp_path / "my.plan"
    file.write_text(make_plan("1f1b", "none", 2, 8).to_text())
    parallel = run(f"{flags}--schedule-file {file}").parallel
    assert (parallel.pipeline_schedule, parallel.planning.schedule_file) == ("file", file)


def test_all_that_does_not_fit_a_plan_of_a_file_is_told_at_once(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    """Each line with the flag that would fit; given those, the file is taken."""
    file = tmp_path / "my.plan"
    file.write_text(make_plan("zb-v", "vocab-1", 4, 6).to_text())
    wrong = "--pipeline-schedule 1f1b --num-layers 9 --global-batch-size 8 --lr -1"
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the lines are checked below
        run(f"--schedule-file {file} {wrong}")
    lines = str(caught.value).splitlines()
    misfits = [line for line in lines if line.startswith(f"--schedule-file {file} is a plan for ")]
    flags = [
        found[1] for line in misfits if (found := re.search(": give (.*), or another file", line))
    ]
    assert flags == [
        "--pipeline-model-parallel-size 4",
        "--global-batch-size 6",
        "--vocab-parallel vocab-1",
    ]
    others = [line.split(" ")[0] for line in lines if line not in misfits]
    assert sorted(others) == ["--lr", "--num-layers", "--schedule-file"]
    right = f"--dry-run --bf16 --schedule-file {file} {' '.join(flags)}".split()
    parsed = parse(with_flags(BASE.split(), right), world_size=1)
    assert make_run_plan(parsed).plan.to_text() == file.read_text()


def test_a_plan_file_that_holds_no_plan_is_told_with_the_other_mistakes(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "my.plan"
    for content, said in ((None, "cannot read"), ("F0 B0", str(file))):
        if content is not None:
            file.write_text(content)
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the lines are checked below
            run(f"--schedule-file {file} --lr -1")
        rate, plan = sorted(str(caught.value).splitlines())[:2]
        assert rate.startswith("--lr -1")
        assert plan.startswith("--schedule-file")
        assert said in plan


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [
        ("--pipeline-schedule interleaved", None),
        ("--num-virtual-stages-per-pipeline-rank 4", 4),
        ("--num-layers-per-virtual-pipeline-stage 2", 2),
        ("--num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule interleaved", 4),
        ("--num-virtual-stages-per-pipeline-rank 4 --pipeline-schedule hanayo", 4),
        ("--num-virtual-stages-per-pipeline-rank 1", None),
        ("--num-layers-per-virtual-pipeline-stage 4", None),
    ],
)
def test_chunks_of_a_rank(run: Callable[..., Any], flags: str, chunks: int | None) -> None:
    assert run(flags).parallel.schedule.chunks == chunks


GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


@pytest.mark.parametrize(
    ("flags", "notes"),
    [
        ("--num-virtual-stages-per-pipeline-rank 2", []),
        ("--pipeline-schedule auto", []),
        ("--pipeline-model-parallel-layout Et*2|tt|tt|ttL", []),
        ("", [f"{GROUP} 4 changes nothing: 1f1b has no use for it, because only interleaved"]),
        (
            "--num-layers-per-virtual-pipeline-stage 4",
            ["-stage 4 changes nothing", f"{GROUP} 4 changes nothing: 1f1b has no use for it"],
        ),
    ],
)
def test_groups_of_microbatches(run: Callable[..., Any], flags: str, notes: list[str]) -> None:
    config = run(f"{flags} {GROUP} 4")
    assert config.parallel.block_options == BlockOptions.of(group=4)
    told = [note for note in config.notes if "changes nothing" in note]
    assert len(told) == len(notes)
    assert all(part in note for part, note in zip(notes, told, strict=True))


def test_groups_as_large_as_the_pipeline_are_those_of_every_run(run: Callable[..., Any]) -> None:
    config = run(f"--pipeline-schedule interleaved {GROUP} 2")
    assert f"{GROUP} 2 changes nothing: groups are as large as the pipeline anyway" in config.notes
    assert make_run_plan(config).plan == make_run_plan(run("--pipeline-schedule interleaved")).plan


def test_groups_of_few_microbatches_are_noted(run: Callable[..., Any]) -> None:
    few = "--micro-batch-size 1 --global-batch-size 2"
    config = run(f"--pipeline-schedule interleaved {GROUP} 4 {few}")
    assert f"{GROUP} 4 changes nothing: an iteration has 2 microbatches or slices" in config.notes
    assert (
        make_run_plan(config).plan
        == make_run_plan(run(f"--pipeline-schedule interleaved {few}")).plan
    )


def test_groups_of_a_layout_with_chunks_are_no_smaller_than_the_pipeline(
    run: Callable[..., Any],
) -> None:
    with pytest.raises(
        ValueError, match=f"{GROUP} 1 with --pipeline-model-parallel-size 2: groups of 1 microbatch"
    ):
        run(f"--pipeline-model-parallel-layout Et*2|tt|tt|ttL {GROUP} 1")


def test_a_run_has_the_groups_that_it_asks_for(run: Callable[..., Any]) -> None:
    plan = make_run_plan(run(f"--pipeline-schedule interleaved {GROUP} 4")).plan
    entered = [(item.microbatch, item.chunk) for item in plan.rows[0] if item.kind == "F"]
    assert entered == [
        (i, chunk) for first in (0, 4) for chunk in (0, 1) for i in range(first, first + 4)
    ]


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_every_treatment_has_its_name(run: Callable[..., Any], treatment: str) -> None:
    parallel = run(f"--vocab-parallel {treatment}").parallel
    assert parallel.vocab_parallel == treatment
    assert parallel.vocab_shards == (1 if treatment in ("none", "redis") else 2)
    assert parallel.layers.kind == ("redis" if treatment == "redis" else "even")


@pytest.mark.parametrize(
    ("flags", "treatment"),
    [
        ("--use-interlaced-schedule", "interlaced"),
        ("--enable-vocab-parallel --use-interlaced-schedule", "interlaced"),
        ("--use-interlaced-schedule --vocab-parallel interlaced", "interlaced"),
        ("--enable-layer-redistribution", "redis"),
        ("--layer-distribution redis", "redis"),
        ("--enable-layer-redistribution --layer-distribution redis", "redis"),
    ],
)
def test_other_names_of_treatments(run: Callable[..., Any], flags: str, treatment: str) -> None:
    assert run(flags).parallel.vocab_parallel == treatment


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("--layer-distribution even", LayerDistribution()),
        ("--layer-distribution remainder", LayerDistribution("remainder")),
        ("--layer-distribution cost", LayerDistribution("cost")),
        ("--layer-distribution 5,3", LayerDistribution("explicit", counts=(5, 3))),
        ("--decoder-first-pipeline-num-layers 3", LayerDistribution(first=3)),
        ("--decoder-last-pipeline-num-layers 0", LayerDistribution(last=0)),
        (
            "--account-for-embedding-in-pipeline-split --num-layers 9",
            LayerDistribution(embedding_counts=True),
        ),
        (
            "--account-for-loss-in-pipeline-split --num-layers 9",
            LayerDistribution(loss_counts=True),
        ),
        (
            "--enable-layer-redistribution --final-stage-num-layers 0",
            LayerDistribution("redis", last=0),
        ),
        (
            "--vocab-parallel redis --final-stage-num-layers 2",
            LayerDistribution("redis", last=2),
        ),
    ],
)
def test_distributions(run: Callable[..., Any], flags: str, layers: LayerDistribution) -> None:
    assert run(flags).parallel.layers == layers


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--num-layers 5",
            [
                "--num-layers 5 is not divisible by the 2 stages of the pipeline, and every stage "
                "takes as many: give --layer-distribution remainder, or another number of layers: "
                "4 or 6"
            ],
        ),
        ("--pipeline-schedule zbv", ["--pipeline-schedule zbv: did you mean zb-v? choose one of"]),
        (
            "--layer-distribution remaindr",
            ["--layer-distribution remaindr: did you mean remainder? give even"],
        ),
        (
            "--recompute-granularity selective --recompute-modules core-attn",
            ["--recompute-modules core-attn: did you mean core_attn?"],
        ),
        ("--num-layers 6 --pipeline-schedule zb-v", ["--num-layers 6 is not divisible by the 4"]),
        ("--layer-distribution 5,2", ["--layer-distribution 5,2 adds up to 7"]),
        ("--num-layers 5 --layer-distribution even,2", ["--layer-distribution even,2: give even"]),
        ("--num-layers 5 --vocab-parallel redis", []),
        ("--num-layers 5 --pp-partition-method x", ["--pp-partition-method x: layers are spread"]),
        (
            "--interleave-group-size 2 --decoder-first-pipeline-num-layers 9",
            ["--interleave-group-size 2: inter", "--num-layers 8 with --decoder-first-pipeline"],
        ),
    ],
)
def test_layers_that_do_not_fit_the_stages_are_told_once_with_the_other_mistakes(
    run: Callable[..., Any], flags: str, told: list[str]
) -> None:
    with pytest.raises(ValueError, match="--lr -1") as caught:
        run(f"{flags} --lr -1")
    others = [line for line in str(caught.value).splitlines() if not line.startswith("--lr")]
    assert len(others) == len(told)
    for line, begin in zip(others, told, strict=True):
        assert line.startswith(begin)


def test_a_dry_run_in_fp32_is_told_with_the_other_mistakes() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the lines are checked below
        parse(
            with_flags(BASE.split(), ["--dry-run", "--num-layers", "5", "--lr", "-1"]), world_size=1
        )
    flags = {line.split()[0] for line in str(caught.value).splitlines()}
    assert {"--dry-run", "--num-layers", "--lr"} <= flags


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--pipeline-schedule optimal", "optimal tools/simulate.py --save-plan --schedule-file"),
        ("--pipeline-schedule file", "file --schedule-file --save-plan"),
        ("--pipeline-schedule zb-auto", "zb-auto --zero-bubble-max-pending-backward"),
        ("--zero-bubble-max-pending-backward 0", "-backward 0 auto at least 1"),
        ("--zero-bubble-max-pending-backward AUTO", "-backward AUTO auto number"),
        ("--zero-bubble-max-pending-backward nan", "-backward nan auto at least 1"),
        ("--zero-bubble-adaptive-memory-limit-percentile 0", "-percentile 0.0 at least 1"),
        ("--zero-bubble-adaptive-memory-limit-percentile 101", "-percentile 101.0 most 100"),
        ("--zero-bubble-adaptive-memory-limit-percentile nan", "-percentile nan at least 1"),
        ("--zero-bubble-adaptive-memory-limit-percentile auto", "-percentile auto number"),
        ("--zero-bubble-memory-limit-gib 0", "-gib 0.0 at least 0.001"),
        (f"--enable-zero-bubble {IN_GIB} 48 {PERCENT} 60", f"go with {IN_GIB} 48.0"),
        (f"--enable-zero-bubble {IN_GIB} 48 {PENDING} 4", f"go with {PENDING} 4 auto"),
        (
            "--schedule-file p --pipeline-schedule zb-v",
            "--schedule-file p file --pipeline-schedule zb-v give one",
        ),
        (
            "--enable-zero-bubble --pipeline-schedule 1f1b",
            "--enable-zero-bubble zb-1p --pipeline-schedule 1f1b give one",
        ),
        (
            f"--pipeline-schedule zb-v {GROUP} 4",
            f"{GROUP} 4 zb-v size leave --pipeline-schedule interleaved",
        ),
        (
            f"--num-virtual-stages-per-pipeline-rank 2 {GROUP} 1",
            f"{GROUP} 1 --pipeline-model-parallel-size 2 2 or more",
        ),
        (
            "--zero-bubble-v-schedule --num-virtual-stages-per-pipeline-rank 2",
            "--zero-bubble-v-schedule zb-v --num-virtual-stages-per-pipeline-rank 2 interleaved",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2",
            "-rank 2 --num-layers-per-virtual-pipeline-stage 2 give one",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 1 --pipeline-schedule interleaved",
            "-rank 1 1f1b leave",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 3 --pipeline-schedule hanayo",
            "-rank 3 hanayo 2, 4, 6 not 3: take 2 or 4",
        ),
        ("--num-layers-per-virtual-pipeline-stage 3", "-stage 3 --num-layers 8 2 rank change"),
        (
            "--num-layers-per-virtual-pipeline-stage 4 --pipeline-schedule hanayo",
            "-stage 4 1f1b leave",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 2 --layer-distribution 2,2,2,2",
            "-stage 2 --layer-distribution 2,2,2,2 give one",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 2 --vocab-parallel redis",
            "-stage 2 --vocab-parallel redis give one",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --decoder-last-pipeline-num-layers 2",
            "--decoder-last-pipeline-num-layers 2 interleaved --layer-distribution",
        ),
        (
            "--vocab-parallel vocab-2 --use-interlaced-schedule",
            "--use-interlaced-schedule interlaced --vocab-parallel vocab-2 give one",
        ),
        (
            "--enable-vocab-parallel --use-interlaced-schedule --disable-backward-fusion",
            "--disable-backward-fusion --use-interlaced-schedule leave",
        ),
        (
            "--enable-layer-redistribution --enable-vocab-parallel",
            "--enable-vocab-parallel vocab-2 --enable-layer-redistribution redis give one",
        ),
        (
            "--layer-distribution redis --enable-vocab-parallel",
            "--enable-vocab-parallel vocab-2 --layer-distribution redis give one",
        ),
        (
            "--layer-distribution redis --vocab-parallel vocab-1",
            "--layer-distribution redis --vocab-parallel vocab-1 give one",
        ),
        (
            "--enable-layer-redistribution --layer-distribution 4,4",
            "--enable-layer-redistribution --layer-distribution 4,4 give one",
        ),
        (
            "--vocab-parallel redis --decoder-first-pipeline-num-layers 3",
            "--vocab-parallel redis --decoder-first-pipeline-num-layers 3 give one",
        ),
        ("--layer-distribution 4,x", "--layer-distribution 4,x even, remainder, cost, redis"),
        ("--layer-distribution 4,-4", "--layer-distribution 4,-4 even, remainder, cost, redis"),
        (
            "--layer-distribution remainder --account-for-loss-in-pipeline-split",
            "--layer-distribution remainder --account-for-loss-in-pipeline-split give one",
        ),
        (
            "--decoder-last-pipeline-num-layers 2 --account-for-loss-in-pipeline-split",
            "--decoder-last-pipeline-num-layers 2 --account-for-loss-in-pipeline-split give one",
        ),
        (
            "--account-for-loss-in-pipeline-split --vocab-parallel naive",
            "--account-for-loss-in-pipeline-split naive leave",
        ),
        (
            "--pipeline-schedule auto --measured-costs c.json",
            "--measured-costs c.json auto --profile-schedule-start --replan",
        ),
    ],
)
def test_contradictions_name_both_and_a_way_out(
    run: Callable[..., Any], flags: str, words: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked below
        run(flags)
    message, position = str(caught.value), 0
    for word in words.split():
        found = message.find(word, position)
        assert found >= 0, f"no {word!r} in its place in: {message}"
        position = found + len(word)


@pytest.mark.parametrize(
    ("faulty", "flags", "begins"),
    [
        ("--vocab-parallel bad", "--layer-distribution foo", "--layer-distribution foo"),
        (
            "--vocab-parallel bad",
            "--enable-zero-bubble --pipeline-schedule 1f1b",
            "--enable-zero-bubble",
        ),
        (
            "--vocab-parallel bad",
            "--decoder-first-pipeline-num-layers 1 --num-virtual-stages-per-pipeline-rank 2",
            "--decoder-first-pipeline-num-layers 1",
        ),
        (
            "--pipeline-schedule bad",
            "--enable-layer-redistribution --enable-vocab-parallel",
            "--enable-vocab-parallel",
        ),
        (
            "--pipeline-schedule bad",
            "--account-for-loss-in-pipeline-split --vocab-parallel naive",
            "--account-for-loss-in-pipeline-split",
        ),
        (
            "--measured-costs --zero-bubble-max-pending-backward 9",
            "--pipeline-schedule file",
            "--pipeline-schedule file",
        ),
    ],
)
def test_a_mistake_hides_no_other(
    run: Callable[..., Any], faulty: str, flags: str, begins: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the lines are checked below
        run(f"{faulty} {flags}")
    first, second = str(caught.value).splitlines()
    assert first.startswith(faulty.split(" --")[0])
    assert second.startswith(begins)


def test_post_validation_is_off_unless_asked_for(run: Callable[..., Any]) -> None:
    assert not run().optimizer.post_validation
    assert run("--enable-optimizer-post-validation").optimizer.post_validation


def test_a_profile_of_the_schedule(run: Callable[..., Any]) -> None:
    log = run("--profile-schedule-start 5 --save-measured-costs costs.json --replan").log
    assert log.timed_iterations == range(5, 8)
    assert (log.save_measured_costs, log.replan) == (Path("costs.json"), True)
    log = run().log
    assert (log.profile_schedule_start, log.save_measured_costs, log.replan) == (None, None, False)


def test_a_dry_run_needs_no_ranks_and_no_data() -> None:
    flags = "--pipeline-model-parallel-size 4 --bf16 --dry-run --dry-run-gpu H100"
    config = parse(with_flags(BASE.split(), flags.split()), world_size=1)
    assert config.dry_run == DryRunSettings(dry_run=True, dry_run_gpu="H100")
    assert config.parallel.pipeline.size == 4
    usual = parse(f"{BASE} --bf16 --dry-run".split(), world_size=1).dry_run
    assert usual is not None
    assert usual.gpu == "A100"


@pytest.mark.parametrize(
    ("flags", "world_size", "replicas"),
    [
        ("", 1, 1),
        ("", 4, 1),
        ("", 8, 2),
        ("--dry-run-replicas 3", 1, 3),
        ("--dry-run-replicas 3", 8, 3),
    ],
)
def test_a_dry_run_plans_the_replicas_of_its_ranks_or_those_named(
    flags: str, world_size: int, replicas: int
) -> None:
    """The global batch is theirs together, and flags about replicas count if there are several."""
    asked = (
        f"--pipeline-model-parallel-size 4 --global-batch-size 24 --bf16 --dry-run {flags}".split()
    )
    config = parse(with_flags(BASE.split(), [*asked, "--overlap-grad-reduce"]), world_size)
    assert config.parallel.replicas.size == config.train.replicas == replicas
    assert config.train.num_microbatches * replicas * config.train.micro_batch_size == 24
    assert config.parallel.grid.world_size == 4 * replicas
    noted = [note for note in config.notes if note.startswith("--overlap-grad-reduce")]
    assert len(noted) == (replicas == 1)
    for note in noted:
        assert "one replica of the model (--dry-run-replicas N plans more)" in note


def test_ranks_that_make_no_replicas_are_refused_in_a_dry_run_too() -> None:
    flags = "--pipeline-model-parallel-size 4 --bf16 --dry-run"
    with pytest.raises(ValueError, match=r"does not divide the 6 ranks .* start 4 or 8 ranks"):
        parse(with_flags(BASE.split(), flags.split()), world_size=6)


def test_a_dry_run_has_the_replicas_and_the_link_that_it_is_told() -> None:
    flags = "--bf16 --dry-run --dry-run-replicas 3 --micro-batch-size 2 --global-batch-size 24"
    config = parse(with_flags(BASE.split(), flags.split()), world_size=1)
    assert config.parallel.replicas.size == config.train.replicas == 3
    assert config.train.num_microbatches == 4
    assert config.dry_run is not None
    assert (config.dry_run.gpu, config.dry_run.replica_bandwidth) == ("A100", None)
    flags += " --dry-run-replica-bandwidth 12.5 --dry-run-replica-latency 20"
    asked = parse(with_flags(BASE.split(), flags.split()), world_size=1).dry_run
    assert asked is not None
    link = (asked.replica_bandwidth, asked.replica_latency)
    assert link == pytest.approx((12.5e9, 20e-6))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--dry-run-replicas 3 --global-batch-size 16", "--global-batch-size 16 does not split"),
        ("--dry-run-replica-bandwidth 9", "--dry-run-replica-bandwidth 9.0 .*--dry-run-replicas"),
        ("--dry-run-replicas 3 --dry-run-replica-bandwidth 0", "--dry-run-replica-bandwidth 0"),
    ],
)
def test_replicas_of_a_dry_run_that_cannot_be(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(with_flags(f"{BASE} --bf16 --dry-run".split(), flags.split()), world_size=1)


def test_the_gpu_of_a_dry_run_has_its_name_in_any_case() -> None:
    flags = f"{BASE} --bf16 --dry-run --dry-run-gpu rtx4090"
    assert parse(flags.split(), world_size=1).dry_run == DryRunSettings(True, "rtx4090")


def test_an_unknown_gpu_is_told_with_the_other_mistakes() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the lines are checked below
        parse(f"{BASE} --bf16 --dry-run --dry-run-gpu XX --seed x".split(), world_size=1)
    gpu, seed = str(caught.value).splitlines()
    assert gpu.startswith("--dry-run-gpu XX: choose one of A100, ")
    assert seed.startswith("--seed x")


def test_training_is_no_dry_run(run: Callable[..., Any]) -> None:
    assert run().dry_run is None


def test_flags_of_the_zero_bubble_fork_that_always_hold(run: Callable[..., Any]) -> None:
    notes = run("--enable-zb-runtime --enable-exactly-numeric-match").notes
    assert [note.split(" changes nothing")[0] for note in notes] == [
        "--enable-zb-runtime",
        "--enable-exactly-numeric-match",
    ]


ALL_TREATMENTS = ("none", "redis", "vocab-1", "vocab-2", "interlaced")


@pytest.mark.parametrize(
    ("flags", "treatments"),
    [
        ("", ALL_TREATMENTS),
        ("--pipeline-schedule auto", ALL_TREATMENTS),
        ("--final-stage-num-layers 3", ALL_TREATMENTS),
        ("--layer-distribution remainder", ("none", "vocab-1", "vocab-2", "interlaced")),
        ("--layer-distribution 5,3", ("none", "vocab-1", "vocab-2", "interlaced")),
    ],
)
def test_treatments_that_auto_compares(
    run: Callable[..., Any], flags: str, treatments: tuple[str, ...]
) -> None:
    """Each has its own padding of the vocabulary and its own layers."""
    compared = run(f"--vocab-parallel auto --make-vocab-size-divisible-by 125 {flags}")
    assert tuple(own.parallel.vocab_parallel for own in compared.alternatives) == treatments
    assert compared.parallel == compared.alternatives[0].parallel
    for own in compared.alternatives:
        named = run(f"{own.taken[0]} --make-vocab-size-divisible-by 125 {flags}")
        assert (named.parallel, named.train) == (own.parallel, own.train)
        assert named.alternatives == ()
        assert replace(compared.taking(own), taken=(), changes=0, notes=named.notes) == named
    redis = "redis" in treatments
    assert any("does not compare redis" in note for note in compared.notes) is not redis


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--enable-vocab-parallel", "auto compares treatments, and --enable-vocab-parallel names"),
        ("--layer-distribution redis", "auto compares .* --layer-distribution redis names one"),
        ("--measured-costs costs.json", "--measured-costs costs.json belongs to one treatment"),
        ("--schedule-file my.plan", "--schedule-file my.plan belongs to one treatment"),
        ("--account-for-loss-in-pipeline-split", "auto has nothing to compare with none beside"),
    ],
)
def test_what_names_a_treatment_is_refused_beside_auto(
    run: Callable[..., Any], flags: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(f"--vocab-parallel auto {flags}")


def test_the_gpu_that_is_asked_about(run: Callable[..., Any]) -> None:
    """Nothing is known of CPUs; the memory in a driver's name counts."""
    assert run().parallel.gpu is None
    assert run("--dry-run --bf16 --dry-run-gpu h100").parallel.gpu == GPUS["H100"]
    assert run("--dry-run --bf16").parallel.planning.advice_seconds == 20
    assert run("--dry-run --bf16 --advice-seconds 5").parallel.planning.advice_seconds == 5


@pytest.mark.parametrize(
    ("name", "gib"),
    [("NVIDIA A100-SXM4-40GB", 40), ("NVIDIA H100 80GB HBM3", 80), ("NVIDIA H200", 140)],
)
def test_the_gpu_of_a_rank(name: str, gib: int) -> None:
    found = gpu_with_memory(name)
    assert found is not None
    assert found.memory == gib * GIB
    assert gpu_with_memory("Another 8GB") is None
