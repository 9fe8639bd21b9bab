"""A run in several machines: its plan and its prediction know where the network is."""

from dataclasses import replace

import pytest
from harness.marks import full
from planning.test_dry_run import config, report

from megatron.planning.forecast_run import forecast_run
from megatron.planning.links_in_words import links_in_words
from megatron.planning.run_costs import cluster_of
from megatron.planning.run_plan import make_run_plan
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.simulator.costs.gpus import gpu
from megatron.simulator.costs.settings import ClusterSettings


def spread(p: int, ranks: int, network: tuple[float, float]) -> RunConfig:
    """Pipeline ranks in machines of so many, with a network of a bandwidth and a latency."""
    run, kind = config(p, "vocab-2", "zb-h1"), gpu("H100")
    cluster = ClusterSettings(
        ranks, network_bandwidth=network[0] / 1e9, network_latency=network[1] * 1e6
    )
    return replace(run, parallel=replace(run.parallel, cluster=cluster, gpu=kind))


@pytest.mark.parametrize("p", [4, full(8)])
def test_a_network_in_the_middle_of_the_pipeline_takes_its_time(p: int) -> None:
    """Plans by FLOPs know of it, and so does the prediction."""
    half = p // 2
    one, two = spread(p, p, (1e9, 1e-3)), spread(p, half, (1e9, 1e-3))
    plans = [make_run_plan(each) for each in (one, two)]
    near, hops = plans[0].costs.comms["X"], plans[1].costs.comms["X"]
    assert not isinstance(hops, (int, float))
    assert isinstance(near, float)
    assert not isinstance(hops, (int, float))
    far = hops[half - 1]
    assert hops == [far if hop == half - 1 else near for hop in range(p - 1)]
    assert far > 5 * near
    unaware, aware = (forecast_run(two, each, gpu("H100")).outcome.seconds for each in plans)
    assert forecast_run(one, plans[0], gpu("H100")).outcome.seconds < aware < unaware
    text = report(two, "H100")
    assert f"links: 2 machines of {half} ranks" in text
    assert f"1 of the {p - 1} hops from a pipeline rank to the next leave a machine" in text
    assert "links: all ranks are in one machine" in report(one, "H100")


@pytest.mark.parametrize(
    ("flags", "ranks", "network"),
    [
        ("", 8, (40e9, None)),
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
    links = parallel.links
    assert links is not None
    assert (parallel.cluster.ranks_per_node, links.network.bandwidth) == (ranks, network[0])
    assert links.link.bandwidth == pytest.approx(0.78 * 450e9)
    if network[1] is not None:
        assert links.network.latency == network[1]
    else:
        assert links.network.latency > links.link.latency


@pytest.mark.parametrize(
    ("world", "words", "data"),
    [
        (64, "links: NVLink connects all ranks, in 16 machines", 64),
        (144, "links: 2 domains of NVLink of 72 ranks", 72),
        (256, "links: 4 domains of NVLink of 64 ranks", 64),
    ],
)
def test_nvlink_connects_the_72_gpus_of_an_nvl72(world: int, words: str, data: int) -> None:
    """18 machines of 4 GPUs are one domain (NVIDIA's data sheet of the GB200 NVL72)."""
    found = parse(
        (
            "--dry-run --dry-run-gpu GB200 --num-layers 8 --hidden-size 1024 "
            "--num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
            f"--micro-batch-size 1 --global-batch-size {world} --train-iters 1 --lr 1e-3 --bf16 "
            f"--vocab-size 32000 --dry-run-replicas {world}"
        ).split(),
        world_size=1,
        speak=False,
    ).parallel
    assert found.cluster.ranks_per_node == 4
    assert cluster_of(found, gpu("GB200")).together["data"] == data
    assert links_in_words(found).startswith(words)
