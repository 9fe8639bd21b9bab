"""A run in several machines: its plan and its prediction know where the network is."""

from dataclasses import replace

import pytest
from training.planning.test_dry_run import config, report

from megatron.config.command_line import parse
from megatron.config.run_config import RunConfig
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.gpus import gpu, interconnect
from megatron.training.planning.forecast_run import forecast_run
from megatron.training.planning.run_plan import make_run_plan


def spread(ranks: int, network: tuple[float, float]) -> RunConfig:
    """Four pipeline ranks in machines of so many, with a network of a bandwidth and a latency."""
    run = config(4, "vocab-2", "zb-h1")
    links = interconnect(gpu("H100"), TREATMENTS["vocab-2"], network=network)
    return replace(run, parallel=replace(run.parallel, ranks_per_machine=ranks, interconnect=links))


def test_a_network_in_the_middle_of_the_pipeline_takes_its_time() -> None:
    """Plans by FLOPs know of it, and so does the prediction."""
    one, two = spread(4, (1e9, 1e-3)), spread(2, (1e9, 1e-3))
    plans = [make_run_plan(each) for each in (one, two)]
    near, hops = plans[0].costs.comms["X"], plans[1].costs.comms["X"]
    assert not isinstance(hops, (int, float))
    assert isinstance(near, float)
    assert not isinstance(hops, (int, float))
    assert hops == [near, pytest.approx(hops[1]), near]
    assert hops[1] > 5 * near
    unaware, aware = (forecast_run(two, each, gpu("H100")).outcome.seconds for each in plans)
    assert forecast_run(one, plans[0], gpu("H100")).outcome.seconds < aware < unaware
    text = report(two, "H100")
    assert "links: 2 machines of 2 ranks" in text
    assert "1 of the 3 hops from a pipeline rank to the next leave a machine" in text
    assert "links: all ranks are in one machine" in report(one, "H100")


@pytest.mark.parametrize(
    ("flags", "ranks", "network"),
    [
        ("", 8, (50e9, None)),
        ("--ranks-per-node 4 --network-bandwidth 25 --network-latency 7", 4, (25e9, 7e-6)),
    ],
)
def test_flags_say_what_links_there_are(
    flags: str, ranks: int, network: tuple[float, float | None]
) -> None:
    words = (
        "--dry-run --dry-run-gpu H100 --num-layers 8 --hidden-size 1024 --num-attention-heads 16 "
        "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 "
        "--global-batch-size 8 --train-iters 1 --lr 1e-3 --bf16 --vocab-size 32000 "
        f"--pipeline-model-parallel-size 8 {flags}"
    )
    parallel = parse(words.split(), 1).parallel
    links = parallel.interconnect
    assert links is not None
    assert (parallel.ranks_per_machine, links.network.bandwidth) == (ranks, network[0])
    assert links.link.bandwidth == 450e9
    if network[1] is not None:
        assert links.network.latency == network[1]
    else:
        assert links.network.latency > links.link.latency
