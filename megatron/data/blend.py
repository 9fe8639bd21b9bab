"""Several corpora as one, interleaved so that every stretch is close to the given weights."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.data.samples import SampleDataset


class BlendedDataset:
    """A fixed interleaving of datasets; a `SampleDataset`.

    Args:
        datasets: the corpora, all with samples of the same length s.
        dataset_index: corpus of each of the N samples of the blend, int16 [N].
        dataset_sample_index: number of each sample within its corpus, int64 [N].
    """

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
    ) -> None:
        first = datasets[0]
        assert all(dataset.seq_length == first.seq_length for dataset in datasets)
        self.seq_length = first.seq_length
        self.masked_token = first.masked_token
        self._datasets = tuple(datasets)
        self._dataset_index = dataset_index
        self._dataset_sample_index = dataset_sample_index

    def __len__(self) -> int:
        return len(self._dataset_index)

    def read(self, index: int, out: NDArray[np.int64]) -> None:
        """Writes sample ``index`` into ``out``; see `SampleDataset.read`."""
        dataset = self._datasets[self._dataset_index[index]]
        dataset.read(int(self._dataset_sample_index[index]), out)


def normalised(weights: Sequence[float]) -> NDArray[np.float64]:
    """Return the k weights of a blend, scaled so that they sum to one, float64 [k].

    Raises:
        ValueError: a weight is not a positive finite number.
    """
    shares: NDArray[np.float64] = np.asarray(weights, dtype=np.float64)
    if not (np.isfinite(shares).all() and (shares > 0).all()):
        raise ValueError(
            f"--data-path weights {list(weights)}: each must be a positive number; "
            "leave out a corpus that shall not be read"
        )
    return shares / float(shares.sum())
