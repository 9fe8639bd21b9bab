"""The settings of the treatment of the vocabulary layers."""

from dataclasses import dataclass, replace
from typing import Final

from megatron.flags.declare import derived, flag
from megatron.schedules.treatments import TREATMENTS

DEFAULT_TREATMENT: Final = "none"
AUTO_TREATMENT: Final = "auto"
"""The value with which the plan chooses the treatment of the vocabulary layers."""


@dataclass(frozen=True)
class TreatmentSettings:
    """The treatment of the vocabulary layers.

    The settings of a run have the treatment under its own name.
    """

    # fmt: off
    vocab_parallel: str = derived(
        "none: the vocabulary layers are whole, on the first and the last stage. redis: the same, "
        "with fewer transformer layers on these stages. The other treatments split the vocabulary "
        "layers into passes of every rank: vocab-2 with one barrier, vocab-1 with two, naive with "
        "three, interlaced with two that do not overlap with passes. auto: the fastest of none, "
        "redis, vocab-1, vocab-2 and interlaced, or one nearly as fast that holds less.",
        choices=(*TREATMENTS, AUTO_TREATMENT), unset=DEFAULT_TREATMENT)
    enable_vocab_parallel: bool = flag(False,
        "Another name of --vocab-parallel vocab-2, from the paper's code.")
    disable_backward_fusion: bool = flag(False,
        "With --enable-vocab-parallel: another name of --vocab-parallel vocab-1, from the paper's "
        "code.",
        idle_without="--enable-vocab-parallel", excludes="--use-interlaced-schedule")
    use_interlaced_schedule: bool = flag(False,
        "Another name of --vocab-parallel interlaced, from the paper's code.")
    enable_layer_redistribution: bool = flag(False,
        "Another name of --vocab-parallel redis, from the paper's code.")
    # fmt: on

    @property
    def name(self) -> str:
        """Name of the treatment, one of ``TREATMENTS``, in a run."""
        return self.vocab_parallel

    def named(self, name: str) -> "TreatmentSettings":
        """Return the settings of a run, without other names of the treatment."""
        return replace(
            self,
            vocab_parallel=name,
            enable_vocab_parallel=False,
            disable_backward_fusion=False,
            use_interlaced_schedule=False,
            enable_layer_redistribution=False,
        )
