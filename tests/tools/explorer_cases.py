"""Cases of the explorer that several tests ask about: every treatment, kind of cost and option."""

from collections.abc import Mapping
from typing import Any, Final

COSTS: Final = "F=1,B=1,W=1,IF=0.05,IB=0.05,p2p=0.05,C0=0.1,C1=0.2,C2=0.15,C3=0.15,CIF=0.1,CIB=0.1"
SMALL_MODEL: Final = {
    "gpu": "A100", "kind": "llama", "layers": 16, "hidden": 2048, "heads": 16, "groups": 4,
    "ffn": 5632, "seq": 2048, "vocabulary": 128000, "batch": 1, "recompute": False,
}  # fmt: skip

CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "usual": {"costs": COSTS, "output": 1.2},
    "on the ends": {"vocab": "none", "m": 6, "output": 1.2},
    "redistributed": {"vocab": "redis", "p": 3, "m": 5, "output": 2.0},
    "two barriers": {
        "schedule": "zb-v",
        "vocab": "vocab-1",
        "p": 3,
        "m": 6,
        "costs": COSTS,
        "output": 1.2,
    },
    "three barriers": {"schedule": "gpipe", "vocab": "naive", "costs": COSTS, "output": 0.7},
    "interlaced": {"schedule": "interleaved", "vocab": "interlaced", "v": 3, "output": 1.2},
    "searched within a limit": {"schedule": "zb-auto", "limit": 4, "p": 3, "m": 5, "output": 0.5},
    "recomputed": {"costs": "F=1,B=1,W=1,R=1", "ahead": 2, "split": True, "output": 1.2},
    "of its ranks": {"costs": "F=1:2:1:1.5,B=2,W=1,S=0.1,T=0.1", "m": 3, "again": False},
    "sliced": {"vocab": "vocab-1", "n": 3, "m": 3, "costs": "F=1,B=2", "output": 1.2},
    "in pairs": {
        "schedule": "dualpipe-v",
        "p": 2,
        "m": 6,
        "joined": True,
        "costs": "F=3,B=3,W=2",
        "waits": "F=1,B=1:1.5",
        "output": 1.2,
    },
    "of a model": {"schedule": "v-half", "m": 5, "model": SMALL_MODEL},
    "slices of a model": {"n": 4, "m": 3, "p": 2, "model": SMALL_MODEL},
    "the best of all": {"schedule": "auto", "p": 2, "m": 3, "costs": COSTS, "output": 1.2},
    "with replicas": {
        "costs": f"{COSTS},RG=3:4:3:3,AG=1.5,U=0.2",
        "output": 1.2,
        "replicas": {"count": 4, "buckets": 2, "overlap_reduce": True, "sharded": True},
    },
    "a model with replicas": {
        "vocab": "vocab-1",
        "model": SMALL_MODEL,
        "replicas": {
            "count": 8,
            "buckets": 1,
            "overlap_reduce": False,
            "sharded": True,
            "overlap_gather": True,
        },
    },
}
"""Name of a case -> what the page asks; what is absent is as usual."""
