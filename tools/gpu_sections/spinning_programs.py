"""A kernel that occupies a GPU as a collective of NCCL does, and ends at a planned time.

The kernel has as many thread blocks as a communicator may have, and holds them until its peers
would be there and the bytes would be through. It reads the clock that all multiprocessors share
(``globaltimer``, nanoseconds). Meanwhile it copies the bytes within the GPU's memory.

A block of NCCL has up to 640 threads. Triton's blocks have a power of two, so a block here has 512.
It has no shared memory, of which NCCL's blocks have some. A product of cuBLAS for Hopper takes
nearly all registers of a multiprocessor, and so finds no room beside either.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

THREADS: Final = 512
LAUNCH: Final = {"num_warps": THREADS // 32}
WORDS: Final = 8192
"""Words of 4 bytes that a block copies at a time: 16 for each thread."""


@triton.jit
def note_time(origin):
    """Write the GPU's time, in nanoseconds."""
    tl.store(origin, globaltimer())


@triton.jit(do_not_specialize=["ready", "lasts", "words", "copies"])
def spin_and_copy(out_w, x_w, origin, ready, lasts, words, copies, BLOCK: tl.constexpr):
    """Wait for the peers, copy, and spin until the planned end.

    Args:
        out_w: gets all copies, one after the other; may be ``x_w`` itself.
        x_w: the words to copy.
        origin: the time at which the iteration began.
        ready: microseconds after that time at which the last peer is there.
        lasts: microseconds from then, or from the kernel's start, to the end.
        words: number of words.
        copies: how often the words are written.
        BLOCK: words that a block copies at a time.
    """
    there = tl.load(origin) + ready.to(tl.int64) * 1000
    now = globaltimer()
    while now < there:
        now = globaltimer()
    end = now + lasts.to(tl.int64) * 1000
    for _ in range(copies):
        first = tl.program_id(0).to(tl.int64) * BLOCK
        while first < words:
            at = first + tl.arange(0, BLOCK)
            x = tl.load(x_w + at, mask=at < words)
            tl.store(out_w + at, x, mask=at < words)
            first += tl.num_programs(0).to(tl.int64) * BLOCK
        out_w += words
    while now < end:
        now = globaltimer()


class Form(NamedTuple):
    """The types of a program's arguments, and its constants."""

    program: Any
    types: Mapping[str, str]
    constants: Mapping[str, int]


FORMS: Final = (
    Form(note_time, {"origin": "*i64"}, {}),
    Form(
        spin_and_copy,
        {
            "out_w": "*i32",
            "x_w": "*i32",
            "origin": "*i64",
            **dict.fromkeys(("ready", "lasts", "words", "copies"), "i32"),
            "BLOCK": "constexpr",
        },
        {"BLOCK": WORDS},
    ),
)
"""Both programs, for a compiler without a GPU."""
