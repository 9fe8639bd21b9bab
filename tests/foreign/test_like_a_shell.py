"""Words, variables and branches mean what they mean to bash, which runs our own harmless scripts.

In place of torchrun bash has a function that prints its words. The environment is empty.
"""

import shlex
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.foreign.walk import read_script

STAND_IN = 'torchrun() { printf "%s\\0" "$@"; }\n'
LAUNCH = "torchrun pretrain_gpt.py --num-layers 1 --lr 1 "

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not there")


def by_bash(script: str) -> list[str]:
    """The words behind --lr 1 as bash makes them."""
    done = subprocess.run(
        ["bash", "-c", STAND_IN + script], env={}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[5:-1]


def by_us(script: str) -> list[str]:
    """The same words as the reader finds them."""
    found = read_script(script)
    (launch,) = found.launches
    return list(map(found.holes.shown, launch.words[4:]))


NAMES = ("A", "B", "C")
TEXTS = st.text(alphabet="ab1/.-_ ", max_size=5)
PLAIN = st.text(alphabet="ab1/._=:,", min_size=1, max_size=5)
PIECES = st.one_of(
    PLAIN,
    TEXTS.map(lambda text: f"'{text}'"),
    TEXTS.map(lambda text: f'"{text}"'),
    st.sampled_from(NAMES).map(lambda name: f"${name}."),
    st.sampled_from(NAMES).map(lambda name: f"${{{name}}}"),
    st.sampled_from(NAMES).map(lambda name: f'"a${name} ${{{name}}}"'),
    st.tuples(st.sampled_from(NAMES), PLAIN).map(lambda own: f"${{{own[0]}:-{own[1]}}}"),
    st.tuples(st.sampled_from(NAMES), PLAIN).map(lambda own: f"${{{own[0]}:+{own[1]}}}"),
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["%a*", "%%/*", "#*/", "##*/", "%.", "/a/b"]))
    .map(lambda own: f"${{{own[0]}{own[1]}}}"),
    st.tuples(st.integers(-9, 9), st.integers(1, 9), st.sampled_from(["+", "*", "/", "%", "<"]))
    .map(lambda own: f"$(( ({own[0]}) {own[2]} {own[1]} ))"),
    st.sampled_from(["\\$", "\\ ", "\\\\", "'$A'", '"\\$A"', '"a\\\nb"', '"#"', "a#b"]),
)  # fmt: skip
"""A dollar sign alone is not among them: where one stands, bash does not split other variables."""
WORDS = st.lists(PIECES, min_size=1, max_size=4).map("".join)
ASSIGNMENTS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["=", "+="]), WORDS).map("".join), max_size=5
)


def test_a_dollar_sign_alone_is_a_dollar_sign() -> None:
    script = f"{LAUNCH}a$/b $ '$'"
    assert by_us(script) == by_bash(script)


@settings(max_examples=60, deadline=None)
@given(ASSIGNMENTS, st.lists(WORDS, max_size=4))
def test_words_are_those_of_bash(assignments: list[str], words: list[str]) -> None:
    begin = [f"{name}='{name.lower()} /x.y'" for name in NAMES]
    script = "\n".join([*begin, *assignments, LAUNCH + " ".join(words)])
    assert by_us(script) == by_bash(script)


@settings(max_examples=30, deadline=None)
@given(st.lists(WORDS, max_size=4), st.lists(WORDS, max_size=3))
def test_arrays_are_those_of_bash(first: list[str], more: list[str]) -> None:
    begin = [f"{name}='{name.lower()} /x.y'" for name in NAMES]
    uses = ('"${L[@]}"', "${L[@]}", '"${L[0]}"', "x${#L[@]}", '"p ${L[*]} s"', '"p${L[@]}s"')
    script = "\n".join(
        [
            *begin,
            f"L=(first {' '.join(first)} # a comment",
            ")",
            f"L+=({' '.join(more)})",
            LAUNCH + " ".join(uses),
        ]
    )
    assert by_us(script) == by_bash(script)


TESTS = (
    *("[ $A = a ]", "[ -z $A ]", '[ -n "$A" ]', '[ "$A" != b ]', "[ 3 -gt 2 ]", "[ ! 1 -lt 1 ]"),
    *("[[ $A == a* ]]", "[[ $A == b || -n $A ]]", "[[ -z $A && 1 -eq 1 ]]", "(( 2 * 3 > 5 ))"),
    *("[ 1 -eq 1 -a -z x ]", "[ -z x -o 2 -ge 2 ]", "test $A = a", "! test $A = a", "true"),
    *("[ $A = a ] && [ $A = b ]", "[ $A = b ] || [ $A = a ]", "false", "[[ ! $A == a ]]"),
)


@pytest.mark.parametrize("test", TESTS)
def test_branches_are_those_of_bash(test: str) -> None:
    script = f"""A=a
if {test}; then X=1; elif [ $A = a ]; then X=2; else X=3; fi
{test} && Y=1
{test} || Y=2
case $A in b|c) Z=1 ;; a*) Z=2 ;; *) Z=3 ;; esac
for n in 1 2 3; do S="$S $n"; done
f() {{ shift; local T=$1; W="$T $#"; }}
f one "two 2" three
{LAUNCH} $X $Y $Z $S "$W"
"""
    assert by_us(script) == by_bash(script)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(alphabet="ab $`\"'\\\n!*~#;&|()<>{}é-", max_size=8), max_size=5))
def test_quoted_words_stay_as_they_are(words: list[str]) -> None:
    assert by_us(LAUNCH + shlex.join(words)) == words
