"""The layouts of the tables of pairs: published ones, some that nobody measured, and STP's."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from megatron.schedules.catalogue import TRAITS
from tools.predictions.mixtures import DEEPSEEKS, PAIRED
from tools.predictions.paired import OF_EXPERTS, OF_LAYERS, Job
from tools.predictions.scenarios import Scenario
from tools.predictions.shared_models import model_of
from tools.predictions.shared_runs import SHARED, SharedRun, read_shared

REFERENCE: Final = Path(__file__).resolve().parents[2] / "docs" / "reference"

V_SHAPES: Final = ("zb-v", "dualpipe-v", "v-half")
OTHERS: Final = ("zb-h2", "hanayo/2", "1f1b-v", "v-min", "gis/5", "gis-h/5", "pipeoffload/5")
"""Schedules that are compared for one layout alone."""
USUAL: Final = ("1f1b", "interleaved/5", "zb-h1", *V_SHAPES)
TREATMENTS: Final = ("none", "vocab-2")


class Layout(NamedTuple):
    """Jobs that differ in schedule and treatment alone.

    Attributes:
        name: a short one.
        title: the model, the GPUs, the ranks and the batch.
        source: what others measured.
        jobs: the jobs.
    """

    name: str
    title: str
    source: str
    jobs: tuple[Job, ...]


@cache
def _rows() -> dict[int, SharedRun]:
    return {run.number: run for run in read_shared(REFERENCE / SHARED)[0]}


def _jobs(name: str, run: SharedRun, schedules: Sequence[str], pairs: str) -> Iterator[Job]:
    """Yield the jobs of a layout: its schedules with each treatment."""
    for treatment in TREATMENTS:
        for schedule in schedules:
            kind, _, chunks = schedule.partition("/")
            own = replace(run, chunks=int(chunks or TRAITS[kind].chunks))
            flags = own.flags_with(kind, treatment)
            yield Job(name, schedule, treatment, flags, run.gpu.name, pairs)


def _title(run: SharedRun) -> str:
    """Return the model, the GPUs, the ranks and the batch of a run."""
    ranks = {"t": run.tensor, "p": run.pipeline, "c": run.context, "e": run.experts}
    words = " ".join(f"{axis} {size}" for axis, size in ranks.items() if size > 1 or axis == "p")
    return (
        f"{run.name} on {run.gpus} {run.gpu.name}, {words}, {run.global_batch:,} samples of "
        f"{run.seq_length:,} tokens, micro batch {run.micro_batch}, {run.precision}"
    )


def _layout(name: str, number: int, schedules: Sequence[str], pairs: str = OF_LAYERS) -> Layout:
    """Return the layout of a row of the table of published iterations."""
    run = _rows()[number]
    with_chunks = f", {run.chunks} chunks a rank" if run.chunks > 1 else ""
    source = (
        f"Measured: {run.seconds:.2f} s with {run.schedule}{with_chunks} ({run.origin}, row "
        f"{number})"
    )
    return Layout(name, _title(run), source, tuple(_jobs(name, run, schedules, pairs)))


def _whole_405b() -> Layout:
    """Return 405B with all layers: three times the pipeline of its proxy with 42 of 126 layers."""
    proxy, name = _rows()[1258], "405B on 576"
    whole = model_of("Llama-3.1-405B")
    assert whole is not None
    run = replace(proxy, name="Llama-3.1-405B", model=whole, pipeline=9, gpus=576)
    source = (
        f"Not measured; {proxy.seconds:.2f} s with a third of the layers on a third of the "
        f"pipeline ranks ({proxy.origin}, row {proxy.number})"
    )
    schedules = ("1f1b", "interleaved/7", "zb-h1", *V_SHAPES)
    return Layout(name, _title(run), source, tuple(_jobs(name, run, schedules, OF_LAYERS)))


def _of_scenario(
    name: str, base: Scenario, schedules: Sequence[str], pairs: str = OF_LAYERS, more: str = ""
) -> Layout:
    """Return a layout that nobody measured; ``more`` is told with its batch."""
    ranks = {"t": base.tensor, "p": base.pipeline, "d": base.replicas, "e": base.expert}
    words = " ".join(f"{axis} {size}" for axis, size in ranks.items() if size > 1)
    gpus = base.tensor * base.pipeline * base.replicas
    title = (
        f"{base.model} on {gpus:,} {base.gpu}, {words}, {base.samples:,} samples of "
        f"{base.seq_length:,} tokens, micro batch 1, BF16{more}"
    )
    jobs = (
        Job(name, own, treatment, scenario.flags, base.gpu, pairs)
        for treatment in TREATMENTS
        for own in schedules
        for scenario in (base._replace(schedule=own, treatment=treatment),)
    )
    return Layout(name, title, "Not measured", tuple(jobs))


def _small_batch() -> Layout:
    """Return 70B with t = 8, and 8 microbatches for each of 4 pipeline ranks."""
    base = Scenario("70B", pipeline=4, tensor=8, seq_length=8192, samples=32)
    found = _of_scenario("70B on 32", base, USUAL)
    limited = next(
        job for job in found.jobs if (job.schedule, job.treatment) == ("1f1b", "vocab-2")
    )
    return found._replace(jobs=(*found.jobs, limited._replace(limit=2 * base.pipeline + 1)))


@cache
def layouts() -> tuple[Layout, ...]:
    """Return all layouts of the first table."""
    two, eight = (("1f1b", f"interleaved/{own}", "zb-h1", *V_SHAPES) for own in (2, 8))
    return (
        _layout("70B on 64", 1268, (*USUAL, *OTHERS)),
        _small_batch(),
        _layout("405B on 128", 1350, eight),
        _whole_405b(),
        _layout("Qwen3 on 8", 1215, two[:2], OF_EXPERTS),
        _of_scenario("Qwen3 on 64", PAIRED, two, OF_EXPERTS),
        _layout("DeepSeek on B300", 1106, two, OF_EXPERTS),
        _layout("DeepSeek on GB300", 1036, eight, OF_EXPERTS),
        _of_scenario("DeepSeek on H100", DEEPSEEKS[0], two, OF_EXPERTS, ", every layer recomputed"),
    )


WIDE: Final = ("70B on 32", "405B on 128", "405B on 576")
"""Layouts with t = 8, of which it is told where waits stay exposed."""
_HIDING: Final = ("interleaved", "zb-v", "dualpipe-v")
"""The schedules of these."""


def wide_jobs() -> Iterator[Job]:
    """Yield the jobs of the second table."""
    for own in layouts():
        for job in own.jobs if own.name in WIDE else ():
            if job.schedule.partition("/")[0] in _HIDING:
                yield job


def jobs_of_passes() -> Iterator[Job]:
    """Yield the jobs of the table of passes: one with a whole backward, and one with W apart."""
    for job in wide_jobs():
        kind = job.schedule.partition("/")[0]
        if job.name != WIDE[-1] and job.treatment == "none" and kind != "dualpipe-v":
            yield job


class Setting(NamedTuple):
    """Ranks of STP's experiments.

    Attributes:
        tensor: t.
        pipeline: p.
        parts: whether tensor ranks share the sequence outside of attention and MLP.
        gain: of STP over interleaved 1F1B, as it is told; empty: not known.
    """

    tensor: int
    pipeline: int
    parts: bool
    gain: str = ""

    @property
    def name(self) -> str:
        """A name for the files of its predictions."""
        return f"STP t {self.tensor} p {self.pipeline} {'parts' if self.parts else 'whole'}"


SETTINGS: Final = (
    Setting(8, 2, parts=False, gain="+12.2 %"),
    Setting(8, 2, parts=True),
    Setting(4, 4, parts=False),
    Setting(2, 8, parts=False),
)
_LAYERS: Final = {2: "Et*8|(t*8|)*2t*6L", 4: "Et*4|(t*4|)*6t*2L", 8: "Et*2|(t*2|)*14L"}
"""How the layers are spread over the stages: alike, and two fewer on the last stage."""
_QWEN: Final = (
    "--disable-bias-linear --add-qkv-bias --position-embedding-type rope --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --swiglu --num-layers 30 --hidden-size 8192 "
    "--ffn-hidden-size 29568 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --vocab-size 152064"
)
"""30 layers of Qwen2-72B: 26.3e9 parameters without the vocabulary's."""


def stp_jobs(setting: Setting) -> Iterator[Job]:
    """Yield the jobs of a setting: interleaved, ZB-V and DualPipe-V with two chunks a rank."""
    for schedule in ("interleaved/2", "zb-v", "dualpipe-v"):
        kind, _, chunks = schedule.partition("/")
        words = [
            f"{_QWEN} --bf16 --train-iters 1 --lr 1e-4 --attention-dropout 0 --hidden-dropout 0",
            "--dry-run --dry-run-gpu A100 --micro-batch-size 1 --global-batch-size 128",
            "--seq-length 6144 --max-position-embeddings 6144 --vocab-parallel none",
            f"--tensor-model-parallel-size {setting.tensor} --pipeline-schedule {kind}",
            f"--pipeline-model-parallel-size {setting.pipeline}",
            f"--pipeline-model-parallel-layout {_LAYERS[setting.pipeline]}",
        ]
        if setting.parts:
            words.append("--sequence-parallel")
        if chunks:
            words.append(f"--num-virtual-stages-per-pipeline-rank {chunks}")
        yield Job(setting.name, schedule, "none", " ".join(words), "A100")
