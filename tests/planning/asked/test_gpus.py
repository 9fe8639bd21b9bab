"""The word for the GPUs of a job: its forms, and errors that name a way out."""

import pytest

from megatron.planning.asked.gpus import gpus_of


@pytest.mark.parametrize(
    ("word", "machines", "per_machine", "name"),
    [
        ("64xH100", 8, 8, "H100"),
        ("8x8xh100", 8, 8, "H100"),
        ("18x4xB200", 18, 4, "B200"),
        ("72xgb200", 18, 4, "GB200"),
        ("4xA100-40gb", 1, 4, "A100-40GB"),
        ("8XRTX4090", 1, 8, "RTX4090"),
        ("1x12xH200", 1, 12, "H200"),
    ],
)
def test_forms(word: str, machines: int, per_machine: int, name: str) -> None:
    found = gpus_of(word)
    assert (found.machines, found.per_machine, found.gpu.name) == (machines, per_machine, name)
    assert found.count == machines * per_machine
    assert gpus_of(str(found)) == found


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("H100", "as 64xH100, 8x8xH100"),
        ("64", "as 64xH100, 8x8xH100"),
        ("64xH10", r"H10 is no GPU .*did you mean H100\? .*A100, .*as 64xH100"),
        ("0xH100", "0 GPUs: must be at least 1"),
        ("99999x99xH100", "9899901 GPUs: must be .* at most 65,536"),
        ("12xH100", "12 GPUs do not fill machines of 8: .*as 2x6xH100"),
        ("13xH100", "as 13x1xH100"),
    ],
)
def test_errors_name_the_nearest_name_and_the_forms(word: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        gpus_of(word)
