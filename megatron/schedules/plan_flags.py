"""The names of the command-line flags that describe a plan, the same for every command.

Training and each tool declare these flags with their own help texts, so only the names stand here.
(All commands share the flags of ``BlockOptions``, which have their names with them.)
The first name of a flag is the name that training uses; messages and documents use it too. The
tools accept the other names in its place.
"""

from collections.abc import Mapping
from typing import Final

PLAN_FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    "schedule": ("--pipeline-schedule", "--schedule"),
    "vocabulary": ("--vocab-parallel", "--vocab"),
    "ranks": ("--pipeline-model-parallel-size", "--ranks"),
    "chunks": ("--num-virtual-stages-per-pipeline-rank", "--chunks"),
    "slices": ("--num-seq-splits", "--slices"),
    "memory_limit": ("--zero-bubble-max-pending-backward", "--memory-limit"),
    "file": ("--schedule-file", "--file"),
    "seconds": ("--search-seconds", "--seconds"),
    "recompute_ahead": ("--recompute-ahead",),
    "joined": ("--overlap-moe-expert-parallel-comm",),
    "costs": ("--measured-costs", "--costs"),
    "layers": ("--num-layers", "--layers"),
    "last_stage_layers": ("--final-stage-num-layers", "--final-stage-layers"),
}
"""For each field of ``Request`` and ``Scenario`` that training has a flag for, the flag's names."""
