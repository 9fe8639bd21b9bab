"""Every schedule and treatment of the vocabulary on GPUs that are not there."""

from pathlib import Path

import pytest
import torch
from correctness.schedule_cases import Case, each_once, job, kinds_with_treatments, layout
from cuda_path import needs_pretended_gpus
from harness.marks import full
from pretended_gpu.pool import GpuPool
from pretended_gpu.rank import Findings, run_rank
from pretended_gpu.sound import assert_sound

from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.communicator import links_of

pytestmark = needs_pretended_gpus


def run(config: RunConfig, rank: int) -> Findings:
    return run_rank(config, rank)


def check(case: Case, gpus: GpuPool, folder: Path) -> None:
    """Train on every rank; each communicator has its own kind of traffic, and all is sound."""
    schedule, treatment, p, tied = case
    config = job(p, tied).config(layout(schedule, treatment, p, folder), torch.bfloat16)
    found = gpus.map(run, config, ranks=p)
    assert_sound(found)
    by_group: dict[str, set[str]] = {each.group: set() for own in found for each in own.issued}
    for own in found:
        for each in own.issued:
            by_group[each.group].add(each.kind)
    both_ends = {"send", "receive"}
    links = [str(link) for link in links_of(make_run_plan(config).plan)]
    used = {name.partition(" of ")[0]: kinds for name, kinds in by_group.items()}
    assert [used[f"transfers {link}"] for link in links] == [both_ends] * len(links)
    assert not by_group.get("vocabulary", set()) & both_ends


ONE_FOR_A_TREATMENT = {case[1]: case for case in each_once((2,))}


@pytest.mark.parametrize(
    "case",
    [
        case if treatment == "vocab-2" else full(case)
        for treatment, case in ONE_FOR_A_TREATMENT.items()
    ],
    ids=str,
)
def test_every_treatment(case: Case, gpus: GpuPool, tmp_path: Path) -> None:
    check(case, gpus, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", each_once((3, 4)), ids=str)
def test_every_schedule_of_three_or_four_ranks(case: Case, gpus: GpuPool, tmp_path: Path) -> None:
    check(case, gpus, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", kinds_with_treatments(), ids=str)
def test_every_kind_of_schedule_with_every_treatment(
    case: Case, gpus: GpuPool, tmp_path: Path
) -> None:
    check(case, gpus, tmp_path)
