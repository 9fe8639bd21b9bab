"""Pass times measured on 8 A100s, beside the times from the counts of these passes.

Passes of the vocabulary stand without the part of the host (``vocabulary_runs.HOST``), which is
read off their rests.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Final

from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.count import in_order
from megatron.simulator.costs.gpus import GPUS
from megatron.simulator.costs.launch_time import Rates
from tools.pages.tables import percent, row
from tools.predictions.counted_layer import Shape
from tools.predictions.measured import METHODS, MeasuredRun, read_measured
from tools.predictions.megatron_lm import whole_output_layer
from tools.predictions.paper_tables import MODELS
from tools.predictions.vocabulary_runs import VERSION, vocabulary_passes

HEADING: Final = "| pass | method | V | measured us | predicted us | error |"
MICRO: Final = 1e-6
SCHEDULE: Final = ("1f1b", 8)


def pass_rows(path: Path) -> Iterator[str]:
    """Yield a line for every pass of the table of ``path``.

    Raises:
        ValueError: if the file is no table of measured runs.
    """
    for run in read_measured(path):
        if TREATMENTS[METHODS[run.method]].redistributed:
            continue
        predicted = predicted_times(run)
        for name, measured in measured_times(run).items():
            error = percent(predicted[name] / measured - 1, "+")
            size = f"{run.vocab_size // 1000}k"
            yield row(name, run.method, size, f"{measured:.0f}", f"{predicted[name]:.0f}", error)


def predicted_times(run: MeasuredRun, rates: Rates = GPUS["A100"].rates) -> Mapping[str, float]:
    """Return the microseconds of a run's passes; vocabulary passes without the host's part.

    Args:
        run: its model and treatment.
        rates: of a GPU.
    """
    layers, hidden, heads = MODELS[SCHEDULE[0]][SCHEDULE[1]]
    gpt = Shape(hidden, heads, run.seq_length, run.vocab_size, dropout=True)
    cluster = Cluster(rates, GPUS["A100"].links())
    times = {
        kind: layers // run.ranks * cluster.seconds(VERSION.of(gpt, work)) / MICRO
        for kind, work in gpt.passes().items()
    }
    found = {"F": times["F"], "B": times["B"]}
    if run.treatment.is_sharded:
        passes = vocabulary_passes(gpt, run.ranks, run.treatment)
        both = in_order(passes["S"], passes["T"])
        works = {"S and T": both, "IF": passes["IF"], "IB": passes["IB"]}
    else:
        forward, backward = whole_output_layer(gpt, VERSION)
        works = {"F of the output layer": forward, "B of the output layer": backward}
    return found | {name: cluster.seconds(work) / MICRO for name, work in works.items()}


def measured_times(run: MeasuredRun) -> Mapping[str, float]:
    """Return the microseconds of the same passes, means over ranks without the ends."""
    inner = {kind: mean(times[1:-1]) for kind, times in run.times.items()}
    found = {kind: inner[kind] for kind in ("F", "B")}
    if run.treatment.is_sharded:
        return found | {"S and T": inner["ST"], "IF": inner["IF"], "IB": inner["IB"]}
    last = {kind: run.times[kind][-1] - inner[kind] for kind in ("F", "B")}
    return found | {f"{kind} of the output layer": time for kind, time in last.items()}
