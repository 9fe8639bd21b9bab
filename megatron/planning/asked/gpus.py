"""The GPUs that a plan is asked for: ``64xH100``, ``8x8xH100`` or ``18x4xGB200``."""

from dataclasses import dataclass

from megatron.simulator.costs.gpus import Gpu


@dataclass(frozen=True)
class AskedGpus:
    """GPUs of one kind in equal machines.

    Attributes:
        machines: number of machines.
        per_machine: GPUs of a machine.
        gpu: the kind of GPU.
    """

    machines: int
    per_machine: int
    gpu: Gpu

    @property
    def count(self) -> int:
        """All GPUs."""
        return self.machines * self.per_machine


def gpus_of(word: str) -> AskedGpus:
    """Return the GPUs of a word, in upper or lower case.

    ``64xH100`` are machines of 8, or one machine with fewer; ``18x4xGB200`` are 18 machines of 4.

    Raises:
        ValueError: the word has another form, the GPUs do not fill machines of 8, or no GPU has
            this name. The message names the nearest name and the forms.
    """
    raise NotImplementedError
