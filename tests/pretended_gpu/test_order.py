"""Streams are ordered by events alone, and every use of memory is held against that order."""

import pytest
from pretended_gpu.order import Block, Memory, Streams


@pytest.fixture
def streams() -> Streams:
    return Streams()


@pytest.fixture
def memory(streams: Streams) -> Memory:
    return Memory(streams)


def written_on(stream: str, streams: Streams, memory: Memory) -> Block:
    return memory.allocate(512, streams.issue("make", stream))


def test_one_stream_is_in_order(streams: Streams, memory: Memory) -> None:
    block = written_on("a", streams, memory)
    memory.read(block, streams.issue("read", "a"))
    memory.write(block, streams.issue("write", "a"))
    memory.free(block)
    assert memory.faults == []


def test_reading_what_another_stream_writes_is_a_fault(streams: Streams, memory: Memory) -> None:
    block = written_on("a", streams, memory)
    memory.read(block, streams.issue("read", "b"))
    assert memory.faults == ["read on b reads what make on a, which it does not wait for"]


def test_a_mark_orders_what_was_before_it_and_nothing_else(
    streams: Streams, memory: Memory
) -> None:
    before = written_on("a", streams, memory)
    mark = streams.mark("a")
    after = written_on("a", streams, memory)
    streams.wait("b", mark)
    memory.read(before, streams.issue("read", "b"))
    assert memory.faults == []
    memory.read(after, streams.issue("read", "b"))
    assert len(memory.faults) == 1


def test_order_goes_on_from_stream_to_stream(streams: Streams, memory: Memory) -> None:
    block = written_on("a", streams, memory)
    streams.wait("b", streams.mark("a"))
    streams.issue("something", "b")
    streams.wait("c", streams.mark("b"))
    memory.write(block, streams.issue("write", "c"))
    assert memory.faults == []


def test_overwriting_what_another_stream_reads_is_a_fault(streams: Streams, memory: Memory) -> None:
    block = written_on("a", streams, memory)
    streams.wait("b", streams.mark("a"))
    memory.read(block, streams.issue("read", "b"))
    memory.write(block, streams.issue("write", "a"))
    assert memory.faults == [
        "write on a overwrites what is read by read on b, which it does not wait for"
    ]


@pytest.mark.parametrize("how", ["wait", "record", "record another"])
def test_memory_goes_back_when_nobody_uses_it(how: str, streams: Streams, memory: Memory) -> None:
    """The allocator gives it away in the order of the stream that it came from."""
    block = written_on("a", streams, memory)
    streams.wait("b", streams.mark("a"))
    memory.read(block, streams.issue("read", "b"))
    if how == "wait":
        streams.wait("a", streams.mark("b"))
    elif how == "record":
        block.kept_for.add("b")
    else:  # a third stream, of which the allocator knows, comes after the reader
        streams.wait("c", streams.mark("b"))
        block.kept_for.add("c")
    memory.free(block)
    written_on("a", streams, memory)
    assert memory.faults == []


def test_memory_that_goes_back_may_be_used_until_it_is_given_away(
    streams: Streams, memory: Memory
) -> None:
    """As a lane does: whatever it allocates comes after all that was issued before."""
    block = written_on("lane", streams, memory)
    streams.wait("passes", streams.mark("lane"))
    memory.read(block, streams.issue("read", "passes"))
    memory.free(block)
    written_on("passes", streams, memory)  # from memory of its own
    streams.wait("lane", streams.mark("passes"))
    written_on("lane", streams, memory)
    assert memory.faults == []


def test_memory_that_goes_back_too_early_is_a_fault(streams: Streams, memory: Memory) -> None:
    block = written_on("a", streams, memory)
    streams.wait("b", streams.mark("a"))
    memory.read(block, streams.issue("read", "b"))
    memory.free(block)
    assert memory.faults == []
    written_on("a", streams, memory)
    assert memory.faults == ["memory of a is free while read on b may be using it"]


def test_bytes_are_counted(streams: Streams, memory: Memory) -> None:
    one, _ = written_on("a", streams, memory), written_on("a", streams, memory)
    memory.free(one)
    assert (memory.held, memory.peak) == (512, 1024)
