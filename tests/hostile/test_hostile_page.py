"""Hostile requests to the explorer's page: each has one answer in strict JSON, soon.

Names, sizes, costs, plans, windows and timelines are such as no page sends.
"""

import json
import random
from typing import Any, Final, NoReturn

import pytest
from harness.damage import within

from megatron.commands.exploring.interface import answer
from megatron.commands.exploring.simulated import Simulations

COUNT: Final = 120
PATIENCE: Final = 120
"""Seconds for an answer; the largest plan that is shown takes some."""

SIMULATIONS: Final = Simulations()
WORDS: Final = (
    *("", "x" * 5000, "<script>alert(1)</script>", "\u200b1f1b", "../../etc/passwd", "${HOME}"),
    *("1f1b", "zb-v", "auto", "optimal", "file", "vocab-2", "none", "H100", "gpt", "\ud800"),
    *("F=1,B=1,W=1", "F=nan,B=1", "F=1e308,B=1e308,W=1", "F=1,B=1,W=1,p2p=1e400", "F=0,B=0,W=0"),
    *("0:1", ":", "m0:m3", "1e-300:1", "nan:nan", "\x1b[2J"),
)
LEAVES: Final[tuple[Any, ...]] = (
    *WORDS,
    *(0, -1, 1, 2, 3, 7, 10**6, 10**18, 10**100, 0.5, -0.0, 1e308, 5e-324, 2**63),
    *(float("nan"), float("inf"), None, True, False, [], {}, [1, 2], {"a": 1}, [[]] * 3),
)
FIELDS: Final[dict[str, tuple[Any, ...]]] = {
    "schedule": WORDS,
    "vocab": ("vocab-1", "vocab-2", "none", "naive", "redis", "interlaced"),
    "p": (1, 2, 3, 4, 0, -1, 10**9),
    "m": (1, 2, 5, 0, -2, 10**9),
    "v": (1, 2, 3, 0, -1, None),
    "limit": (1, 2, 0, -1, 1e9, 0.5, None),
    "split": (True, False),
    "ahead": (1, 2, 0, -1, None),
    "searched": (True, False),
    "seconds": (0, 0.01, -1, 1),
    "costs": (*WORDS, "F=1,B=1,W=1,C1=-1", "F=1:2,B=1"),
    "output": (0, 1, -1, 1e308, None),
    "again": (True, False),
    "model": (
        {},
        {"layers": 1},
        {"gpu": "x"},
        {"layers": 10**7, "hidden": 10**7, "heads": 1, "groups": 1, "seq": 10**7},
        {"layers": 4, "hidden": 64, "heads": 4, "groups": 4, "ffn": 128, "seq": 16},
    ),
    "replicas": (
        {"count": 2},
        {"count": 10**6, "buckets": 64},
        {"count": 0},
        {"count": 2, "sharded": True, "overlap_gather": True},
    ),
    "plan": ("", "x", "F0 B0\nF0 B0", "# ranks\n" + "F0 " * 1000, "\0", "F0 " * 10**5),
}
SPAN: Final[dict[str, tuple[Any, ...]]] = {
    "rank": (0, 1, -1, 10**9),
    "lane": ("compute", "comm", "wait", "<i>"),
    "label": ("F0", "<b>", "\x1b[2J", 5),
    "kind": ("F", "B", "C1", "<b>", 5),
    "microbatch": (0, 1, 10**15, "0"),
    "chunk": (0, 0, 1, -1),
    "start": (0.0, 1.0, 1e300, float("nan"), -1),
    "end": (1.0, 2.0, 1e300, float("inf"), 0),
}


def case_of(dice: random.Random) -> object:
    """Return a case with up to three fields that are not as usual."""
    if dice.random() < 0.05:
        return dice.choice(LEAVES)
    names = dice.sample(sorted(FIELDS), dice.randint(0, 3))
    made = {n: dice.choice(FIELDS[n] if dice.random() < 0.9 else LEAVES) for n in names}
    return {**made, dice.choice(WORDS): 1} if dice.random() < 0.05 else made


def timeline_of(dice: random.Random) -> object:
    """Return the text of a timeline of up to three spans, or something else."""
    if dice.random() < 0.2:
        return dice.choice((*LEAVES, "{", "[[[" * 10_000))
    spans = [
        {name: dice.choice(values) for name, values in SPAN.items() if dice.random() < 0.97}
        for _ in range(dice.randint(0, 3))
    ]
    return json.dumps({"ranks": dice.choice((1, 2, *LEAVES)), "spans": spans})


def request_of(dice: random.Random) -> str:
    """Return the text of a request."""
    action = dice.choice(("facts", *("simulate", "draw", "recorded") * 2, "point", "front"))
    made: dict[str, Any] = {"action": action, "case": case_of(dice)}
    if action == "draw":
        made["window"] = dice.choice(LEAVES)
    elif action == "point":
        made["schedule"] = dice.choice(LEAVES)
    elif action == "front":
        pairs = [{"time": dice.choice(LEAVES), "memory": dice.choice(LEAVES)} for _ in range(3)]
        made["points"] = dice.choice((pairs, [pairs], dice.choice(LEAVES)))
    elif action == "recorded":
        made["text"] = timeline_of(dice)
    if dice.random() < 0.1:
        made[dice.choice(sorted(made))] = dice.choice(LEAVES)
    text = json.dumps(made)
    return text[: dice.randrange(len(text))] if dice.random() < 0.03 else text


def no_number(word: str) -> NoReturn:
    """Refuse a word that JSON has not, and a browser cannot read."""
    raise AssertionError(f"{word} is not JSON")


@pytest.mark.parametrize("number", range(COUNT))
def test_a_request_has_one_answer(number: int) -> None:
    request = request_of(random.Random(number))
    with within(PATIENCE):
        text = answer(request, SIMULATIONS)
    found = json.loads(text, parse_constant=no_number)
    assert "<script" not in found.get("svg", "")
    if error := found.get("error", ""):
        assert len(error) < 1500, error
        assert all(character.isprintable() or character == "\n" for character in error)
