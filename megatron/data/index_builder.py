"""Builds sampling indices in C++ if there is a compiler, otherwise in NumPy.

The C++ file is compiled at installation or on first use. Both builders give the same arrays, so
ranks on different machines always agree.
"""

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron.native.compile import reason
from megatron.native.extensions import INDEX_BUILDER, LOAD_ERRORS, load_extension

_LOG = logging.getLogger(__name__)


class IndexBuilder:
    """The two index functions in NumPy; the C++ module has the same functions."""

    def sample_index(
        self,
        lengths: NDArray[np.int32],
        document_index: NDArray[np.int32],
        seq_length: int,
        num_samples: int,
    ) -> NDArray[np.int64]:
        """Return where each sample begins in the concatenation of the shuffled documents.

        Args:
            lengths: tokens of every document, int32 [n].
            document_index: documents in the order they are read, int32 [d].
            seq_length: tokens s from the start of a sample to the start of the next sample.
            num_samples: samples N; the documents hold at least N * s + 1 tokens.

        Returns:
            int64 [N + 1, 2]: position in ``document_index`` and offset within that document of
            token i * s, for i = 0 ... N. Sample i runs from row i to row i + 1, both included.
        """
        sizes = lengths[document_index].astype(np.int64)
        ends = np.cumsum(sizes)
        starts = np.arange(num_samples + 1, dtype=np.int64) * seq_length
        position = np.searchsorted(ends, starts, side="right")
        return np.stack((position, starts - (ends - sizes)[position]), axis=1)

    def blend_index(
        self, weights: NDArray[np.float64], size: int
    ) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Interleaves datasets so that every prefix of the blend is close to the weights.

        Step i draws from the dataset with the largest ``weights[k] * max(i, 1) - drawn[k]``, the
        first dataset among equals, as in Megatron-LM. Each step depends on all steps before it.

        Args:
            weights: share of each dataset, float64 [k], summing to one.
            size: number of draws.

        Returns:
            The dataset of each draw, int16 [size], and the draw's number in its dataset, int64
            [size].
        """
        dataset = np.empty(size, np.int16)
        dataset_sample = np.empty(size, np.int64)
        drawn = np.zeros(len(weights), np.int64)
        for step in range(size):
            best = int(np.argmax(weights * float(max(step, 1)) - drawn))
            dataset[step] = best
            dataset_sample[step] = drawn[best]
            drawn[best] += 1
        return dataset, dataset_sample

    def name_bus_errors(self, address: int, size: int, said: bytes, in_json: bytes) -> None:
        """Let the C++ module print ``said`` if the system cannot read some bytes of a mapped file.

        The process then ends with 2. Python cannot do this: its handlers run after the instruction
        that has failed, and that instruction would fail without end.

        Args:
            address: first byte of the mapped file.
            size: number of bytes.
            said: the message.
            in_json: the message as JSON writes it, without its quotes, for ``report_bus_errors``.
        """

    def report_bus_errors(self, file: bytes, form: bytes) -> None:
        """Let the C++ module write the message into a file, and print it only if that fails.

        Args:
            file: path of the file.
            form: content of the file. The byte 1 stands for the message as JSON writes it, and the
                byte 2 for the seconds since 1970.
        """


def name_bus_errors(
    builder: IndexBuilder, path: Path, arrays: Iterable[NDArray[Any]], way_out: str
) -> None:
    """Let a message name the file, if this process dies because a mapped file was cut short.

    The system ends a process that reads behind the end of a mapped file by a signal (SIGBUS), which
    names no file.

    Args:
        builder: the builder in C++, which holds the handler of the signal; the NumPy builder has
            none.
        path: the file.
        arrays: arrays that are the mapped file; they stay mapped until the process ends.
        way_out: end of the message.
    """
    reason = (
        f"error: {path} cannot be read: it was cut short while the run read it, or its disk fails: "
        f"{way_out}"
    )
    for array in arrays:
        said = os.fsencode(f"{reason}\n")
        in_json = json.dumps(reason)[1:-1].encode()
        builder.name_bus_errors(array.ctypes.data, array.nbytes, said, in_json)


def load_index_builder(cache: Path | None = None) -> IndexBuilder:
    """Return the C++ builder, compiled if necessary, or else the NumPy builder.

    Args:
        cache: folder of compiled modules, by default the project's; one process compiles, the
            others wait for it.

    Returns:
        A builder. If it is the NumPy builder, the log says why.
    """
    try:
        return cast(IndexBuilder, load_extension(INDEX_BUILDER, cache))
    except LOAD_ERRORS as error:
        _LOG.warning("sampling indices are built in NumPy, slower but the same: %s", reason(error))
        return IndexBuilder()
