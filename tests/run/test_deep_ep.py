"""The dispatcher flex: its flags, what cannot go with it, and the machines that can follow it."""

import sys
from typing import Any

import pytest
import torch
from parallel.deep_ep_stand_in import Buffer, installed

from megatron.run.command_line import read
from megatron.run.parallel_config import ParallelConfig
from megatron.run.run_config import resolve

MIXTURE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --num-experts 4 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 999 --mock-data --disable-bias-linear "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type flex"
)
DRY = "--dry-run --dry-run-gpu H100 --dry-run-replicas 2"


def mistakes(flags: str, ranks: int = 1) -> str:
    return "\n".join(read(f"{MIXTURE} {flags}".split(), world_size=ranks).mistakes)


def parallel_of(flags: str) -> ParallelConfig:
    found = read(f"{MIXTURE} --bf16 {DRY} {flags}".split(), world_size=1)
    assert not found.mistakes
    return resolve(found.flags).parallel


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_a_dry_run_needs_no_package() -> None:
    for words, visits, multiprocessors in (
        ("", True, 20),
        ("--moe-enable-deepep --moe-deepep-num-sms 24", True, 24),
        ("--moe-flex-dispatcher-backend deepep", True, 20),
        ("--expert-model-parallel-size 1", False, 20),
        ("--num-experts 1", False, 20),
        ("--moe-token-dispatcher-type alltoall --moe-flex-dispatcher-backend hybridep", False, 20),
    ):
        found = parallel_of(words)
        assert found.experts.visits == visits, words
        assert found.experts.moe_deepep_num_sms == multiprocessors, words


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "sums tokens in bf16 only: add --bf16"),
        ("--fp16", "sums tokens in bf16 only: add --bf16"),
        ("--bf16 --moe-flex-dispatcher-backend hybridep", "only the class Buffer is called"),
        ("--bf16 --moe-deepep-num-sms 7", "choose an even number"),
        ("--bf16 --hidden-size 40", "no multiple of 16"),
        ("--bf16 --num-experts 64 --moe-router-topk 33", "more than the 32 experts"),
        (
            "--bf16 --tensor-model-parallel-size 2 --sequence-parallel",
            "give --expert-tensor-parallel-size 1",
        ),
    ],
)
def test_what_cannot_go_with_flex_is_refused(flags: str, words: str) -> None:
    assert words in mistakes(f"{DRY} {flags}")
    assert words not in mistakes(f"{DRY} {flags} --moe-token-dispatcher-type alltoall")


def test_flex_without_ranks_to_ask_is_told() -> None:
    notes = read(f"{MIXTURE} --expert-model-parallel-size 1 {DRY}".split(), world_size=1).notes
    assert any("flex changes nothing at --expert-model-parallel-size 1" in note for note in notes)


def test_deep_ep_moves_tokens_between_gpus_only() -> None:
    with installed():
        told = mistakes("--bf16 --device cpu", ranks=2)
    assert "moves tokens between GPUs only; take alltoall" in told


@pytest.mark.usefixtures("gpus")
def test_the_package_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed():
        assert not mistakes("--bf16", ranks=2)
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    told = mistakes("--bf16", ranks=2)
    assert "--moe-token-dispatcher-type flex: the package deep_ep does not load here" in told
    assert "or take --moe-token-dispatcher-type alltoall" in told


class OldBuffer(Buffer):
    def combine(self, x: torch.Tensor, plan: Any) -> Any:  # type: ignore[override]
        raise AssertionError("never called")


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"buffer": None}, "has no Buffer"),
        ({"buffer": OldBuffer}, "its combine has no handle, topk_weights, async_finish"),
        ({"topk_idx_t": torch.int32}, "of 32 bits"),
    ],
)
def test_another_package_of_that_name_is_told(given: dict[str, Any], words: str) -> None:
    with installed(**given):
        assert words in mistakes("--bf16", ranks=2)


@pytest.mark.usefixtures("gpus")
def test_the_package_knows_the_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    with installed():
        flags = "--bf16 --num-experts 6 --expert-model-parallel-size 6 --global-batch-size 12"
        assert "has no settings for 6 ranks" in mistakes(flags, ranks=6)
