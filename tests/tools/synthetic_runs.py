"""Tables of measured runs that a known device would have written."""

from collections.abc import Iterable, Sequence

from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.device import Device
from megatron.simulator.costs.from_model import ModelTimes
from megatron.simulator.costs.shape import ACTIVATION_BYTES, Shape
from tools.predictions.measured import METHODS, MeasuredRun

DEVICE = Device(
    peak_flops=200e12,
    attained={"forward": 0.6, "backward": 0.5, "output": 0.75},
    memory_bandwidth=1.5e12,
    link_bandwidth=300e9,
    link_latency=2e-4,
    overhead={"S": 4e-4, "T": 4e-4, "IF": 2e-4, "IB": 1e-4},
)
VOCABULARIES = (32_000, 64_000, 128_000, 256_000)
LAYERS = 4
COLUMNS = ("F", "B", "ST", "IF", "IB", "p2p")


def shape_of(seq_length: int, vocab_size: int) -> Shape:
    return Shape(3072, 24, seq_length, vocab_size)


def run(method: str, vocab_size: int, ranks: int = 8, iteration_ms: float = 1.0) -> MeasuredRun:
    """What ``DEVICE`` would measure with 4 layers a stage."""
    times = ModelTimes(shape_of(2048, vocab_size), DEVICE)
    layer = {kind: 1e6 * LAYERS * time for kind, time in times.layer().items()}
    forward, backward = [layer["F"]] * ranks, [layer["B"] + layer["W"]] * ranks
    vocabulary = {"S": 0.0, "T": 0.0, "IF": 0.0, "IB": 0.0}
    treatment = TREATMENTS[METHODS[method]]
    if not treatment.is_sharded:
        for end, whole in ((0, times.whole_input()), (-1, times.whole_output())):
            forward[end] += 1e6 * whole["F"]
            backward[end] += 1e6 * (whole["B"] + whole["W"])
    else:
        passes = times.vocabulary_passes(ranks, treatment)
        vocabulary = {kind: 1e6 * passes[kind] for kind in ("S", "T", "IF", "IB")}
    columns = {
        "F": forward,
        "B": backward,
        "ST": [vocabulary["S"] + vocabulary["T"]] * ranks,
        "IF": [vocabulary["IF"]] * ranks,
        "IB": [vocabulary["IB"]] * ranks,
        "p2p": [1e6 * DEVICE.message(ACTIVATION_BYTES * 2048 * 3072)] * ranks,
    }
    measured = {name: tuple(values) for name, values in columns.items()}
    return MeasuredRun(method, 2048, vocab_size, LAYERS, measured, iteration_ms)


def as_csv(runs: Iterable[MeasuredRun]) -> str:
    """The text of the file that holds ``runs``."""
    names = ["method", "seq_length", "vocab_size", "layers_on_last_stage"]
    lines = [",".join([*names, *(f"{column}_us" for column in COLUMNS), "iteration_ms"])]
    for one in runs:
        cells: Sequence[object] = [
            one.method,
            one.seq_length,
            one.vocab_size,
            one.layers_on_last_stage,
            *(" ".join(map(repr, one.times[column])) for column in COLUMNS),
            one.iteration_ms,
        ]
        lines.append(",".join(map(str, cells)))
    return "\n".join(lines) + "\n"
