"""Links between two ranks on the first GPU: the cost of a waiting message in time and memory.

A receive is posted up to a pass before its message comes, and its kernel holds multiprocessors
until then. A product that has one block for every multiprocessor runs in two waves meanwhile.
Two ways out are measured: fewer blocks of a link, and products that leave multiprocessors free.

The second rank does nothing on the GPU while the first one measures.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.nccl import group_options
from megatron.parallel.settings import BlockSettings
from tools.gpu_sections.ranks import free_port, variables
from tools.gpu_sections.timing import Scale, Section, seconds_of, table

BLOCKS: Final = (1, 2, 4, 8)
"""Thread blocks of a link that are tried."""

MESSAGES: Final = 8
"""Messages, one after the other, that show how long PyTorch keeps their memory."""

_SECONDS: Final = 60.0


@dataclass(frozen=True)
class _Ends:
    """One end of the links.

    Attributes:
        scale: how large the measured things are.
        rank: 0 measures; 1 sends what rank 0 receives.
        store: tells each end how far the other end is.
        groups: a link by its number of blocks.
        megabytes: of device memory that each link has taken.
    """

    scale: Scale
    rank: int
    store: dist.Store
    groups: dict[int, dist.ProcessGroup]
    megabytes: dict[int, float]

    def send_when(self, key: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Send ``tensor`` once the other end has set ``key``."""
        self.store.wait([key])
        group.send([tensor], 0, 0).wait()


def measure(scale: Scale) -> Section:
    """Time a product alone and beside a waiting receive, for every number of blocks."""
    with tempfile.TemporaryDirectory() as folder:
        result, port = Path(folder) / "result.json", free_port()
        command = [sys.executable, "-m", "tools.gpu_sections.links", scale.device.type, str(result)]
        ends = [
            subprocess.Popen(command, env={**os.environ, **variables(rank, 2, port)})
            for rank in range(2)
        ]
        try:
            failed = [end.wait(_SECONDS) for end in ends]
        finally:
            for end in ends:
                end.kill()
        if any(failed):
            raise RuntimeError(f"the ends of the links ended with {failed}")
        values: dict[str, Any] = json.loads(result.read_text())
    head: tuple[str, ...] = (
        "blocks of a link",
        "MB of its communicator",
        "product, us",
        "beside a receive",
    )
    if values["carves"]:
        head = (*head, "leaving so many free", "beside a receive, leaving so many free")
    memory = values["message_bytes"]
    said = (
        f"Products [{values['size']}, {values['size']}] of bf16; columns after the third are times "
        f"relative to the product alone, by cuBLAS; those that leave multiprocessors free are by "
        f"cuBLASLt. {MESSAGES} messages of {memory['one'] / 1e6:.3g} MB, each dropped after its "
        f"receive: {memory['peak'] / 1e6:.3g} MB at most, and "
        f"{memory['grouped'] / 1e6:.3g} MB if every receive is a group of NCCL calls."
    )
    if values["beside_a_block"]:
        said += (
            " Beside a kernel of one block that only counts the product takes "
            f"{values['beside_a_block']:.3g} times as long."
        )
    return Section([said, "", *table(head, values["rows"])], values)


def _run(device: str, result: Path) -> None:
    """Be one of the two ends."""
    rank = int(os.environ["RANK"])
    scale = Scale(
        torch.device(device, 0) if device == "cuda" else torch.device("cpu"), device == "cpu"
    )
    if device == "cuda":
        torch.cuda.set_device(scale.device)
    timeout = timedelta(seconds=_SECONDS)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout)
    store = dist.PrefixStore("links", dist.distributed_c10d._get_default_store())
    ends = _Ends(scale, rank, store, {}, {})
    for blocks in BLOCKS:
        _connect(ends, blocks, timeout)
    if rank == 0:
        result.write_text(json.dumps(_receive_and_multiply(ends)))
    else:
        _send(ends)
    dist.barrier()
    dist.destroy_process_group()


def _connect(ends: _Ends, blocks: int, timeout: timedelta) -> None:
    """Make a link of so many blocks, send one message, and note the memory that it took."""
    on_gpu = ends.scale.device.type == "cuda"
    before = torch.cuda.mem_get_info()[0] if on_gpu else 0
    limits = BlockSettings(nccl_max_ctas_p2p=blocks)
    options = group_options("transfers", limits, timeout) if on_gpu else None
    group = dist.new_group([0, 1], timeout, pg_options=options)
    message = torch.zeros(1 << 16, device=ends.scale.device)
    work = group.recv([message], 1, 0) if ends.rank == 0 else group.send([message], 0, 0)
    work.wait()
    after = 0
    if on_gpu:
        torch.cuda.synchronize()
        after = torch.cuda.mem_get_info()[0]
    ends.groups[blocks], ends.megabytes[blocks] = group, (before - after) / 1e6
    dist.barrier()


def _receive_and_multiply(ends: _Ends) -> dict[str, Any]:
    """Measure, as rank 0."""
    size = 64 if ends.scale.small else 4096
    a, b = (
        torch.randn(size, size, device=ends.scale.device, dtype=torch.bfloat16) for _ in range(2)
    )
    out = torch.empty_like(a)
    carves = ends.scale.device.type == "cuda"

    def multiply() -> object:
        return torch.mm(a, b, out=out)

    rows = []
    for blocks in BLOCKS:
        alone = seconds_of(ends.scale, multiply)
        beside = _beside_a_receive(ends, blocks, "all", multiply)
        row = [blocks, ends.megabytes[blocks], 1e6 * alone, beside / alone]
        if carves:
            with leaving_free(blocks):
                row.append(seconds_of(ends.scale, multiply) / alone)
                row.append(_beside_a_receive(ends, blocks, "carved", multiply) / alone)
        rows.append(row)
    return {
        "size": size,
        "rows": rows,
        "carves": carves,
        "beside_a_block": _beside_a_block(ends, multiply) if carves else None,
        "message_bytes": {
            "one": _message_bytes(ends.scale),
            "peak": _kept_messages(ends, grouped=False),
            "grouped": _kept_messages(ends, grouped=True),
        },
    }


@contextmanager
def leaving_free(multiprocessors: int) -> Iterator[None]:
    """Let products use all multiprocessors but some; 0 leaves products as they are.

    PyTorch hands that number to cuBLASLt, and not to cuBLAS, which multiplies by default.
    """
    if not multiprocessors:
        yield
        return
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch._C._set_sm_carveout_experimental(multiprocessors)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)
        torch.backends.cuda.preferred_blas_library(library)


def _beside_a_block(ends: _Ends, multiply: Callable[[], object]) -> float:
    """Return the time of a product beside a kernel that keeps one multiprocessor, over its own."""
    alone = seconds_of(ends.scale, multiply, ahead=False)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
    found = seconds_of(ends.scale, multiply, ahead=False) / alone
    torch.cuda.synchronize()
    return found


def _beside_a_receive(ends: _Ends, blocks: int, name: str, multiply: Callable[[], object]) -> float:
    """Return the seconds of a product while a receive waits for its message."""
    message = torch.zeros(1 << 16, device=ends.scale.device)
    waiting = ends.groups[blocks].recv([message], 1, 0)
    found = seconds_of(ends.scale, multiply)
    ends.store.set(f"send {blocks} {name}", "now")
    waiting.wait()
    return found


def _kept_messages(ends: _Ends, *, grouped: bool) -> int:
    """Return the most bytes that messages in a row keep on the GPU.

    Args:
        ends: this end.
        grouped: every receive is a group of calls of NCCL, for which PyTorch does not note the
            stream of the transfer in the memory of the message.
    """
    size = _message_bytes(ends.scale)
    group, on_gpu = ends.groups[BLOCKS[0]], ends.scale.device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["active_bytes.all.current"]
    ends.store.set(f"send in a row {grouped}", "now")
    for _ in range(MESSAGES):
        message = torch.empty(size // 4, device=ends.scale.device)
        _transfer(group, message, 1, grouped=grouped and on_gpu, sends=False).wait()
        del message
    if not on_gpu:
        return size
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["active_bytes.all.peak"]) - before


def _message_bytes(scale: Scale) -> int:
    return 4 << (16 if scale.small else 24)


def _transfer(
    group: dist.ProcessGroup, message: Tensor, other: int, *, grouped: bool, sends: bool
) -> dist.Work:
    call = group.send if sends else group.recv
    if not grouped:
        return call([message], other, 0)
    group._start_coalescing(message.device)
    call([message], other, 0)
    return group._end_coalescing(message.device)


def _send(ends: _Ends) -> None:
    """Send the messages for which rank 0 waits, as rank 1."""
    message = torch.zeros(1 << 16, device=ends.scale.device)
    for blocks in BLOCKS:
        for name in ("all", "carved") if ends.scale.device.type == "cuda" else ("all",):
            ends.send_when(f"send {blocks} {name}", message, ends.groups[blocks])
    on_gpu = ends.scale.device.type == "cuda"
    long = torch.zeros(_message_bytes(ends.scale) // 4, device=ends.scale.device)
    for grouped in (False, True):
        ends.store.wait([f"send in a row {grouped}"])
        for _ in range(MESSAGES):
            group = ends.groups[BLOCKS[0]]
            _transfer(group, long, 0, grouped=grouped and on_gpu, sends=True).wait()


if __name__ == "__main__":
    _run(sys.argv[1], Path(sys.argv[2]))
