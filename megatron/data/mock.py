"""Generated samples, to try a run without any data.

They look like Megatron-LM's mock data: documents of random lengths that count 1, 2, 3, ... and end
with the end-of-document token. A model learns to count in a few hundred iterations; it cannot learn
where a document ends.
"""

import numpy as np
from numpy.typing import NDArray

LONGEST_DOCUMENT = 4095
"""Tokens of the longest document; every length from 1 on is equally likely, as in Megatron-LM."""


class MockDataset:
    """A `SampleDataset` whose samples follow from the seed, the split and the sample's number.

    A sample begins anywhere in a document, and goes on with further documents.

    Args:
        num_samples: number of samples; sample i does not depend on it.
        seq_length: tokens per sample s.
        vocab_size: documents count modulo this number.
        eod_token: id of the end-of-document token.
        seed: seed of the run.
        split: number of the split; every split has samples of its own.
        masked_token: input token whose prediction is left out of the loss.
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
        # NumPy's legacy generator, because its stream never changes. Its seeds have 32 bits each.
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
