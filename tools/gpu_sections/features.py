"""Every feature trains on the first GPU, and comes to the losses of the same model on a CPU.

Each model is trained once on the CPU, by one rank, in fp32, from the weights that the CPU draws,
and then on the GPU in every layout. Ranks of a layout share the GPU, as in ``ranks.py``. Several
jobs run at once, so this shows values and that nothing gets stuck, and no times.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from tools.gpu_sections.ranks import Trained, train
from tools.gpu_sections.timing import Scale, Section, table

AT_ONCE: Final = 12
"""Ranks that run at the same time. Each rank has a context of CUDA on the GPU; some thirty at once
were there when a machine stopped answering."""

RESERVE: Final = 60.0
"""Seconds that a section must have left for a job to begin. With eight at once on an H200 a job
took 17 to 50 s."""

MARGIN: Final = 5.0
"""Seconds before the section's end at which a job counts as stuck."""

ITERATIONS: Final = 5
"""Of every job; scales of 8 bits come from earlier iterations, and steps may be guessed."""

_LLAMA: Final = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
)
_EXPERTS: Final = (
    f"{_LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 "
    "--moe-aux-loss-coeff 0.01 --moe-router-dtype fp32"
)
_LATENT: Final = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 16 --qk-layernorm --rope-type rope"
)
_SINKS: Final = (
    f"{_LLAMA} --window-size 8,0 --window-attn-skip-freq 2 --softmax-type learnable --quick-geglu"
).replace("--swiglu ", "")

MODELS: Final[dict[str, str]] = {
    "gpt": "",
    "llama": _LLAMA,
    "experts": _EXPERTS,
    "latent": _LATENT,
    "sinks": _SINKS,
    "caps": f"{_LLAMA} --attn-logit-softcapping 20 --logit-softcap 30 --post-mlp-layernorm",
    "alibi": "--position-embedding-type alibi --embed-layernorm --squared-relu",
    "further": f"{_LLAMA} --mtp-num-layers 1",
    "muon": f"{_LLAMA} --optimizer muon",
}
"""Flags of every model."""

EXACT: Final = 1e-4
"""Of its size a loss in fp32 may differ."""

ROUGH: Final = 3e-2
"""Of its size a loss in 16 or 8 bits may differ from one in fp32."""


@dataclass(frozen=True)
class Job:
    """A layout of a model to train.

    Attributes:
        model: one of ``MODELS``.
        flags: of the layout.
        ranks: that the layout has.
        within: share of its size by which a loss may differ from the CPU's.
    """

    model: str
    flags: str
    ranks: int = 2
    within: float = EXACT


_WHOLE: Final = "--recompute-granularity full --recompute-method uniform"
_SPLIT: Final = "--pipeline-model-parallel-size 2 --vocab-parallel vocab-2"

JOBS: Final = (
    Job("llama", f"{_SPLIT} --bf16 --pipeline-schedule zb-v", within=ROUGH),
    Job("llama", "--bf16 --fp8-format hybrid --fp8-recipe delayed", 1, ROUGH),
    Job("llama", "--tensor-model-parallel-size 2 --sequence-parallel"),
    Job("experts", "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"),
    Job("llama", f"{_SPLIT} --cuda-graph-impl local"),
    Job("llama", f"{_SPLIT} --num-seq-splits 2 --bf16", within=ROUGH),
    Job("llama", "--context-parallel-size 2 --cp-comm-type p2p --bf16", within=ROUGH),
    Job("llama", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    Job("llama", f"{_SPLIT} --vocab-recompute {_WHOLE}"),
    Job("llama", f"{_SPLIT} --cpu-offload --pipeline-schedule pipeoffload"),
    Job("experts", "--bf16 --fp8-format e4m3 --fp8-recipe blockwise", 1, ROUGH),
    *(
        Job("llama", f"{_SPLIT} --pipeline-schedule {schedule}")
        for schedule in ("gpipe", "interleaved", "1f1b-v", "zb-h1", "zb-v", "v-half", "gis-h")
    ),
    *(
        Job("llama", f"--context-parallel-size 2 --cp-comm-type {way}")
        for way in ("all_gather", "p2p", "a2a")
    ),
    Job("llama", f"{_SPLIT} --num-seq-splits 2"),
    Job("llama", f"{_SPLIT} --enable-optimizer-post-validation"),
    Job("llama", f"{_SPLIT} --cuda-graph-impl local --pipeline-schedule zb-v --bf16", within=ROUGH),
    Job("llama", "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d", 1),
    Job("llama", "--bf16 --fp8-format hybrid --fp8-recipe tensorwise", 1, ROUGH),
    Job("llama", "--bf16 --fp8-format e4m3 --fp8-recipe blockwise", 1, ROUGH),
    Job("latent", "--bf16 --fp8-format hybrid --fp8-recipe delayed", 1, ROUGH),
    Job("experts", "--bf16 --fp8-format hybrid --fp8-recipe delayed", 1, ROUGH),
    Job("experts", f"{_SPLIT} --bf16", within=ROUGH),
    Job("experts", "--expert-model-parallel-size 2"),
    Job("latent", f"{_SPLIT} --pipeline-schedule zb-v"),
    Job("further", f"{_SPLIT}"),
    Job("llama", "--pipeline-model-parallel-size 4 --vocab-parallel vocab-2", 4),
    Job("llama", f"{_SPLIT} --tensor-model-parallel-size 2 --sequence-parallel", 4),
    Job(
        "experts",
        f"{_SPLIT} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--pipeline-schedule dualpipe-v --overlap-moe-expert-parallel-comm",
        4,
    ),
    Job(
        "llama",
        "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather "
        "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce",
        within=ROUGH,
    ),
    *(Job(model, "", 1) for model in MODELS),
    *(Job(model, "--bf16", 1, ROUGH) for model in MODELS),
    *(
        Job("gpt", f"--pipeline-model-parallel-size 2 --vocab-parallel {treatment}")
        for treatment in ("none", "redis", "naive", "vocab-1", "vocab-2", "interlaced")
    ),
)  # fmt: skip
"""All layouts, the most telling first."""


class _Room:
    """Room for so many ranks at once."""

    def __init__(self, ranks: int) -> None:
        self._free, self._changed = ranks, threading.Condition()

    @contextmanager
    def taken(self, ranks: int) -> Iterator[None]:
        """Return a context with room for ``ranks``; wait for the room before."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= ranks)
            self._free -= ranks
        try:
            yield
        finally:
            with self._changed:
                self._free += ranks
                self._changed.notify_all()


def measure(scale: Scale) -> Section:
    """Train as much as there is time for, and compare."""
    jobs = [job for job in JOBS if job.model == "gpt"][::4] if scale.small else JOBS
    end = time.monotonic() + scale.seconds - MARGIN
    room = _Room(AT_ONCE)

    def run(model: str, flags: str, ranks: int, device: str) -> Trained | None:
        with room.taken(ranks):
            left = end - time.monotonic()
            if left < RESERVE:
                return None
            whole = f"--use-cpu-initialization {MODELS[model]} {flags}"
            return train(whole, ranks, device, left, ITERATIONS)

    def compare(job: Job, plain: Future[Trained | None]) -> Row | None:
        row = _row(job, lambda: run(job.model, job.flags, job.ranks, scale.device.type), plain)
        if row is not None:
            print(" | ".join(map(str, row)), flush=True)  # what is known if this section is lost
        return row

    with ThreadPoolExecutor(AT_ONCE) as pool:
        models = dict.fromkeys(job.model for job in jobs)
        plain = {model: pool.submit(run, model, "", 1, "cpu") for model in models}
        found = [pool.submit(compare, job, plain[job.model]) for job in jobs]
        rows = [own.result() for own in found]
    tried = [row for row in rows if row is not None]
    left = [
        f"`{job.model} {job.flags}`" for job, row in zip(jobs, rows, strict=True) if row is None
    ]
    bad = [row for row in tried if row.verdict != "yes"]
    watched = [row for row in tried if row.seen]
    said = [
        f"{len(tried)} layouts of {len(MODELS)} models, {ITERATIONS} iterations; {len(bad)} are "
        "not as on a CPU. Ranks of a layout share the GPU. In the schedules of "
        f"{len(watched)} a host waited for its GPU, or memory grew after the first four.",
    ]
    if left:
        said += ["", f"There was no time for {len(left)} others: {', '.join(left)}."]
    head = (
        "model", "layout", "ranks", "largest relative difference", "within", "as on a CPU",
        "seen in its schedules",
    )  # fmt: skip
    differences = {f"{row.model} {row.layout.strip('`')}": row.difference for row in tried}
    tried.sort(key=lambda row: row in bad, reverse=True)
    return Section([*said, "", *table(head, tried)], {"differences": differences})


class Row(NamedTuple):
    """A row of the table, see its head."""

    model: str
    layout: str
    ranks: int
    difference: str
    within: str
    verdict: str
    seen: str


def _row(job: Job, work: Callable[[], Trained | None], plain: Future[Trained | None]) -> Row | None:
    """Train a job and return its row; ``None``: there was no time for it."""
    try:
        found = work()
        expected = plain.result()
        if found is None or expected is None:
            return None
        off = max(abs(a - b) / b for a, b in zip(found.losses, expected.losses, strict=True))
        told = (f"{off:.1e}", f"{job.within:g}", "yes" if off < job.within else "NO", found.seen)
    except (RuntimeError, TimeoutError, ValueError) as error:
        print(f"{job.model} {job.flags}: {error}", flush=True)
        last = str(error).replace("\n", " ").replace("|", "/")[-600:]
        told = ("failed", f"{job.within:g}", last, "")
    return Row(job.model, f"`{job.flags}`", job.ranks, *told)
