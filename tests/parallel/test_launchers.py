"""What srun and MPI say becomes what torchrun would, and torchrun's own word counts first."""

import os

import pytest

from megatron.parallel.environment import Launched, launched, missing_for_meeting
from megatron.parallel.launchers import PORTS, adopt_launcher, first_node, local_rank

SRUN = {
    "SLURM_PROCID": "13",
    "SLURM_STEP_NUM_TASKS": "20",
    "SLURM_LOCALID": "5",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04,09]",
    "SLURM_JOB_ID": "123457",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_ranks_of_srun_meet_on_the_first_node() -> None:
    found = dict(SRUN)
    assert adopt_launcher(found) == "srun"
    assert launched(found) == Launched(rank=13, world_size=20, local_rank=5)
    assert found["LOCAL_WORLD_SIZE"] == "8"
    assert found["MASTER_ADDR"] == "gpu03"
    assert int(found["MASTER_PORT"]) in PORTS
    assert not list(missing_for_meeting(found))
    others = [{**SRUN, "SLURM_PROCID": str(rank), "SLURM_NODEID": "2"} for rank in (16, 19)]
    for other in others:
        adopt_launcher(other)
        assert other["LOCAL_WORLD_SIZE"] == "4"
        assert other["MASTER_PORT"] == found["MASTER_PORT"]


def test_a_shell_in_an_allocation_is_no_rank() -> None:
    shell = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
    before = dict(shell)
    assert adopt_launcher(shell) is None
    assert shell == before
    assert launched(shell) == Launched()


def test_ranks_of_mpi_are_read() -> None:
    for given, expected in ((OPEN_MPI, Launched(3, 4, 1)), (MPICH, Launched(1, 2, 1))):
        found = dict(given)
        assert adopt_launcher(found) in ("Open MPI", "MPICH")
        assert launched(found) == expected


def test_ranks_of_mpi_on_one_machine_meet_there_and_others_are_told_what_is_missing() -> None:
    one, several = dict(MPICH), dict(OPEN_MPI)
    adopt_launcher(one)
    adopt_launcher(several)
    assert one["MASTER_ADDR"] == "localhost"
    assert not list(missing_for_meeting(one))
    assert [line.split()[0] for line in missing_for_meeting(several)] == [
        "MASTER_ADDR",
        "MASTER_PORT",
    ]


@pytest.mark.parametrize("given", [SRUN, OPEN_MPI, MPICH], ids=["srun", "Open MPI", "MPICH"])
@pytest.mark.parametrize("own", [{"RANK": "0"}, {"WORLD_SIZE": "1"}], ids=str)
def test_torchrun_within_another_launcher_has_the_word(
    given: dict[str, str], own: dict[str, str]
) -> None:
    found = {**given, **own}
    assert adopt_launcher(found) is None
    assert found == {**given, **own}


def test_what_the_user_has_set_stays() -> None:
    found = {**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "5"}
    adopt_launcher(found)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("head", "5")


def test_nonsense_is_refused_with_the_variable() -> None:
    found = {**MPICH, "PMI_RANK": "one"}
    adopt_launcher(found)
    with pytest.raises(ValueError, match=r"^RANK=one: must be a whole number from 0 to 1"):
        launched(found)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu03", "gpu03"),
        ("gpu03,gpu04", "gpu03"),
        ("gpu[03-05]", "gpu03"),
        ("gpu[03,07-09],login1", "gpu03"),
        ("rack[1-2]-ib,gpu5", "rack1-ib"),
        ("", ""),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_by_default_it_reads_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *MPICH):
        monkeypatch.setenv(name, "")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    for name, value in MPICH.items():
        monkeypatch.setenv(name, value)
    adopt_launcher()
    assert os.environ["WORLD_SIZE"] == "2"


def test_the_number_on_a_machine_is_known_where_the_user_has_set_the_rank_alone() -> None:
    ranks = {"RANK": "13", "WORLD_SIZE": "20"}
    for variables, found in ((SRUN, 5), (OPEN_MPI, 1), (MPICH, 1), ({}, 0)):
        assert local_rank(variables | ranks) == found
    assert local_rank(SRUN | {"LOCAL_RANK": "2"}) == 2
    assert local_rank({"LOCAL_RANK": ""}) == 0
