"""Passes and pairs of one rank of a large job, beside stand-ins for its peers.

A collective of NCCL holds multiprocessors, and so lengthens the passes beside it, by more than its
share if a product then needs one more wave of blocks. No job of several GPUs is needed to see it:
kernels that spin until the planned time stand in for the peers (``stand_ins.py``). The times of
peers are those of the simulator, by the passes of this rank as measured alone. So the simulator's
iteration, idle time and pairs meet a GPU's, with the same times of communications.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from megatron.schedules.costs import Costs
from megatron.schedules.passes import PassKind
from megatron.simulator.costs.gpus import Gpu, gpu
from tools.gpu_sections.beside_spinning import product_beside_blocks
from tools.gpu_sections.links import leaving_free
from tools.gpu_sections.lone_rank import LoneRank, Ran, Simulated, mean_time, measured_costs
from tools.gpu_sections.peers import Blocks
from tools.gpu_sections.timing import Scale, Section, in_a_line, reason, table

_JOB: Final = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --micro-batch-size 1 --bf16 "
    "--lr 1e-4 --train-iters 5 --mock-data --attention-dropout 0 --hidden-dropout 0 "
    "--sequence-parallel --pipeline-schedule interleaved "
    "--num-layers-per-virtual-pipeline-stage 1 --vocab-parallel vocab-2 --tp-comm-overlap "
    "--delay-wgrad-compute"
)
LARGE: Final = (
    f"{_JOB} --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    "--num-query-groups 8 --num-layers 16 --seq-length 8192 --vocab-size 128256 "
    "--global-batch-size 16 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8"
)
SMALL: Final = (
    f"{_JOB} --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --num-query-groups 4 "
    "--num-layers 4 --seq-length 64 --vocab-size 250 --global-batch-size 4 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
)


@dataclass(frozen=True)
class Setting:
    """How much of a GPU communications take.

    Attributes:
        blocks: thread blocks of communications.
        leaves: whether products leave as many multiprocessors free.
    """

    blocks: Blocks
    leaves: bool

    @property
    def name(self) -> str:
        """Name in tables: blocks of messages, of the vocabulary, of tensor-parallel ranks."""
        own = self.blocks
        room = f", {self.free} free" if self.leaves else ""
        return f"{own.transfers}, {own.vocabulary}, {own.tensor}{room}"

    @property
    def free(self) -> int:
        """Multiprocessors that products leave free."""
        return self.blocks.together if self.leaves else 0


FEW: Final = Blocks(1, 2, 4)
MANY: Final = Blocks(4, 4, 16)
SETTINGS: Final = tuple(
    Setting(blocks, leaves) for leaves in (False, True) for blocks in (FEW, MANY)
)
_KINDS: Final[tuple[PassKind, ...]] = ("F", "B", "W", "S", "T")
_RUNS: Final = 2
"""Iterations of everything that is timed, of which the last one counts."""


class Apart(NamedTuple):
    """A setting whose passes run one after the other.

    Attributes:
        alone: seconds of passes while nobody communicates.
        costs: by these times.
        ran: an iteration beside stand-ins.
        simulated: the same in the simulator.
    """

    alone: Mapping[PassKind, float]
    costs: Costs
    ran: Ran
    simulated: Simulated


def measure(scale: Scale) -> Section:
    """Time the program of a rank in all settings, with passes apart and in pairs."""
    known = _gpu_of(scale)
    if known is None:
        return Section(["No data sheet of this GPU is known, so nothing can be planned."])
    flags, ranks, own = (SMALL, 4, 2) if scale.small else (LARGE, 64, 24)
    rank = LoneRank(flags, ranks, own, scale.device, known)
    try:
        spinning = product_beside_blocks(scale, rank.peers)
        found, failed = _settings(scale, rank)
    finally:
        rank.close()
    if not found:
        raise RuntimeError(f"no setting ran: {failed}")
    iterations, passes, pairs = (_rows(found, part) for part in (_iterations, _passes, _pairs))
    if not pairs:
        raise RuntimeError("the plan has no pairs on this rank, so that nothing is said of pairs")
    lines = [
        f"Rank {own} of {ranks}: `{flags}`.",
        "A setting is the thread blocks of messages, of the vocabulary's collectives and of "
        "tensor-parallel ranks', and the multiprocessors that products leave free (cuBLASLt then "
        "multiplies, told by `torch._C._set_sm_carveout_experimental`). *Beyond work* is the "
        "iteration without the times of its passes while nobody communicates: all idle time of the "
        "passes' stream, and what communications take from passes.",
        "",
        *table(_OF_ITERATIONS, iterations),
        "",
        "Passes apart. *Alone*: nobody communicates. *Waits*: for collectives within the pass, as "
        "planned. *Longer by*: beside stand-ins, over the sum of both.",
        "",
        *table(_OF_PASSES, passes),
        "",
        "Pairs. *Apart*: the two passes one after the other, beside stand-ins.",
        "",
        *table(_OF_PAIRS, pairs),
        *spinning.lines,
    ]
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        lines += ["", f"**Failed: {reasons}.**"]
    heads = {"iterations": _OF_ITERATIONS, "passes": _OF_PASSES, "pairs": _OF_PAIRS}
    values: dict[str, Any] = {
        name: [dict(zip(head, row, strict=True)) for row in rows]
        for (name, head), rows in zip(heads.items(), (iterations, passes, pairs), strict=True)
    }
    return Section(lines, {**values, **spinning.values, "failed": failed})


_OF_ITERATIONS: Final = (
    "setting", "passes", "iteration, ms", "simulated", "off by", "idle between passes, ms",
    "simulated idle", "beyond work, ms", "simulated beyond work",
)  # fmt: skip
_OF_PASSES: Final = ("setting", "pass", "alone, ms", "waits, ms", "beside, ms", "longer by")
_OF_PAIRS: Final = (
    "setting", "pair", "number", "joined, ms", "apart, ms", "saved", "simulated saving",
)  # fmt: skip


class _Found(NamedTuple):
    """The findings of a setting."""

    apart: Apart
    joined: Ran
    simulated: Simulated


def _settings(scale: Scale, rank: LoneRank) -> tuple[dict[str, _Found], dict[str, str]]:
    """Run all settings: the same rows of passes apart and with pairs.

    Settings whose products leave no multiprocessors free come first: the others need a library
    that may refuse a product.

    Returns:
        The findings, and for each setting that failed the reason.
    """
    joined, found, failed = rank.plan, dict[str, _Found](), dict[str, str]()
    for own in SETTINGS:
        try:
            rank.install(replace(joined, pairs=frozenset()))
            before = _apart(scale, rank, own)
            rank.install(joined)
            simulated = rank.simulated(before.costs)
            with _within(scale, rank, own):
                ran = _last(rank, simulated)
        except Exception as error:  # whatever it is, the others go on
            failed[own.name] = reason(error)
            print(f"{own.name}: failed: {failed[own.name]}", flush=True)
            continue
        _say(own.name, "in pairs", ran, simulated)
        found[own.name] = _Found(before, ran, simulated)
        for row in (*_passes(found[own.name]), *_pairs(found[own.name])):
            print(in_a_line((own.name, *row)), flush=True)
    return found, failed


def _apart(scale: Scale, rank: LoneRank, own: Setting) -> Apart:
    with _within(scale, rank, own):
        alone = [rank.run() for _ in range(_RUNS)][-1].passes
        costs = measured_costs(rank.forecast.alone, alone, rank.place)
        simulated = rank.simulated(costs)
        ran = _last(rank, simulated)
    _say(own.name, "apart", ran, simulated)
    return Apart(alone, costs, ran, simulated)


def _within(scale: Scale, rank: LoneRank, own: Setting) -> Any:
    """Return a context in which the rank runs with a setting."""
    rank.peers.blocks = own.blocks
    return leaving_free(own.free) if scale.device.type == "cuda" else nullcontext()


def _last(rank: LoneRank, simulated: Simulated) -> Ran:
    return [rank.run(simulated.clocks) for _ in range(_RUNS)][-1]


def _say(setting: str, passes: str, ran: Ran, simulated: Simulated) -> None:
    """Print at once: it is all that is known if the machine is lost."""
    own, planned = 1e3 * ran.seconds, 1e3 * simulated.seconds
    print(f"{setting}, {passes}: {own:.4g} ms, simulated {planned:.4g} ms", flush=True)


def _rows(found: Mapping[str, _Found], part: Any) -> list[tuple[object, ...]]:
    return [(name, *row) for name, own in found.items() for row in part(own)]


def _iterations(own: _Found) -> list[tuple[object, ...]]:
    both = (
        ("apart", own.apart.ran, own.apart.simulated),
        ("in pairs", own.joined, own.simulated),
    )
    return [
        (
            name,
            1e3 * ran.seconds,
            1e3 * simulated.seconds,
            f"{simulated.seconds / ran.seconds - 1:+.1%}",
            1e3 * (ran.seconds - ran.working),
            1e3 * simulated.waiting,
            1e3 * (ran.seconds - simulated.work(own.apart.alone)),
            1e3 * (simulated.seconds - simulated.work(own.apart.alone)),
        )
        for name, ran, simulated in both
    ]


def _passes(own: _Found) -> list[tuple[object, ...]]:
    before, rank = own.apart, own.simulated.rank
    rows: list[tuple[object, ...]] = []
    for kind in _KINDS:
        if kind in before.alone and kind in before.ran.passes:
            alone, beside = before.alone[kind], before.ran.passes[kind]
            waits = mean_time(before.costs.waits.get(kind, 0.0), rank)
            longer = f"{beside / (alone + waits) - 1:+.1%}"
            rows.append((kind, 1e3 * alone, 1e3 * waits, 1e3 * beside, longer))
    return rows


def _pairs(own: _Found) -> list[tuple[object, ...]]:
    apart, simulated = own.apart.ran.passes, own.simulated.pairs()
    rows: list[tuple[object, ...]] = []
    for kinds, times in sorted(own.joined.pairs.items()):
        joined, before = sum(times) / len(times), sum(apart[kind] for kind in kinds)
        planned, planned_apart = simulated[kinds]
        rows.append(
            (
                " with ".join(kinds),
                len(times),
                1e3 * joined,
                1e3 * before,
                f"{1 - joined / before:.1%}",
                f"{1 - planned / planned_apart:.1%}",
            )
        )
    return rows


def _gpu_of(scale: Scale) -> Gpu | None:
    """Return the GPU by which the job is planned; a CPU plays an H200."""
    return scale.gpu if scale.device.type == "cuda" else gpu("H200")
