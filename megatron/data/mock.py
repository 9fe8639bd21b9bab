"""Samples that are made up, to try a run without any data.

They look like Megatron-LM's mock data: documents of random lengths that count 1, 2, 3, ... and end
with the end-of-document token. A model learns in a few hundred iterations to count; when a document
ends cannot be learned.
"""

import numpy as np
from numpy.typing import NDArray

LONGEST_DOCUMENT = 4095
"""Tokens; every length from 1 to this is equally likely, as in Megatron-LM."""


class MockDataset:
    """A `SampleDataset` whose samples depend on nothing but seed, split and their number.

    A sample begins anywhere in a document, and goes on with further documents.

    Args:
        num_samples: of the dataset; sample i is the same in a longer one.
        seq_length: tokens per sample s.
        vocab_size: documents count modulo this number.
        eod_token: id of the end-of-document token.
        seed: of the run.
        split: number of the split; each has samples of its own.
        masked_token: input token that bears no loss.
    """

    def __init__(
        self,
        num_samples: int,
        seq_length: int,
        vocab_size: int,
        eod_token: int,
        *,
        seed: int,
        split: int,
        masked_token: int | None = None,
    ) -> None:
        self.seq_length = seq_length
        self.masked_token = masked_token
        self._num_samples = num_samples
        self._vocab_size = vocab_size
        self._eod_token = eod_token
        self._seeds = (seed, split)

    def __len__(self) -> int:
        return self._num_samples

    def read(self, index: int, out: NDArray[np.int64]) -> None:
        """Writes sample ``index`` into ``out`` [s + 1]."""
        # The legacy generator, because its stream is frozen for ever. It takes words of 32 bits.
        high, low = divmod(index, 1 << 32)
        random = np.random.RandomState([*self._seeds, low, *([high] if high else [])])
        length = random.randint(1, LONGEST_DOCUMENT + 1)
        start, filled = random.randint(length), 0
        while filled < len(out):
            part = out[filled : filled + length - start]
            part[:] = np.arange(start + 1, start + 1 + len(part)) % self._vocab_size
            filled += length - start
            if filled <= len(out):
                part[-1] = self._eod_token
            length, start = random.randint(1, LONGEST_DOCUMENT + 1), 0
