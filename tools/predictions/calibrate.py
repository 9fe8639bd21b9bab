"""Find the rates of a device from measured pass times of one model with several vocabularies.

The output layer's forward and backward grow with the vocabulary at different rates. The forward has
one product and the traffic of the loss; the backward has two products and less traffic. These two
slopes determine two unknowns: the share of the peak that large products attain, and the memory
bandwidth. Subtracting the memory traffic from a layer's passes leaves its products. Subtracting
traffic and products from the vocabulary passes leaves the overhead of launching them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression, mean

from megatron.schedules.passes import PassKind
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.device import UNFUSED, Device, Product, Traffic
from megatron.simulator.costs.from_model import ModelTimes
from megatron.simulator.costs.shape import ACTIVATION_BYTES, Shape
from tools.predictions.measured import METHODS, MeasuredRun

MICRO = 1e-6


@dataclass(frozen=True)
class Setting:
    """Facts that a table of measured runs does not give.

    Attributes:
        shape: gives the shape of the model that a run trained.
        layers: transformer layers of a stage, where they are even.
        peak_flops: FLOP/s of one device by its data sheet.
        link_bandwidth: bytes/s of one direction of a link by its data sheet.
    """

    shape: Callable[[MeasuredRun], Shape]
    layers: int
    peak_flops: float
    link_bandwidth: float


def calibrate(
    runs: Sequence[MeasuredRun], setting: Setting, traffic: Traffic = UNFUSED
) -> dict[str, Device]:
    """Return the device's rates under every treatment of the vocabulary that was measured.

    Overlapping collectives slow passes down, so every treatment has its own rates for layers.

    Args:
        runs: measured runs; those of ``baseline`` with at least two vocabularies.
        setting: model and data sheet.
        traffic: what the measured kernels move through memory.

    Raises:
        ValueError: if the baseline's runs do not determine the rates.
    """
    baseline = [run for run in runs if METHODS[run.method] == "none"]
    if len({run.vocab_size for run in baseline}) < 2 or min(r.ranks for r in baseline) < 3:
        raise ValueError(
            "the device's rates come from 'baseline' runs: give some with at least 2 vocabularies, "
            "on 3 ranks or more"
        )
    large = _large_products(baseline, setting, traffic)
    large = replace(large, link_latency=_latency(runs, setting))
    devices = {}
    for method, treatment in METHODS.items():
        own = [run for run in runs if run.method == method]
        if own and not TREATMENTS[treatment].redistributed:
            layers = _layers(own, setting, large, traffic)
            device = replace(large, attained={**large.attained, **layers})
            overhead = _overhead(own, setting, device, traffic)
            devices[treatment] = replace(device, overhead=overhead)
    return devices


def _large_products(baseline: Sequence[MeasuredRun], setting: Setting, traffic: Traffic) -> Device:
    """Solve for the output layer's products and the bandwidth."""
    shape = setting.shape(baseline[0])
    sizes = [run.vocab_size for run in baseline]
    forward = linear_regression(sizes, [_of_end(run.times["F"], -1) for run in baseline]).slope
    backward = linear_regression(sizes, [_of_end(run.times["B"], -1) for run in baseline]).slope
    byte = (2 * forward - backward) / (2 * traffic.loss_forward - traffic.loss_backward)
    product = forward - traffic.loss_forward * byte
    if byte <= 0 or product <= 0:
        raise ValueError(
            f"forward and backward of the output layer grow by {forward:g} and {backward:g} us a "
            "vocabulary entry, which no memory bandwidth explains: measure again"
        )
    attained = 2 * shape.elements / (product * MICRO * setting.peak_flops)
    return Device(
        peak_flops=setting.peak_flops,
        attained={"output": attained},
        memory_bandwidth=shape.tokens / (byte * MICRO),
        link_bandwidth=setting.link_bandwidth,
    )


def _layers(
    runs: Sequence[MeasuredRun], setting: Setting, device: Device, traffic: Traffic
) -> Mapping[Product, float]:
    """Return the share of the peak that the products of transformer layers attain in these runs."""

    def share(column: str, flops: float, moved: float, run: MeasuredRun) -> float:
        time = mean(run.times[column][1:-1]) * MICRO / setting.layers
        return flops / (setting.peak_flops * (time - device.traffic(moved)))

    forward, backward = [], []
    for run in runs:
        shape = setting.shape(run)
        moved = traffic.layer_forward * shape.elements
        forward.append(share("F", shape.forward_flops, moved, run))
        flops = shape.backward_flops + shape.weight_gradient_flops
        backward.append(share("B", flops, traffic.layer_backward * shape.elements, run))
    return {"forward": mean(forward), "backward": mean(backward)}


def _latency(runs: Sequence[MeasuredRun], setting: Setting) -> float:
    """Return the latency of a message in seconds, without its transfer over the link."""
    rests = [
        run.hop * MICRO - ACTIVATION_BYTES * setting.shape(run).elements / setting.link_bandwidth
        for run in runs
        if run.hop
    ]
    return max(0.0, mean(rests)) if rests else 0.0


def _overhead(
    runs: Sequence[MeasuredRun], setting: Setting, device: Device, traffic: Traffic
) -> Mapping[PassKind, float]:
    """Return how much longer vocabulary work takes than its products and traffic, by pass.

    Without vocabulary passes that of S and T is part of the last stage's F and B, and that of IF
    and IB part of the first one's.
    """
    rests: dict[PassKind, list[float]] = {"S": [], "T": [], "IF": [], "IB": []}
    for run in runs:
        times = ModelTimes(setting.shape(run), device, traffic)
        for kind, rest in _rests(run, times).items():
            rests[kind].append(rest)
    return {kind: max(0.0, mean(rest)) for kind, rest in rests.items()}


def _rests(run: MeasuredRun, times: ModelTimes) -> Mapping[PassKind, float]:
    """Return the seconds of one run's vocabulary work that ``times`` does not explain."""
    measured = {column: mean(values) * MICRO for column, values in run.times.items()}
    if run.treatment.is_sharded:
        passes = times.vocabulary_passes(run.ranks, run.treatment)
        step = (measured["ST"] - passes["S"] - passes["T"]) / 2
        return {"S": step, "T": step, **{k: measured[k] - passes[k] for k in ("IF", "IB")}}
    output, embedding = times.whole_output(), times.whole_input()
    forward, backward = run.times["F"], run.times["B"]
    return {
        "S": _of_end(forward, -1) * MICRO - output["F"],
        "T": _of_end(backward, -1) * MICRO - output["B"] - output["W"],
        "IF": _of_end(forward, 0) * MICRO - embedding["F"],
        "IB": _of_end(backward, 0) * MICRO - embedding["W"],
    }


def _of_end(times: Sequence[float], end: int) -> float:
    """Return how much slower an end of the pipeline is than the stages with layers only."""
    return times[end] - mean(times[1:-1])
