"""What must hold of what the ranks of a job have done on their pretended GPUs."""

from itertools import product
from typing import Any

from pretended_gpu.deadlock import members_of, stuck
from pretended_gpu.order import Issued
from pretended_gpu.rank import Findings


def assert_sound(found: list[Findings]) -> None:
    """Nothing was found on any rank, nothing grows, and the ranks fit one another.

    No communicator and no program is first used in an iteration.
    """
    assert [own.faults for own in found] == [[] for _ in found]
    for own in found:
        assert len(set(own.held[1:])) == 1, own.held  # the optimizer's moments come with a step
        assert own.warm >= {each.group for each in own.issued if not each.on_host}
        assert own.forms - own.warm_forms == set()  # nothing is compiled in a schedule
    assert_communications_fit([own.issued for own in found])
    for held_up, implicit in product((False, True), (False, True)):
        assert stuck([own.journal for own in found], held_up, implicit) == []


def assert_communications_fit(issued: list[list[Issued]]) -> None:
    """Collectives come in one order on all ranks, transfers in one order on both."""
    for group in {each.group for own in issued for each in own}:
        taking_part = [issued[rank] for rank in members_of(group, len(issued))]
        collectives = [
            [each for each in own if each.group == group and not each.is_transfer]
            for own in taking_part
        ]
        assert all(own == collectives[0] for own in collectives), group
        for sender, own in enumerate(taking_part):
            for receiver, other in enumerate(taking_part):
                sent = transfers(own, group, "send", receiver)
                assert sent == transfers(other, group, "receive", sender), (group, sender)
                assert sender != receiver or not sent


def transfers(own: list[Issued], group: str, kind: str, peer: int) -> list[tuple[Any, ...]]:
    return [
        (each.shape, each.dtype)
        for each in own
        if (each.group, each.kind, each.peer) == (group, kind, peer)
    ]
