"""What happens before what on streams that are ordered by events only.

Work on one stream runs in order. Between streams there is no order but that which a stream gets by
waiting for a mark that was set on another: after it comes what the marked stream held then, and
whatever came before that. Every stream knows how much of every other one it comes after (a vector
clock).
"""

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

Mark: TypeAlias = dict[str, int]
"""How much of every stream has been done once all before the mark has."""


@dataclass(frozen=True)
class Work:
    """Something on a stream.

    Attributes:
        what: its name.
        stream: where it runs.
        number: of this stream's work, from 1.
    """

    what: str
    stream: str
    number: int


class Issued(NamedTuple):
    """A communication that a rank has issued.

    Attributes:
        group: name of the communicator.
        kind: send, receive, or the collective.
        peer: the other rank of a transfer, the root of a collective, -1 if all are alike.
        shape: of the tensor.
        dtype: of the tensor.
        on_host: it is between hosts, and the device has no part in it.
        batch: transfers of a communicator with the same number start together; 0: it starts alone.
    """

    group: str
    kind: str
    peer: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    on_host: bool = False
    batch: int = 0

    @property
    def is_transfer(self) -> bool:
        """Whether it is between two ranks only."""
        return self.kind in ("send", "receive")


class Step(NamedTuple):
    """What the host has put on a stream, or done itself.

    Attributes:
        stream: where it is; ``HOST`` if the host waits, and issues nothing before it is done.
        number: how much of the stream is done with it.
        awaits: what it waits for.
        issued: the communication that it is.
    """

    stream: str
    number: int
    awaits: Mark
    issued: Issued | None = None


HOST = "host"


class Streams:
    """All streams of a device.

    Attributes:
        journal: what was issued, in the host's order; work in a row is one step.
    """

    def __init__(self) -> None:
        self.journal: list[Step] = []
        self._known: dict[str, Mark] = {}

    def issue(self, what: str, stream: str, issued: Issued | None = None) -> Work:
        """Append work to ``stream``."""
        known = self._known.setdefault(stream, {})
        number = known[stream] = known.get(stream, 0) + 1
        if not issued and self.journal and self.journal[-1] == (stream, number - 1, {}, None):
            self.journal.pop()
        self.journal.append(Step(stream, number, {}, issued))
        return Work(what, stream, number)

    def mark(self, stream: str) -> Mark:
        """Return a mark behind all that ``stream`` holds."""
        return dict(self._known.get(stream, {}))

    def wait(self, stream: str, mark: Mark) -> None:
        """Let whatever is issued on ``stream`` from now on come after ``mark``."""
        known = self._known.setdefault(stream, {})
        _merge(known, mark)
        self.journal.append(Step(stream, known.get(stream, 0), dict(mark)))

    def let_the_host_wait(self, mark: Mark) -> None:
        """Let nothing be issued before ``mark`` is reached: all later work comes after it."""
        self.journal.append(Step(HOST, 0, dict(mark)))
        for known in self._known.values():
            _merge(known, mark)

    def everything(self) -> Mark:
        """Return a mark behind all that all streams hold."""
        return {stream: known[stream] for stream, known in self._known.items() if stream in known}

    def comes_after(self, stream: str, work: Work) -> bool:
        """Whether what is issued on ``stream`` from now on runs after ``work``."""
        return self._known.get(stream, {}).get(work.stream, 0) >= work.number


def _merge(known: Mark, mark: Mark) -> None:
    for stream, number in mark.items():
        known[stream] = max(known.get(stream, 0), number)


@dataclass
class Pool:
    """Memory of the graphs of a slot.

    Attributes:
        held: bytes of it that tensors have now.
        size: all bytes of it.
    """

    held: int = 0
    size: int = 0


@dataclass
class Block:
    """A block of device memory, and who has used it.

    Attributes:
        size: bytes.
        allocated_on: the stream in whose order the allocator gives it away again.
        written: the last work that wrote it.
        read: on every stream the last work that has read it since.
        kept_for: streams whose work, up to the moment at which it is freed, the allocator awaits.
        pool: memory of graphs in which it is; ``None``: it is in the memory of all.
    """

    size: int
    allocated_on: str
    written: Work
    read: dict[str, Work] = field(default_factory=dict)
    kept_for: set[str] = field(default_factory=set)
    pool: Pool | None = None

    def users(self) -> list[Work]:
        """Whoever may still be at work on it."""
        return [self.written, *self.read.values()]


class Memory:
    """Blocks of device memory, on which every use is checked against the order of the streams.

    Attributes:
        faults: what was found, in words.
        held: bytes allocated.
        peak: most bytes that were.
        pool: memory of graphs from which is allocated now; ``None``: from the memory of all.
    """

    def __init__(self, streams: Streams) -> None:
        self.faults: list[str] = []
        self.held = 0
        self.peak = 0
        self.pool: Pool | None = None
        self._streams = streams
        self._loose: dict[str, list[Work]] = {}

    def allocate(self, size: int, work: Work) -> Block:
        """Return a block that ``work`` allocates, and perhaps writes.

        It may be any block that the stream has got back.
        """
        for user in self._loose.pop(work.stream, []):
            if not self._streams.comes_after(work.stream, user):
                self.faults.append(
                    f"memory of {work.stream} is free while {user.what} on {user.stream} may be "
                    "using it"
                )
        self._hold(size)
        return Block(size, work.stream, work, pool=self.pool)

    def _hold(self, size: int) -> None:
        pool = self.pool
        if pool is not None:
            pool.held += size
            size = max(0, pool.held - pool.size)
            pool.size += size
        self.held += size
        self.peak = max(self.peak, self.held)

    def read(self, block: Block, work: Work) -> None:
        """Note that ``work`` reads ``block``."""
        self._check(block.written, work, "reads what")
        block.read[work.stream] = work

    def write(self, block: Block, work: Work) -> None:
        """Note that ``work`` writes ``block``."""
        self._check(block.written, work, "overwrites what")
        for reader in block.read.values():
            self._check(reader, work, "overwrites what is read by")
        block.written, block.read = work, {}

    def free(self, block: Block) -> None:
        """Note that the host has let go of ``block``."""
        if block.pool is not None:
            block.pool.held -= block.size
        else:
            self.held -= block.size
        awaited = (block.allocated_on, *block.kept_for)
        self._loose.setdefault(block.allocated_on, []).extend(
            work
            for work in block.users()
            if not any(self._streams.comes_after(stream, work) for stream in awaited)
        )

    def _check(self, earlier: Work, work: Work, does: str) -> None:
        if earlier.stream != work.stream and not self._streams.comes_after(work.stream, earlier):
            self.faults.append(
                f"{work.what} on {work.stream} {does} {earlier.what} on {earlier.stream}, which "
                "it does not wait for"
            )
