"""Queues of several ranks end, or it is told who stands where."""

from typing import Any

import pytest
from pretended_gpu.deadlock import members_of, name_of, stuck
from pretended_gpu.order import Issued, Step, Streams

SEND, RECEIVE = Issued("forward", "send", 1), Issued("forward", "receive", 0)
BACK, BACK_AGAIN = Issued("backward", "send", 0), Issued("backward", "receive", 1)
REDUCE = Issued("vocabulary", "reduce", 0)


def asynchronous(*issued: Issued) -> list[Step]:
    """Each on a stream of its own, issued one after another."""
    streams = Streams()
    for number, each in enumerate(issued):
        streams.issue("communicate", f"stream {number}", each)
    return streams.journal


def on_one_stream(*issued: Issued) -> list[Step]:
    streams = Streams()
    for each in issued:
        streams.issue("communicate", "passes", each)
    return streams.journal


def test_nothing_ends() -> None:
    assert stuck([[], []]) == []


def test_both_ends_of_a_transfer_end() -> None:
    assert stuck([asynchronous(SEND), asynchronous(RECEIVE)]) == []


def test_a_transfer_with_one_end_does_not() -> None:
    [what] = stuck([asynchronous(SEND), []])
    assert "rank 0: stream 0 at " in what
    assert "send" in what


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_collective_without_one_rank_does_not(ranks: int) -> None:
    assert len(stuck([on_one_stream(REDUCE)] * (ranks - 1) + [[]])) == ranks - 1
    assert stuck([on_one_stream(REDUCE)] * ranks) == []


@pytest.mark.parametrize("other", [REDUCE._replace(peer=1), REDUCE._replace(kind="broadcast")])
def test_ranks_that_disagree_on_a_collective_do_not(other: Issued) -> None:
    assert len(stuck([on_one_stream(REDUCE), on_one_stream(other)])) == 2


def test_only_its_members_are_in_a_communicator() -> None:
    both = on_one_stream(Issued(name_of("ends", (0, 2), 3), "all_reduce", -1))
    assert stuck([both, [], both]) == []
    assert len(stuck([both, [], []])) == 1


def test_a_peer_is_a_place_in_its_communicator() -> None:
    pair = name_of("forward", (1, 3), 4)
    assert members_of(pair, 4) == [1, 3]
    assert members_of(name_of("forward", range(4), 4), 4) == [0, 1, 2, 3]
    send, receive = Issued(pair, "send", 1), Issued(pair, "receive", 0)
    assert stuck([[], asynchronous(send), [], asynchronous(receive)]) == []
    assert len(stuck([[], asynchronous(send), asynchronous(receive), []])) == 2


@pytest.mark.parametrize("issue", [asynchronous, on_one_stream])
def test_one_order_ends_on_all_ranks(issue: Any) -> None:
    assert stuck([issue(SEND, REDUCE, BACK_AGAIN), issue(RECEIVE, REDUCE, BACK)]) == []


def test_streams_let_what_is_issued_later_go_on() -> None:
    """Communicators may be under way side by side, as long as they start in order."""
    one, other = asynchronous(SEND, REDUCE, BACK_AGAIN), asynchronous(RECEIVE, BACK, REDUCE)
    assert stuck([one, other]) == []


def test_one_stream_does_not() -> None:
    one, other = on_one_stream(SEND, REDUCE, BACK_AGAIN), on_one_stream(RECEIVE, BACK, REDUCE)
    assert len(stuck([one, other])) == 2


@pytest.mark.parametrize("implicit", [False, True])
def test_an_unanswered_receive_holds_up_no_send_of_another_link(implicit: bool) -> None:
    """Rank 1 waits for a message of rank 0 that does not come, and then sends one to rank 2."""
    one, other = name_of("X 0 to 1", (0, 1), 3), name_of("X 1 to 2", (1, 2), 3)
    receiving, sending = Issued(one, "receive", 0), Issued(other, "send", 1)
    last = asynchronous(Issued(other, "receive", 0))
    [what] = stuck([[], asynchronous(receiving, sending), last], implicit=implicit)
    assert "rank 1" in what
    assert one in what
    shared = [
        [],
        asynchronous(Issued("all", "receive", 0), Issued("all", "send", 2)),
        asynchronous(Issued("all", "receive", 1)),
    ]
    assert len(stuck(shared, implicit=implicit)) == 3  # the send and its receiver get stuck too


@pytest.mark.parametrize("implicit", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_turns_if_each_rank_sends_and_receives_at_once(ranks: int, implicit: bool) -> None:
    def ring(batch: int) -> list[list[Step]]:
        return [
            asynchronous(
                *[
                    Issued("ring", kind, (rank + way) % ranks, batch=batch and batch + turn)
                    for turn in range(2)
                    for kind, way in (("send", 1), ("receive", -1))
                ]
            )
            for rank in range(ranks)
        ]

    assert stuck(ring(1), implicit=implicit) == []
    assert len(stuck(ring(0), implicit=implicit)) == 4 * ranks  # nothing ends


def test_in_host_order_a_message_waits_for_no_collective_that_is_queued() -> None:
    """Rank 0 has a collective in its lane behind one that rank 2 has not come to."""
    first, second = Issued("vocabulary", "reduce", 0), Issued("tensor of 0+1", "reduce", 0)
    to_one = Issued("X 0 to 1 of 0+1", "send", 1)
    own = Streams()
    own.issue("reduce", "lane", first)
    own.issue("reduce", "lane", second)
    own.issue("send", "link", to_one)
    other = Streams()
    other.issue("reduce", "lane", first)
    other.issue("receive", "link", to_one._replace(kind="receive", peer=0))
    journals = [own.journal, other.journal, []]
    assert len([w for w in stuck(journals, implicit=False) if "link" in w]) == 0
    assert len([w for w in stuck(journals, implicit=True) if "link" in w]) == 2


def test_one_communicator_has_one_communication_at_a_time() -> None:
    there, back = Issued("both", "send", 1), Issued("both", "receive", 1)
    come, go = Issued("both", "receive", 0), Issued("both", "send", 0)
    assert stuck([asynchronous(there, back), asynchronous(come, go)]) == []
    assert len(stuck([asynchronous(there, back), asynchronous(go, come)])) == 4


@pytest.mark.parametrize("waits", [False, True])
def test_a_host_that_waits_issues_nothing_more(waits: bool) -> None:
    """Each sends first and receives then: that ends unless a host waits for the first."""
    one, other = Streams(), Streams()
    for streams, first, then in ((one, SEND, BACK_AGAIN), (other, BACK, RECEIVE)):
        streams.issue("communicate", "a", first)
        if waits:
            streams.let_the_host_wait(streams.everything())
        streams.issue("communicate", "b", then)
    assert bool(stuck([one.journal, other.journal])) == waits


def test_a_host_that_is_held_up_issues_nothing_more() -> None:
    """Each has a collective before the other's: side by side they end, one by one they do not."""
    one, other = Streams(), Streams()
    for streams, names in ((one, "ab"), (other, "ba")):
        for name in names:
            streams.issue("reduce", name, Issued(name, "reduce", 0))
    assert stuck([one.journal, other.journal]) == []
    assert len(stuck([one.journal, other.journal], held_up=True)) == 4
    assert stuck([one.journal, one.journal], held_up=True) == []


def test_streams_wait_for_one_another() -> None:
    streams = Streams()
    streams.issue("receive", "a", BACK_AGAIN)
    streams.wait("b", streams.mark("a"))
    streams.issue("send", "b", SEND)
    assert len(stuck([streams.journal, on_one_stream(RECEIVE, BACK)])) == 3
    assert stuck([streams.journal, on_one_stream(BACK, RECEIVE)]) == []
