"""What must hold of what the ranks of a pipeline have done on their pretended GPUs."""

from typing import Any

from pretended_gpu.deadlock import ENDS, stuck
from pretended_gpu.order import Issued
from pretended_gpu.rank import Findings


def assert_sound(found: list[Findings]) -> None:
    """Nothing was found on any rank, nothing grows, and the ranks fit one another."""
    assert [own.faults for own in found] == [[] for _ in found]
    for own in found:
        assert len(set(own.held[1:])) == 1, own.held  # the optimizer's moments come with a step
    assert_communications_fit([own.issued for own in found])
    for held_up in (False, True):
        assert stuck([own.journal for own in found], held_up) == []


def assert_communications_fit(issued: list[list[Issued]]) -> None:
    """Collectives come in one order on all ranks, transfers in one order on both."""
    for group in ("vocabulary", "control", ENDS, "state"):
        collectives = [
            [each for each in own if each.group == group and not each.is_transfer] for own in issued
        ]
        taking_part = [own for own in collectives if own]
        assert all(own == taking_part[0] for own in taking_part), group
        assert len(taking_part) in (0, 2 if group == ENDS else len(issued)), group
    for group in ("forward", "backward", "state"):
        for sender, own in enumerate(issued):
            for receiver, other in enumerate(issued):
                sent = transfers(own, group, "send", receiver)
                assert sent == transfers(other, group, "receive", sender), (group, sender)
                assert sender != receiver or not sent


def transfers(own: list[Issued], group: str, kind: str, peer: int) -> list[tuple[Any, ...]]:
    return [
        (each.shape, each.dtype)
        for each in own
        if (each.group, each.kind, each.peer) == (group, kind, peer)
    ]
