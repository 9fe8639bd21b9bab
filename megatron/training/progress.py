"""How far a run has come, in iterations and in its data."""

from dataclasses import dataclass

from megatron.data.microbatch import MicrobatchLoader
from megatron.run.train import TrainSettings


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        iteration: finished iterations.
        consumed_samples: samples that the finished iterations have used.
        last_sample: digest of the last consumed sample; empty if it is not known.
        train_samples: number of samples for which the data were shuffled; 0 if it is not known.
    """

    iteration: int = 0
    consumed_samples: int = 0
    last_sample: str = ""
    train_samples: int = 0

    @classmethod
    def after(cls, iteration: int, loader: MicrobatchLoader, train_samples: int) -> "Progress":
        """Return the progress after ``iteration`` iterations, which ``loader`` has just served."""
        consumed = loader.consumed_samples
        return cls(iteration, consumed, loader.digest(consumed - 1), train_samples)

    def other_order(self, loader: MicrobatchLoader, train_samples: int) -> str | None:
        """Return a note if the samples used so far are not the first samples of ``loader``.

        Megatron's order of real data depends on the number of epochs that a run needs, and so on
        its length. A run that is made longer may therefore see other data.

        ``loader`` belongs to the run that goes on; its data are shuffled for ``train_samples``.
        """
        now = loader.digest(self.consumed_samples - 1)
        if "" in (now, self.last_sample) or now == self.last_sample:
            return None
        why = "--data-path, --split, --seed, --seq-length or the tokenizer is another"
        if train_samples != self.train_samples:
            why = (
                f"as in Megatron it depends on the samples that a run asks for (--train-iters), "
                f"{self.train_samples} before and {train_samples} now. Keep that number and stop "
                f"with --exit-interval to keep the order. Or {why}"
            )
        return (
            "--load: the data come in another order than in the run so far, so that some samples "
            f"may come twice and others not at all: {why}"
        )


def last_iteration(train: TrainSettings, start: Progress) -> int:
    """Return the number of iterations after which a run that goes on from ``start`` ends."""
    ends = [start.iteration if train.skip_train else total_iterations(train, start)]
    if train.exit_interval is not None:
        ends.append((start.iteration // train.exit_interval + 1) * train.exit_interval)
    return max(start.iteration, min(ends))


def total_iterations(train: TrainSettings, start: Progress) -> int:
    """Return the iterations of the whole job; earlier batches may have had another size."""
    if train.train_samples is None:
        return train.train_iters
    return start.iteration + train.batches.iterations(train.train_samples, start.consumed_samples)
