#!/usr/bin/env python3
"""Measure how the treatments of the vocabulary compare, on this machine.

python tools/benchmark.py                                    # the table of the README
python tools/benchmark.py --vocab-sizes 32000 --treatments none vocab-2 --microbatches 8 --rounds 1

Every case runs in processes of its own, so that its peak memory is its own, and the cases take
turns, so that a machine whose speed drifts is fair to all. Reported are medians over the rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_case import Case, run_rank

ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""As the launcher sets: glibc must not return large freed blocks to the kernel."""


def measure(case: Case) -> dict[str, object]:
    """Run one case in fresh processes and return what rank 0 wrote.

    Raises:
        RuntimeError: if the job fails; its output has been printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(case.ranks), __file__, "--worker", case.to_json()]
        environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"}
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
        return json.loads(result.read_text())


def main(arguments: Sequence[str]) -> None:
    """Measure all cases and write the report."""
    options = _parser().parse_args(arguments)
    if options.worker is not None:
        run_rank(Case.from_json(options.worker), options.result)
        return
    cases = [
        Case(
            vocab_size=vocab_size,
            treatment=treatment,
            ranks=options.ranks,
            microbatches=options.microbatches,
            hidden_size=options.hidden_size,
            layers=options.layers,
            heads=options.heads,
            seq_length=options.seq_length,
            dtype=options.dtype,
            device=options.device,
        )
        for vocab_size in options.vocab_sizes
        for treatment in options.treatments
    ]
    from benchmark_report import summarise, write_report  # not in the workers: it draws

    runs: dict[str, list[dict[str, object]]] = {case.name: [] for case in cases}
    for number in range(options.rounds):
        for case in cases:
            runs[case.name].append(measure(case))
            print(f"round {number + 1}/{options.rounds}: {case.name}", file=sys.stderr, flush=True)
    command = "python tools/benchmark.py " + " ".join(arguments)
    rows = summarise(cases, runs)
    write_report(rows, cases[0], command.strip(), options.rounds, options.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [32000, 64000, 128000, 256000]
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=sizes)
    parser.add_argument("--treatments", nargs="+", default=["none", "vocab-1", "vocab-2"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmark"), help="folder of the report")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
