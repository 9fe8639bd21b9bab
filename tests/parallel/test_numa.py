"""A rank runs on CPUs that are close to its GPU, or says why it cannot."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.parallel.numa import bind_to_gpu, cpus_of, place_on_pci

GPU = (0, 0x3B, 0)
ADDRESS = "0000:3b:00.0"


def sysfs(folder: Path, node: str = "1\n", cpus: str = "2-3,6\n") -> Path:
    own = folder / ADDRESS
    own.mkdir()
    (own / "numa_node").write_text(node)
    (own / "local_cpulist").write_text(cpus)
    return folder


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The CPUs that this process is bound to; it may run on 0 to 5."""
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, cpus: found.append(set(cpus)), raising=False
    )
    return found


def test_it_is_bound_to_the_close_cpus_that_it_may_use(
    tmp_path: Path, bound: list[set[int]]
) -> None:
    told = bind_to_gpu(GPU, sysfs(tmp_path))
    assert bound == [{2, 3}]
    assert told == f"CPUs are bound to GPUs: GPU {ADDRESS} to 2 CPUs of NUMA node 1"


@pytest.mark.parametrize(
    ("node", "cpus", "why"),
    [
        ("-1", "0-5", "is close to no NUMA node in particular"),
        ("0", "8-9", "the launcher allows none"),
        ("0", "", "does not tell which are close"),
        ("what", "0-5", "does not tell which are close"),
    ],
)
def test_where_it_cannot_be_it_says_so(
    node: str, cpus: str, why: str, tmp_path: Path, bound: list[set[int]]
) -> None:
    told = bind_to_gpu(GPU, sysfs(tmp_path, node, cpus))
    assert told.startswith("CPUs are not bound to GPUs: ")
    assert why in told
    assert bound == []


def test_a_machine_without_such_files_is_left_alone(tmp_path: Path, bound: list[set[int]]) -> None:
    assert "does not tell" in bind_to_gpu(GPU, tmp_path)
    assert bound == []


def test_a_pytorch_that_does_not_tell_the_place_ends_no_job(bound: list[set[int]]) -> None:
    old = SimpleNamespace(name="NVIDIA H100", total_memory=80 << 30)
    new = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert place_on_pci(new) == GPU
    assert place_on_pci(old) is None
    told = bind_to_gpu(place_on_pci(old))
    assert told == "CPUs are not bound to GPUs: this PyTorch does not tell where a GPU is"
    assert bound == []


def test_lists_of_cpus_are_read() -> None:
    assert list(cpus_of("0-3,8,10-11\n")) == [0, 1, 2, 3, 8, 10, 11]
