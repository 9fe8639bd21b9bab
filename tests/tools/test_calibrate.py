"""What a known device would measure gives that device back; the dry run has what A100s gave."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.schedules.treatments import TREATMENTS, Treatment
from megatron.simulator.costs.gpus import gpu
from tools.predictions.calibrate import Setting, calibrate
from tools.predictions.measured import METHODS
from tools.predictions.paper_tables import MEASURED, measured_devices
from tools.synthetic_runs import DEVICE, LAYERS, VOCABULARIES, run, shape_of

SETTING = Setting(
    lambda measured: shape_of(measured.seq_length, measured.vocab_size),
    LAYERS,
    DEVICE.peak_flops,
    DEVICE.link_bandwidth,
)


def test_a_device_is_found_again_from_its_own_times() -> None:
    runs = [run(method, size) for method in METHODS if method != "redis" for size in VOCABULARIES]
    devices = calibrate(runs, SETTING)
    assert set(devices) == {"none", "vocab-1", "vocab-2", "interlaced"}
    for found in devices.values():
        assert found.attained == pytest.approx(DEVICE.attained)
        assert found.memory_bandwidth == pytest.approx(DEVICE.memory_bandwidth)
        assert found.link_latency == pytest.approx(DEVICE.link_latency)
        assert found.overhead == pytest.approx(DEVICE.overhead, abs=1e-9)


def test_a_dry_run_has_what_real_runs_attained() -> None:
    """A bandwidth is a share of the data sheet's there, and all constants are rounded."""
    file = Path(__file__).resolve().parents[2] / "docs/reference" / MEASURED
    for treatment, found in measured_devices(file).items():
        used = gpu("A100").device(TREATMENTS[treatment])
        assert used.peak_flops == found.peak_flops
        assert used.link_bandwidth == found.link_bandwidth
        assert used.attained == pytest.approx(found.attained, abs=1e-4)
        assert used.memory_bandwidth == pytest.approx(found.memory_bandwidth, rel=1e-4)
        assert used.link_latency == pytest.approx(found.link_latency, abs=1e-7)
        assert used.overhead == pytest.approx(found.overhead, abs=1e-6)


@pytest.mark.parametrize("treatment", TREATMENTS.values(), ids=list(TREATMENTS))
def test_every_pass_of_the_vocabulary_has_an_overhead_in_a_dry_run(treatment: Treatment) -> None:
    overhead = gpu("A100").device(treatment).overhead
    assert all(overhead[kind] > 0 for kind in treatment.passes)


def test_slower_layers_beside_collectives_are_the_treatments_own() -> None:
    slow = run("vocab-2", 64_000)
    slow = replace(slow, times={**slow.times, "F": tuple(1.25 * t for t in slow.times["F"])})
    devices = calibrate([*(run("baseline", size) for size in VOCABULARIES), slow], SETTING)
    assert devices["none"].attained["forward"] == pytest.approx(DEVICE.attained["forward"])
    assert devices["vocab-2"].attained["forward"] < 0.82 * DEVICE.attained["forward"]


def test_hops_that_were_not_measured_have_no_latency() -> None:
    silent = [run("baseline", size) for size in VOCABULARIES]
    silent = [replace(one, times={**one.times, "p2p": (0.0,) * 8}) for one in silent]
    assert calibrate(silent, SETTING)["none"].link_latency == 0


@pytest.mark.parametrize("ranks", [2, 8])
def test_too_few_runs_are_refused(ranks: int) -> None:
    sizes = VOCABULARIES if ranks == 2 else VOCABULARIES[:1]
    with pytest.raises(ValueError, match="at least 2 vocabularies, on 3 ranks or more"):
        calibrate([run("baseline", size, ranks) for size in sizes], SETTING)


def test_no_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="rates come from 'baseline' runs"):
        calibrate([run("vocab-1", size) for size in VOCABULARIES], SETTING)


def test_times_that_no_bandwidth_explains_are_refused() -> None:
    runs = [run("baseline", size) for size in VOCABULARIES]
    backwards = [
        replace(one, times={**one.times, "B": (0.0,) * 7 + (3 * one.times["F"][-1],)})
        for one in runs
    ]
    with pytest.raises(ValueError, match="no memory bandwidth explains"):
        calibrate(backwards, SETTING)
