#!/usr/bin/env python3
"""Compare schedules and treatments of the vocabulary, with one another and with references.

python tools/benchmark.py                                    # everything: hours
python tools/benchmark.py --pipeline-schedule 1f1b zb-v auto --vocab-parallel none vocab-2
python tools/benchmark.py --vocab-size 32000 --pipeline-schedule 1f1b -m 8 --rounds 1
python tools/benchmark.py --layout p=2 d=2 --references single pytorch-ddp \
  --pipeline-schedule 1f1b --vocab-parallel vocab-2 --vocab-size 32000
python tools/benchmark.py --layout t=2 p=2 --references single pytorch-tp
python tools/benchmark.py --num-seq-splits 1 2 4 8 --pipeline-schedule 1f1b \
  --vocab-parallel none vocab-1 vocab-2 --vocab-size 32000 --seq-length 2048 -m 8

Every case runs in new processes, so its peak memory does not include that of other cases. The cases
take turns, so a drift of the machine's speed affects all alike. The report shows medians over the
rounds, and is written anew after each round.

With --layout the same ranks are laid out in several ways, as tensor-parallel ranks t, pipeline
ranks p and replicas d, and references update their weights too. A layout of p = 1 has no schedule,
and treats the vocabulary in one way: it runs once, as 1f1b and none.

With --num-seq-splits every schedule and treatment runs with every number of slices. The report has
the microbatches and the memory that were held, beside those that the plan promises.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.flags.command import read
    from megatron.flags.declare import flag
    from megatron.flags.groups import Flags
    from megatron.flags.ranges import COUNT
    from megatron.parallel.environment import set_nccl_environment
    from megatron.planning.race import chosen
    from megatron.planning.run_plan import candidates, make_run_plan
    from megatron.schedules.catalogue import SCHEDULES, TRAITS
    from megatron.schedules.plan_flags import PLAN_FLAGS
    from megatron.schedules.treatments import TREATMENTS
    from tools.benchmarking.allocator import allocator
    from tools.benchmarking.case import BASE, REFERENCES, BenchmarkCase


class Layout(NamedTuple):
    """Numbers of ranks on the three axes."""

    tensor: int
    pipeline: int
    replicas: int

    @property
    def processes(self) -> int:
        """Number of ranks of the job."""
        return self.tensor * self.pipeline * self.replicas


def parse_layout(text: str) -> Layout:
    """Read ``p=2``, ``d=2`` or ``t=2,p=2,d=4``; an axis that is left out is 1.

    Raises:
        ValueError: the text is not a layout.
    """
    sizes = dict(word.partition("=")[::2] for word in text.split(","))
    known = {"t", "p", "d"}.issuperset(sizes) and len(sizes) == len(text.split(","))
    if not known or not all(size.isdecimal() and int(size) for size in sizes.values()):
        raise ValueError("give t=2, p=2, d=2 or t=2,p=2,d=4")
    return Layout(*(int(sizes.get(axis, 1)) for axis in ("t", "p", "d")))


SCHEDULE_CHOICES: Final = (*SCHEDULES, *(name for name, own in TRAITS.items() if own.compares))
LIMITED: Final = tuple(name for name, own in TRAITS.items() if own.needs_memory_limit)


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class BenchmarkFlags:
    """What is compared."""

    vocab_size: tuple[int, ...] = flag((32000, 64000, 128000, 256000),
        "Entries of the vocabulary.", COUNT, metavar="V ...", names=("--vocab-sizes",))
    pipeline_schedule: tuple[str, ...] = flag(SCHEDULE_CHOICES, "Schedules.", metavar="[NAME ...]",
        choices=(*SCHEDULE_CHOICES, *LIMITED), may_be_empty=True,
        names=(*PLAN_FLAGS["schedule"][1:], "--schedules"))
    vocab_parallel: tuple[str, ...] = flag(tuple(TREATMENTS), "Treatments of the vocabulary.",
        metavar="TREATMENT ...", choices=tuple(TREATMENTS),
        names=(*PLAN_FLAGS["vocabulary"][1:], "--treatments"))
    references: tuple[str, ...] = flag((), "Other implementations.", choices=REFERENCES,
        may_be_empty=True)
    zero_bubble_max_pending_backward: float | None = flag(None,
        "Microbatches that a rank may have in flight, for all schedules; needed by "
        f"{' and '.join(LIMITED)}.", names=PLAN_FLAGS["memory_limit"][1:], metavar="MICROBATCHES",
        unset="none", range=COUNT)
    pipeline_model_parallel_size: int = flag(2, "Pipeline ranks.", COUNT,
        names=("-p", *PLAN_FLAGS["ranks"][1:]))
    layout: tuple[Layout, ...] = flag((),
        "In place of -p: ways to lay out the ranks, as in t=2 p=2 d=2 or p=2,d=2 p=4.",
        metavar="t=T,p=P,d=D ...", reads=parse_layout)
    num_seq_splits: tuple[int, ...] = flag((1,), "Slices of a microbatch.", COUNT,
        metavar="N ...", names=PLAN_FLAGS["slices"][1:])
    microbatches: int = flag(32, "Microbatches of an iteration.", COUNT, names=("-m",))
    hidden_size: int = flag(512, "Width of the model.", COUNT)
    num_layers: int = flag(8, "Transformer layers.", COUNT, names=PLAN_FLAGS["layers"][1:])
    num_attention_heads: int = flag(8, "Query heads.", COUNT, names=("--heads",))
    seq_length: int = flag(512, "Tokens of a sample.", COUNT)
    dtype: Literal["bfloat16", "float32"] = flag("bfloat16", "Of weights and activations.")
    device: Literal["cpu", "cuda"] = flag("cpu", "Of the ranks.")
    rounds: int = flag(3, "Times that every case runs.", COUNT)
    out: Path = flag(Path("benchmark"), "Folder of the report.")
    worker: str | None = flag(None, "The case of this process, in JSON.", hidden=True)
    result: Path | None = flag(None, "File for what it measures.", hidden=True)
# fmt: on


def check_layouts(flags: Flags) -> Iterator[str]:
    """Yield the faults of ``--layout``."""
    own = flags[BenchmarkFlags]
    if len({layout.processes for layout in own.layout}) > 1:
        yield "--layout: all layouts must have as many ranks, to be compared"
    for tensor, _, replicas in own.layout:
        if own.microbatches % replicas:
            yield f"-m {own.microbatches} microbatches cannot be shared by {replicas} replicas"
        if own.num_attention_heads % tensor or own.seq_length % tensor:
            yield (
                f"t={tensor} tensor-parallel ranks cannot share --num-attention-heads "
                f"{own.num_attention_heads} and --seq-length {own.seq_length} evenly"
            )


def parse_arguments(argv: Sequence[str]) -> BenchmarkFlags:
    """Read the command line."""
    return read(argv, __doc__, BenchmarkFlags, rules=(check_layouts,))[BenchmarkFlags]


def measure(case: BenchmarkCase) -> dict[str, object]:
    """Run one case in new processes and return the result that rank 0 wrote.

    Raises:
        RuntimeError: if the job fails; its output has been printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(case.processes), __file__, "--worker", case.to_json()]
        variables = allocator() if case.device == "cpu" else {}
        environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--result", str(result)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            print(done.stdout, file=sys.stderr)
            raise RuntimeError(f"{case.name} failed with status {done.returncode}")
        measured: dict[str, object] = json.loads(result.read_text())
        return measured


def work(case: BenchmarkCase, result: Path) -> None:
    """Run one rank of ``case``."""
    set_nccl_environment()
    if case.is_reference:
        from tools.benchmarking.references import run_reference

        run_reference(case, result)
    else:
        from tools.benchmarking.run import run_rank

        run_rank(case, result)


def choose_cases(cases: Sequence[BenchmarkCase]) -> tuple[list[BenchmarkCase], list[str]]:
    """Return the cases that can be run, each once, and remarks on the cases that cannot.

    ``auto`` is replaced by the schedule that it chooses.
    """
    chosen: dict[str, BenchmarkCase] = {}
    remarks = []
    for case in cases:
        try:
            resolved = _resolved(case)
        except ValueError as error:
            remarks.append(f"{case.name}: not run: {error}")
            continue
        if resolved.schedule != case.schedule:
            remarks.append(f"{case.name}: {resolved.schedule}.")
        chosen[resolved.name] = resolved
    return list(chosen.values()), remarks


def _resolved(case: BenchmarkCase) -> BenchmarkCase:
    """Return ``case`` with ``auto`` replaced by the schedule that it chooses.

    Raises:
        ValueError: if there is no plan for the case.
    """
    if case.is_reference:
        return case
    if TRAITS[case.schedule].compares:
        return replace(case, schedule=chosen(candidates(case.run_config())).schedule)
    make_run_plan(case.run_config())
    return case


def main(arguments: Sequence[str]) -> None:
    """Measure all cases and write the report."""
    options = parse_arguments(arguments)
    if options.worker is not None and options.result is not None:
        work(BenchmarkCase.from_json(options.worker), options.result)
        return
    # imported here, because the workers do not need it
    from tools.benchmarking.harness import turns
    from tools.benchmarking.report import Report, table, write_report
    from tools.benchmarking.summary import rates_of, summarise

    cases, remarks = choose_cases(list(wanted_cases(options)))
    if not cases:
        raise SystemExit("\n".join(["there is nothing to measure", *remarks]))
    runs: dict[str, list[dict[str, object]]] = {case.name: [] for case in cases}
    command = "python tools/benchmark.py " + " ".join(arguments)
    for number, case in turns(cases, options.rounds):
        runs[case.name].append(measure(case))
        print(f"round {number + 1}/{options.rounds}: {case.name}", file=sys.stderr, flush=True)
        if all(len(own) == number + 1 for own in runs.values()):
            found, rates, said = summarise(cases, runs), rates_of(runs), command.strip()
            report = Report(found, rates, cases[0], said, number + 1, remarks, runs)
            write_report(report, options.out)
    print(table(report.rows))


def wanted_cases(options: BenchmarkFlags) -> Iterator[BenchmarkCase]:
    """Yield every case that the options name; for each vocabulary the references come first."""
    layouts = options.layout or [Layout(1, options.pipeline_model_parallel_size, 1)]
    one_axis = Layout(1, layouts[0].processes, 1)
    wanted = [(reference, "none", one_axis) for reference in options.references]
    for layout in layouts:
        pairs = itertools.product(options.pipeline_schedule, options.vocab_parallel)
        wanted += [(*pair, layout) for pair in ([BASE] if layout.pipeline == 1 else pairs)]
    for vocab_size in options.vocab_size:
        for (schedule, treatment, layout), slices in itertools.product(
            wanted, options.num_seq_splits
        ):
            if schedule in REFERENCES and slices != options.num_seq_splits[0]:
                continue  # a reference has whole microbatches
            yield BenchmarkCase(
                vocab_size=vocab_size,
                schedule=schedule,
                treatment=treatment,
                ranks=layout.pipeline,
                slices=1 if schedule in REFERENCES else slices,
                tensor=layout.tensor,
                replicas=layout.replicas,
                with_update=bool(options.layout),
                microbatches=options.microbatches,
                hidden_size=options.hidden_size,
                layers=options.num_layers,
                heads=options.num_attention_heads,
                seq_length=options.seq_length,
                dtype=options.dtype,
                device=options.device,
                memory_limit=options.zero_bubble_max_pending_backward,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
