"""The rules about recomputation."""

from collections.abc import Iterator
from typing import Final

from megatron.config.declare import Flags
from megatron.config.recompute_flags import RecomputeFlags, is_selective
from megatron.layers.recompute import PARTS

_ELSEWHERE: Final = {
    "moe": "there are no experts",
    "moe_act": "there are no experts",
    "shared_experts": "there are no experts",
    "mla_up_proj": "there is no multi-latent attention",
}
"""Modules that Megatron-LM names and models here do not have."""


def _modules(flags: Flags) -> Iterator[str]:
    if not is_selective(flags[RecomputeFlags]):
        return
    for name in flags[RecomputeFlags].recompute_modules:
        if name not in PARTS:
            why = _ELSEWHERE.get(name, "no part of a layer has this name")
            yield f"--recompute-modules {name}: {why}; take some of {', '.join(PARTS)}"


def _method(flags: Flags) -> Iterator[str]:
    asked = flags[RecomputeFlags]
    if asked.recompute_granularity == "full" and asked.recompute_method is None:
        yield (
            "--recompute-granularity full does not say which layers: add --recompute-method "
            "uniform for all of them, or block for the first --recompute-num-layers of every chunk"
        )


RECOMPUTE_RULES: Final = (_modules, _method)
