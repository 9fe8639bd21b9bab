"""The memory that the tensors of a rank share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OwnMemory:
    """The memory of a rank's GPU, or the part of the host's memory that a rank on CPUs has.

    Attributes:
        bytes: its size.
        usable: bytes of it that tensors and NCCL can use.
        named: whose memory it is, in words.
        with_host: whether the bytes of the rank's host are in the same memory.
    """

    bytes: float
    usable: float
    named: str
    with_host: bool = False
