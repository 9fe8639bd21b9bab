"""Extremes of every flag with numbers, on command lines on which the flag has its effect."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, get_args, get_origin

from command_lines import with_flags

from megatron.flags.declare import Declaration
from megatron.flags.ranges import LARGEST
from megatron.run.topics import DECLARED

RUN: Final = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 2 --train-iters 10 --lr 1e-3 --vocab-size 99 --mock-data --device cpu "
    "--position-embedding-type rope"
)
"""A usual command line."""

_EXPERTS: Final = "--num-experts 4 --disable-bias-linear --moe-ffn-hidden-size 64"
_GROUPS: Final = f"{_EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 2"
_LATENT: Final = "--multi-latent-attention"
_FP8: Final = "--fp8-format hybrid --bf16"
_GLU: Final = "--quick-geglu --disable-bias-linear"
_WARM_UP: Final = "--lr-warmup-iters 3"
_PREDICTED: Final = "--dry-run --bf16 --dry-run-replicas 2"
_SAMPLES: Final = "--train-samples 100"
_TEXTS: Final = "--generate-interval 5 --generate-max-new-tokens 4"
_TRACED: Final = "--profile --train-iters 1000000000"

BESIDE: Final[Mapping[str, str]] = {
    "--adam": "",
    "--activation-func-clamp-value": _GLU,
    "--beta": "--rope-type yarn",
    "--decoupled-min-lr": "--decoupled-lr 1e-3",
    "--dry-run-": _PREDICTED,
    "--dry-run-expert-imbalance": f"{_PREDICTED} {_EXPERTS}",
    "--end-weight-decay": "--weight-decay-incr-style linear --start-weight-decay 0",
    "--eval-iters": "--eval-interval 5",
    "--expert-": _EXPERTS,
    "--fp8": _FP8,
    "--generate": _TEXTS,
    "--generate-top": f"{_TEXTS} --generate-temperature 1",
    "--glu-linear-offset": _GLU,
    "--hysteresis": "--fp16",
    "--initial-loss-scale": "--fp16",
    "--kv-lora": _LATENT,
    "--latent": _LATENT,
    "--loss-scale": "--fp16",
    "--lr-decay-samples": _SAMPLES,
    "--lr-warmup-init": _WARM_UP,
    "--lr-warmup-samples": _SAMPLES,
    "--lr-wsd-decay-iters": "--lr-decay-style WSD",
    "--lr-wsd-decay-samples": f"{_SAMPLES} --lr-decay-style WSD",
    "--min-loss-scale": "--fp16",
    "--moe": _EXPERTS,
    "--moe-deepep-num-sms": (
        f"{_EXPERTS} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep"
    ),
    "--moe-router-bias-update-rate": (
        f"{_EXPERTS} --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
    ),
    "--moe-router-group": _GROUPS,
    "--moe-router-num": _GROUPS,
    "--mscale": "--rope-type yarn --rotary-scaling-factor 4",
    "--mtp-loss-scaling-factor": "--mtp-num-layers 1",
    "--muon": "--optimizer muon",
    "--num-experts": "--disable-bias-linear",
    "--num-layers-at": f"{_FP8} --first-last-layers-bf16",
    "--num-query-groups": "--group-query-attention",
    "--offload-chunk-num": "--cpu-offload",
    "--optimizer-offload-fraction": "--optimizer-cpu-offload",
    "--original-max": "--rope-type yarn --rotary-scaling-factor 4",
    "--profile-schedule": "--replan --profile-schedule-start 2",
    "--profile-step": _TRACED,
    "--q-lora": _LATENT,
    "--qk-": _LATENT,
    "--recompute": "--recompute-granularity full --recompute-method uniform",
    "--rope-scaling-factor": "--use-rope-scaling",
    "--rope-long": "--rope-type longrope --rotary-percent 0.125 --rope-short-factors 1",
    "--rope-short": "--rope-type longrope --rotary-percent 0.125 --rope-long-factors 1",
    "--rotary-base-local": "--window-size 4,0",
    "--rotary-scaling-factor": "--rope-type yarn",
    "--sgd": "--optimizer sgd",
    "--start-weight-decay": "--weight-decay-incr-style linear --end-weight-decay 1000",
    "--v-head": _LATENT,
}
"""Flags beside which other flags have an effect; the longest beginning of a flag counts."""


def is_number(declared: Declaration) -> bool:
    """Return whether a flag takes numbers, each as a word of its own."""
    kind = declared.kind
    element = get_args(kind)[0] if get_origin(kind) is tuple else kind
    return element is float or (declared.facts.writes is str and element is int)


def takes_whole(declared: Declaration) -> bool:
    """Return whether a flag takes whole numbers."""
    kind = declared.kind
    return (get_args(kind)[0] if get_origin(kind) is tuple else kind) is int


NUMBERS: Final = [declared for declared in DECLARED.values() if is_number(declared)]


def beside(option: str) -> list[str]:
    """Return the words beside which a flag has an effect; none, if it has one in any case."""
    beginning = max((own for own in BESIDE if option.startswith(own)), key=len, default="")
    return BESIDE.get(beginning, "").split()


def line_with(option: str, word: str, usual: str = RUN) -> list[str]:
    """Return a command line on which a flag has its effect, with this word behind the flag."""
    words = with_flags(usual.split(), beside(option))
    if "--train-samples" in (option, *words):
        words = with_flags([], [w for w in words if w not in ("--train-iters", "10")])
    return with_flags(words, [option, word])


def extremes(declared: Declaration) -> Iterator[str]:
    """Yield zero, negative, tiny and huge numbers, no numbers, and both ends of the range."""
    allowed = declared.facts.range
    ends: Sequence[float] = (allowed.least, allowed.most) if allowed else ()
    if takes_whole(declared):
        numbers = (0, -1, 1, 10**6, 10**9, 10**12, LARGEST, *map(int, ends))
        yield from map(str, dict.fromkeys(numbers))
        return
    tiny_and_huge = (5e-324, 1e-30, 1e-9, 1e9, 1e12, 1e30, 1e38, 1e300)
    yield from map(repr, dict.fromkeys((0.0, -1.0, *tiny_and_huge, *map(float, ends))))
    yield from ("nan", "inf", "-inf")
