"""The command-line names of what a plan is made from, the same for every command.

Training and the tools declare flags of a plan each in its own words, so the names stand here. The
first name of a flag is the one of training, and it stands in messages and documents. The others are
accepted in its place.
"""

from collections.abc import Mapping
from typing import Final

PLAN_FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    "schedule": ("--pipeline-schedule", "--schedule"),
    "vocabulary": ("--vocab-parallel", "--vocab"),
    "ranks": ("--pipeline-model-parallel-size", "--ranks"),
    "chunks": ("--num-virtual-stages-per-pipeline-rank", "--chunks"),
    "memory_limit": ("--zero-bubble-max-pending-backward", "--memory-limit"),
    "file": ("--schedule-file", "--file"),
    "seconds": ("--search-seconds", "--seconds"),
    "recompute_ahead": ("--recompute-ahead",),
    "costs": ("--measured-costs", "--costs"),
    "layers": ("--num-layers", "--layers"),
    "last_stage_layers": ("--final-stage-num-layers", "--final-stage-layers"),
}
"""For each field of ``Request`` and ``Scenario`` that training has a flag for, the flag's names."""
